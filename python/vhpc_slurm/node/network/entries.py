# SPDX-License-Identifier: Apache-2.0
"""Commands that add and remove what a segment's devices know of guests, for ``tools.batch``.

Sources: bridge(8), ip-neighbour(8).
"""

from __future__ import annotations

from collections.abc import Sequence

Command = tuple[str, ...]


def add_port(port: str, mac: str) -> Command:
    """A bridge has a guest behind one of its ports."""
    return ("fdb", "add", mac, "dev", port, "master", "static")


def remove_port(port: str, mac: str) -> Command:
    """The opposite of ``add_port``."""
    return ("fdb", "del", mac, "dev", port, "master")


def add_remote(vxlan: str, mac: str, address: str, vni: int | None = None) -> Command:
    """A VXLAN device sends frames to a guest to this underlay address, with another VNI than its own."""
    return ("fdb", "add", mac, "dev", vxlan, "self", "static", "dst", address, *_vni(vni))


def remove_remote(vxlan: str, mac: str, address: str, vni: int | None = None) -> Command:
    """The opposite of ``add_remote``."""
    return ("fdb", "del", mac, "dev", vxlan, "self", "dst", address, *_vni(vni))


def add_neighbour(bridge: str, address: str, mac: str) -> Command:
    """A bridge answers for a guest of another node."""
    return ("neighbour", "add", address, "lladdr", mac, "dev", bridge, "nud", "permanent")


def remove_neighbour(bridge: str, address: str) -> Command:
    """The opposite of ``add_neighbour``."""
    return ("neighbour", "del", address, "dev", bridge)


def _vni(vni: int | None) -> Sequence[str]:
    return () if vni is None else ("vni", str(vni))
