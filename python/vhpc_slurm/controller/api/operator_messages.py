# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol with which an operator changes the fabric."""

from __future__ import annotations

from vhpc_slurm.controller.wire_types import Wire


class Fence(Wire, frozen=True, tag="fence"):
    """An operator: this node is off, so no ended generation still runs there."""

    node: str


class Fenced(Wire, frozen=True, tag="fenced"):
    """To Fence: generations that no longer wait for the node, and those whose jobs still use it."""

    generations: tuple[str, ...]
    in_use: tuple[str, ...]


class ClearKey(Wire, frozen=True, tag="clear"):
    """An operator: remove these tombstones if no port has their keys."""

    generations: tuple[str, ...]


class TellFabric(Wire, frozen=True, tag="tell"):
    """An operator: configure the fabric again; ``force`` as in NetworkBackend.apply."""

    force: bool = False
