# SPDX-License-Identifier: Apache-2.0
"""Requests to a guest that concern the other guests of its job: tests of the network, and ssh keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vhpc_slurm.model import SshKeys
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.wire import Op, Tag, fields_of, guest_text, put, text

TARGETS_MAX = 8
"""Addresses of one request; also in guest/agent/reach.h."""


class Reached(NamedTuple):
    """Which addresses have answered a guest.

    Attributes:
        unanswered: those that have not, a subset of the request's addresses.
        why: the guest's reason for each of them, as one line.
    """

    unanswered: tuple[str, ...]
    why: str = ""


def reach(
    channel: GuestChannel, addresses: Sequence[str], mtu: int, wait_s: float, timeout_s: float
) -> Reached:
    """Have a guest send packets of ``mtu`` bytes to other guests until each has answered.

    Args:
        channel: to the guest.
        addresses: IPv4 or IPv6, at most TARGETS_MAX.
        mtu: size of the IP packets and of their answers, in bytes; they are not fragmented.
        wait_s: longest wait for the answers.
        timeout_s: what the guest's own reply may take beyond that.

    Raises:
        ChannelRefusedError: the image's agent does not know the operation, or cannot do it.
        ChannelError: silence, or the channel was closed.
    """
    body = [put(Tag.TARGET, address) for address in addresses]
    body += [put(Tag.MTU, mtu), put(Tag.WAIT_MS, int(wait_s * 1000))]
    payload = channel.ask(Op.REACH, b"".join(body), wait_s + timeout_s)
    said = {guest_text(value) for tag, value in fields_of(payload) if tag == Tag.TARGET}
    unanswered = tuple(address for address in addresses if address in said)
    return Reached(unanswered, text(dict(fields_of(payload)), Tag.TEXT))


def give_ssh_keys(channel: GuestChannel, keys: SshKeys, uid: int, gid: int, timeout_s: float) -> None:
    """Have a guest accept ssh of the job's user from other guests; an image without ssh stays as it is.

    Raises:
        ChannelRefusedError: ENOSYS: the image's agent does not know the operation; else it cannot do it.
        ChannelError: silence, or the channel was closed.
    """
    body = put(Tag.USER_UID, uid) + put(Tag.USER_GID, gid)
    body += put(Tag.HOST_KEY, keys.host_key) + put(Tag.HOST_PUBLIC, keys.host_public)
    body += put(Tag.USER_KEY, keys.user_key) + put(Tag.USER_PUBLIC, keys.user_public)
    channel.ask(Op.SSH, body, timeout_s)
