# SPDX-License-Identifier: Apache-2.0
"""Nodes of clusters that are silent, as the kernel finds by TCP keepalive.

The follower of a member always has a connection to vhpcd: its question waits there, and the connection of an
answer stays open until the next question has come. While a node has power and network its kernel answers
probes, whatever its processes do. So a connection that is closed says nothing about its node; one that times
out does.

The kernel's intervals are whole seconds. Setting TCP_KEEPIDLE again sets the timer again, and a time in the
past expires at once (do_tcp_setsockopt and tcp_keepalive_timer in Linux): so further probes are sent sooner.

If vhpcd's own network fails, all nodes are silent at once. Therefore a node counts as silent only if another
one has answered later, or if no other one owes an answer.
"""
# Decision: A node of a cluster is lost when its kernel is silent

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import struct
from collections.abc import Awaitable, Callable

from vhpc_slurm.controller.api.connection import Connection
from vhpc_slurm.errors import VhpcError

PROBE_S, PROBES = 0.2, 3
"""A node that is silent for a second is probed at this interval, and so often; then it is silent."""
ANSWER_S = 0.5
"""A node confirms within about this time that it has received an answer: also after a retransmission."""
HOLD_S = 120.0
"""An answered connection is kept so long for the next question."""
IDLE_S, LATE_S = 1.0, 0.07
"""The kernel probes a node that was silent for a second, at most so much later (the timer wheel's step)."""
OVERDUE_S = 1.15
"""The answer of a node that was silent for longer is missing."""
RETURN_S = 10.0
"""After vhpcd's network has failed its nodes have so long to ask again."""
AGAIN_S = 1.0
"""The pause after the database did not take that a node is silent."""
SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
"""Errors of connections whose peer does not answer; the last three if ICMP or ARP has reported that."""
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
)
_PROBES, _LAST_ACK_RECV, _INFO_SIZE = 3, 56, 104
"""Of tcpi_probes and tcpi_last_ack_recv in struct tcp_info (linux/tcp.h), in bytes; the latter has ms."""

log = logging.getLogger("vhpcd")

Place = tuple[str, str]
"""A generation, and one of its nodes."""
Lose = Callable[[str, str], Awaitable[None]]
"""Is told a place whose node is silent."""


class _Link:
    """The newest connection of a place; ``since`` is when the first of an unbroken sequence of them began."""

    def __init__(self, connection: Connection, place: Place, since: float, *, far: bool) -> None:
        self.connection, self.place, self.since, self.far = connection, place, since, far
        self.replaced = asyncio.Event()

    def probe(self) -> None:
        """Send a probe, if none has been answered for a second."""
        self.connection.set_option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)

    def heard_s(self) -> float:
        """How long ago the node has answered."""
        return self._info()[1]

    def missed_s(self) -> float:
        """How long ago the first packet was sent that the node has not answered, if it has timed out."""
        probes, heard_s = self._info()
        return heard_s - IDLE_S if probes else ANSWER_S

    def _info(self) -> tuple[int, float]:
        """How many probes are unanswered, and how long ago the last packet was answered."""
        try:
            found = self.connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
        except OSError:
            return 0, math.inf
        (milliseconds,) = struct.unpack_from("=I", found, _LAST_ACK_RECV)
        return found[_PROBES], float(milliseconds) / 1000


class Presence:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._lose: Lose | None = None
        self._links: dict[Place, _Link] = {}
        self._of: dict[Connection, _Link] = {}
        self._silent: dict[Place, float] = {}
        """Places that have timed out, and when the first packet was sent that they did not answer."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing = False

    def tell(self, lose: Lose) -> None:
        """From now on tell of silent nodes."""
        self._lose = lose

    def asked(self, connection: Connection, place: Place, *, far: bool) -> None:
        """A node has asked; ``far``: from another host than vhpcd's."""
        now = asyncio.get_running_loop().time()
        before = self._links.get(place)
        if before is not None:
            before.replaced.set()
        self._silent.pop(place, None)
        link = _Link(connection, place, now if before is None else before.since, far=far)
        self._links[place] = self._of[connection] = link
        for option in _OPTIONS:
            connection.set_option(*option)
        if not self._probing:
            self._probing = True
            self._start(self._probe())

    async def ready(self, connection: Connection) -> None:
        """Wait while a node is overdue: with an answer on its way the kernel would begin to wait again."""
        link = self._of.get(connection)
        for _ in range(2 * PROBES):
            if link is None or link.heard_s() <= OVERDUE_S:
                return
            await asyncio.sleep(PROBE_S)

    async def hold(self, connection: Connection) -> None:
        """Keep an answered connection open until its node asks again, closes it, or is silent."""
        link = self._of.get(connection)
        if link is None:
            return
        replaced = link.replaced

        async def wait() -> None:
            connection.set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * ANSWER_S))
            while connection.unconfirmed():
                await asyncio.sleep(PROBE_S)
            connection.set_option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            await replaced.wait()

        async with asyncio.timeout(HOLD_S):
            await connection.unless_gone(wait())

    def over(self, connection: Connection) -> None:
        """A connection has ended."""
        link = self._of.pop(connection, None)
        if link is None or self._links.get(link.place) is not link:
            return
        del self._links[link.place]
        if connection.error in SILENT:
            self._silent[link.place] = asyncio.get_running_loop().time() - link.missed_s()
            self._judge()

    def close(self) -> None:
        """Tell no more."""
        self._lose = None
        for task in self._tasks:
            task.cancel()

    async def _probe(self) -> None:
        while self._links or self._silent:
            await asyncio.sleep(PROBE_S)
            for link in self._links.values():
                link.probe()
            self._judge()
        self._probing = False

    def _judge(self) -> None:
        """Tell of silent places, if vhpcd's own network is not the cause."""
        for place, since in tuple(self._silent.items()):
            if self._hears_others(place, since):
                del self._silent[place]
                self._start(self._tell(place, since))

    def _hears_others(self, place: Place, since: float) -> bool:
        """Whether another node has answered after one was silent, or at that time, and none is overdue.

        Its connections were there before: a node that has come later may be the first one to return after
        vhpcd's network has failed.
        """
        now = asyncio.get_running_loop().time()
        at_that_time, overdue = False, False
        for link in self._links.values():
            if not link.far or link.place[1] == place[1]:
                continue
            heard_s = link.heard_s()
            overdue = overdue or heard_s > OVERDUE_S
            if link.since < since or now - link.since > RETURN_S:
                if now - heard_s > since + LATE_S:
                    return True
                at_that_time = at_that_time or now - heard_s > since - LATE_S
        return at_that_time and not overdue

    async def _tell(self, place: Place, since: float) -> None:
        # Nothing is awaited before this is in the database's queue: the node's next question comes later.
        if self._lose is None or place in self._links:
            return
        try:
            await self._lose(*place)
        except VhpcError as err:
            log.warning("node %s is silent, which is not stored: %s", place[1], err.line())
            await asyncio.sleep(AGAIN_S)
            if place not in self._links:
                self._silent.setdefault(place, since)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
