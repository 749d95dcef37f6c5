# SPDX-License-Identifier: Apache-2.0
"""Fuzz what a guest answers to root's hooks: a hostile guest writes all of it."""

from __future__ import annotations

import contextlib
import socket

from rig import fuzz

from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.wire import ChannelError

TIMEOUT_S = 5.0
"""Never waited for: the guest has hung up when its words are read."""


def one_input(data: bytes) -> None:
    """Ask everything of a guest that has said this and hung up."""
    host, guest = socket.socketpair()
    with host, guest:
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        guest.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            guest.send(data[: 128 << 10])
        guest.shutdown(socket.SHUT_WR)
        channel = GuestChannel(host, TIMEOUT_S)
        with contextlib.suppress(ChannelError):
            channel.hello()
            channel.identity("n1", name="alice", uid=2001, gid=2001)
            channel.mount("home", "/home")
            channel.fabric((0x9000, 0x7FFF), (0x02CC100000000000,), 1.0)
            channel.topology("<system/>")
            channel.ready()
            channel.ping()
            channel.info()
            channel.poweroff()
            channel.wait_end(TIMEOUT_S)


if __name__ == "__main__":
    fuzz(one_input)
