# SPDX-License-Identifier: Apache-2.0
"""vhpc image stage --peers: the part of a node that vhpc image warm directs over the standard input."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from vhpc_slurm.catalog import with_list
from vhpc_slurm.cli.images.relay import LIFETIMES, NODES_MAX, Begin, Joined, Sources
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import membership
from vhpc_slurm.node.store.peers.client import Lineage
from vhpc_slurm.node.store.peers.offers import Offer
from vhpc_slurm.slurm import hostlist
from vhpc_slurm.undecodable import UNDECODABLE

ORDER_S = 120.0
"""Longest wait for a line of vhpc image warm, in seconds."""
_Order = TypeVar("_Order", Begin, Sources)


@contextlib.contextmanager
def joined(layout: Layout, image: ImageIdentity) -> Iterator[Lineage | None]:
    """Serve an image to other nodes of a warming; yields whom to ask, None if this node has no port.

    If the block ends without an error, serves on until vhpc image warm has no more need of this node.

    Raises:
        UserError: standard input has other lines than those of vhpc image warm.
        FabricError: vhpc image warm has ended, or says nothing.
    """
    orders = _Orders(sys.stdin.fileno())
    begin = orders.next(Begin)
    try:
        nodes = hostlist.expand(begin.nodes)
    except ValueError as err:
        raise UserError("standard input is not that of vhpc image warm", str(err)) from err
    pid = os.getpid()
    offer = Offer(
        begin.run,
        begin.node,
        nodes,
        None,
        with_list(image.manifest),
        (pid, process.start_time(pid) or 0),
    )
    # slurmstepd ends a step by SIGTERM: the offer and the serving process end with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with membership.serving(layout, offer) as serves:
        say(Joined(serves))
        sources = orders.next(Sources).sources
        yield membership.lineage(layout, offer, sources) if layout.config.images.peer_port else None
        orders.wait_for_end(LIFETIMES * layout.config.guests.stage_timeout_s)


def say(line: msgspec.Struct) -> None:
    """Write a line for vhpc image warm."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


class _Orders:
    """The lines of vhpc image warm."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read = bytearray()

    def next(self, kind: type[_Order]) -> _Order:
        """The next line."""
        until = time.monotonic() + ORDER_S
        while b"\n" not in self._read:
            if len(self._read) > 2 * NODES_MAX:
                raise UserError("standard input is not that of vhpc image warm", "a line of it is too long")
            if not self._wait(until):
                raise FabricError("vhpc image warm has ended, or says nothing")
        line, _, self._read = self._read.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=kind)
        except UNDECODABLE as err:
            raise UserError("standard input is not that of vhpc image warm", str(err)) from err

    def wait_for_end(self, seconds: float) -> None:
        """Wait until standard input ends, at most so long."""
        until = time.monotonic() + seconds
        while self._wait(until):
            self._read.clear()

    def _wait(self, until: float) -> bool:
        """Read more; False at the end of the input, or of the time."""
        left = max(0.0, until - time.monotonic())
        if not select.select([self._fd], [], [], left)[0]:
            return False
        data = os.read(self._fd, 65536)
        self._read += data
        return bool(data)
