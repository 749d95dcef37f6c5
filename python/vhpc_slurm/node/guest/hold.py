# SPDX-License-Identifier: Apache-2.0
"""Hold a guest while its state is saved: its programs are stopped, and their output is with the host."""

from __future__ import annotations

import struct

from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.guest.wire import Op, Tag, put

ANSWER_S = 10.0
"""Longest time of an answer beyond the guest's own wait."""


def prepare(channel: GuestChannel, serial: int, wait_s: float) -> None:
    """Let nothing begin in the guest that the host takes part in: no program, and no command of Slurm.

    Programs that run continue.  When all guests of a job are prepared they may be held.  A guest that is
    prepared already stays so.

    Args:
        channel: to the guest.
        serial: of the checkpoint; all guests get the same, and later checkpoints have higher ones.
        wait_s: how long the guest may wait for what is in the way.

    Raises:
        ChannelRefusedError: EBUSY: ``why`` names what is in the way, such as ``step 5 has a terminal``;
            ENOTSUP: the guest cannot stop its programs; ENOSYS: the image's agent is older.
        ChannelError: silence, or the channel was closed.
    """
    fields = put(Tag.WAIT_MS, int(wait_s * 1000)) + put(Tag.HOLD, struct.pack("<Q", serial))
    channel.ask(Op.PREPARE, fields, wait_s + ANSWER_S)


def hold(channel: GuestChannel, wait_s: float) -> None:
    """Stop the programs of a prepared guest, and wait until vhpc-run has written all of their output.

    Tasks of steps are detached from their vhpc-run, so that the steps end.  Until release() or resume() a
    channel that closes ends no program of the batch script.  A guest that is held already stays so.

    Args:
        channel: to the guest.
        wait_s: how long the guest may wait for what is in the way.

    Raises:
        ChannelRefusedError: as prepare(); EINVAL: the guest is not prepared.  All programs of the guest
            continue.
        ChannelError: silence, or the channel was closed.
    """
    channel.ask(Op.HOLD, put(Tag.WAIT_MS, int(wait_s * 1000)), wait_s + ANSWER_S)


def release(channel: GuestChannel) -> None:
    """End a hold, or what was prepared for one: all programs continue; errors as hold()."""
    channel.ask(Op.RELEASE, b"", ANSWER_S)


def resume(channel: GuestChannel, now_ns: int) -> None:
    """End the hold of a guest that was restored; its batch script continues when vhpc-run attaches to it.

    Args:
        channel: to the guest.
        now_ns: time for the guest's clock, in nanoseconds since the epoch.

    Raises:
        ChannelRefusedError: EINVAL: the guest is not held; else its clock cannot be set.
        ChannelError: silence, or the channel was closed.
    """
    channel.ask(Op.RESUME, put(Tag.TIME_NS, struct.pack("<Q", now_ns)), ANSWER_S)
