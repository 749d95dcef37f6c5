# SPDX-License-Identifier: Apache-2.0
"""The request that tells a guest of its cluster, in the bytes of docs/guest-protocol.md."""

from __future__ import annotations

import struct
from typing import Any, cast

from vhpc_slurm.node.guest.cluster import ClusterGuest, tell
from vhpc_slurm.node.guest.wire import Op

GUESTS = (
    ClusterGuest("n1-j1234", 1234, "10.200.0.1", "fd76:6870:6300::1", 4),
    ClusterGuest("n2-g0-j1300", 1300, "10.200.0.2", "fd76:6870:6300::2", 16),
)


class Guest:
    """A channel that notes its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[Op, bytes, float]] = []

    def ask(self, op: Op, body: bytes, timeout_s: float) -> bytes:
        self.asked.append((op, body, timeout_s))
        return b""


def field(tag: int, value: int | bytes) -> bytes:
    data = struct.pack("<I", value) if isinstance(value, int) else value
    return struct.pack("<HHI", tag, 0, len(data)) + data


def test_the_request_has_all_guests_and_keys() -> None:
    guest = Guest()
    tell(
        cast(Any, guest), "exam", 1300, GUESTS, ["ssh-ed25519 A", "ssh-ed25519 B"], ["ssh-ed25519 C"], 2001, 5
    )
    ((op, body, timeout_s),) = guest.asked
    first = field(50, b"n1-j1234") + field(153, 1234)
    first += field(79, b"10.200.0.1") + field(80, b"fd76:6870:6300::1") + field(65, 4)
    second = field(50, b"n2-g0-j1300") + field(153, 1300)
    second += field(79, b"10.200.0.2") + field(80, b"fd76:6870:6300::2") + field(65, 16)
    assert (op, timeout_s) == (39, 5)
    assert body == (
        field(151, b"exam")
        + field(153, 1300)
        + field(53, 2001)
        + field(152, first)
        + field(152, second)
        + field(154, b"ssh-ed25519 A")
        + field(154, b"ssh-ed25519 B")
        + field(155, b"ssh-ed25519 C")
    )
