# SPDX-License-Identifier: Apache-2.0
# promise: attack.replies, attack.usage
"""Fuzz what a guest answers to root's hooks: a hostile guest writes all of it."""

from __future__ import annotations

import contextlib
import socket

from rig import fuzz

from vhpc_slurm.model import GuestInterface, SshKeys
from vhpc_slurm.node.guest import usage
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.peers import give_ssh_keys, reach
from vhpc_slurm.node.guest.wire import ChannelError
from vhpc_slurm.node.host.accounts import Account

NIC = GuestInterface("vhpc1g0", "06:00:00:01:00:00", 1, "10.200.0.1/16", "fd00::1/64")
KEYS = SshKeys("HOST", "host", "USER", "user")
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
            channel.identity("n1", Account("alice", 2001, 2001, "", "/", "/bin/sh", ()))
            channel.disk("/scratch", 2001, 2001)
            channel.mount("home", "/home")
            channel.fabric((0x9000, 0x7FFF), (0x02CC100000000000,), 1.0)
            channel.topology("<system/>")
            channel.network(NIC, 1450, "vhpc0", ("n1",), slots=(("n1", 4),))
            give_ssh_keys(channel, KEYS, 2001, 2001, TIMEOUT_S)
            reach(channel, ("10.200.0.2", "fd00::2"), 1450, 0.1, TIMEOUT_S)
            channel.ready()
            channel.ping()
            channel.info()
            usage.ask(channel, 0, TIMEOUT_S)
            channel.poweroff()
            channel.wait_end(TIMEOUT_S)


if __name__ == "__main__":
    fuzz(one_input)
