# SPDX-License-Identifier: Apache-2.0
"""Silent nodes: connections between network namespaces on a switch whose ports go down and come up again."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from network_lab import Cluster, inside, ip, real_cluster, usable

from pace import limit, until
from vhpc_slurm.controller.api import presence
from vhpc_slurm.controller.api.connection import Connection
from vhpc_slurm.controller.api.presence import Place, Presence
from vhpc_slurm.errors import FabricError

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(usable()), reason=usable())]

VHPCD = "192.0.2.3"
LOST_S = 1.8
"""A node that is silent is lost within this time: a second until it is probed, 0.6 s, and one to spare."""
QUIET_S = 2.5
"""A node that is not lost by then is not lost."""


cluster = real_cluster


@dataclass
class Rig:
    """Presence with connections of nodes.

    Attributes:
        lost: places that were lost, with the times.
        refusals: the next errors of the database.
        may_answer: questions that wait are answered.
    """

    cluster: Cluster
    presence: Presence
    server: socket.socket
    lost: dict[str, float] = field(default_factory=dict)
    refusals: list[Exception] = field(default_factory=list)
    peers: dict[str, socket.socket] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def unplug(self, *names: str, state: str = "down") -> float:
        """Cut hosts off at the switch, as a lost power supply does; returns the time."""
        with inside(self.cluster.switch.namespace):
            for name in names:
                ip("link", "set", name, state)
        return time.monotonic()

    def plug(self, *names: str) -> None:
        """The opposite; until the switch forwards again."""
        self.unplug(*names, state="up")
        nodes = [name for name in names if name in self.cluster.nodes] or ["n2"]
        until(lambda: all(map(self._connects, nodes)), "the switch to forward")

    def _connects(self, node: str) -> bool:
        with inside(self.cluster.nodes[node].namespace), socket.socket() as sock:
            sock.settimeout(0.5)
            return sock.connect_ex((VHPCD, 9)) == errno.ECONNREFUSED

    async def lose(self, generation: str, node: str) -> None:
        assert generation == f"job of {node}"
        if self.refusals:
            raise self.refusals.pop(0)
        self.lost[node] = time.monotonic()

    async def asks(self, *nodes: str, answered: bool = False, far: bool = True) -> None:
        """Nodes ask; the questions wait, or are answered."""
        for node in nodes:
            with inside(self.cluster.nodes[node].namespace):
                peer = socket.create_connection(self.server.getsockname(), 10)
            own, _ = self.server.accept()
            own.setblocking(False)
            self.peers[node] = peer
            task = asyncio.create_task(self._talk(Connection(own), (f"job of {node}", node), far, answered))
            self.tasks[node] = task
        await asyncio.sleep(0)

    async def _talk(self, connection: Connection, place: Place, far: bool, answered: bool) -> None:
        self.presence.asked(connection, place, far=far)
        try:
            if answered or await connection.unless_gone(self.may_answer.wait()):
                await connection.send(b"the answer")
                await self.presence.hold(connection)
        except OSError:
            pass
        finally:
            self.presence.over(connection)
            connection.socket.close()

    async def loses(self, node: str, since: float) -> float:
        """How long it took until a node was lost."""
        while node not in self.lost:
            assert time.monotonic() - since < limit(20), f"{node} is not lost"
            await asyncio.sleep(0.01)
        print(node, "is lost after", took := self.lost[node] - since)
        return took

    async def quiet(self) -> None:
        await asyncio.sleep(QUIET_S)
        assert self.lost == {}


Run = Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(cluster: Cluster) -> Run:
    def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            with inside(cluster.third.namespace):
                server = socket.create_server((VHPCD, 0))
            rig = Rig(cluster, Presence(), server)
            rig.presence.tell(rig.lose)
            try:
                await asyncio.wait_for(test(rig), 60)
            finally:
                rig.presence.close()
                for one in (server, *rig.peers.values()):
                    one.close()
                rig.plug("h3", "n1", "n2")

        asyncio.run(bounded())

    return run


@pytest.mark.promise("cluster.silent")
@pytest.mark.parametrize("after_s", [0.1, 0.6, 1.1, 3.0])
def test_a_node_without_network_is_lost(run: Run, after_s: float) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        await asyncio.sleep(after_s)
        began = rig.unplug("n1")
        assert await rig.loses("n1", began) < limit(LOST_S)
        await asyncio.sleep(1)
        assert set(rig.lost) == {"n1"}

    run(test)


@pytest.mark.promise("cluster.silent")
def test_a_node_is_lost_between_two_questions(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n2")
        await rig.asks("n1", answered=True)
        await asyncio.sleep(1.5)
        assert rig.lost == {}
        began = rig.unplug("n1")
        assert await rig.loses("n1", began) < limit(LOST_S)

    run(test)


@pytest.mark.promise("cluster.silent")
def test_a_node_that_does_not_confirm_an_answer_is_lost(run: Run) -> None:
    """When nodes lose their power together, the second one gets the answer that the first one is lost."""

    async def test(rig: Rig) -> None:
        await rig.asks("n2")
        await asyncio.sleep(0.5)
        await rig.asks("n1")
        began = rig.unplug("n1")
        rig.may_answer.set()
        assert await rig.loses("n1", began) < limit(1.5)

    run(test)


@pytest.mark.promise("cluster.silent")
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_a_closed_connection_is_no_lost_node(run: Run, how: str) -> None:
    """The kernel closes the connection of a process that is killed."""

    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        if how == "RST":
            rig.peers["n1"].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rig.peers["n1"].close()
        await asyncio.wait_for(rig.tasks["n1"], limit(5))
        rig.unplug("n1")
        await rig.quiet()

    run(test)


@pytest.mark.promise("cluster.silent")
@pytest.mark.parametrize("apart_s", [0.0, 0.5])
def test_without_own_network_no_node_is_lost(run: Run, apart_s: float) -> None:
    """Also not while the nodes come back one after the other."""

    async def test(rig: Rig) -> None:
        await rig.asks("n1")
        await asyncio.sleep(apart_s)
        await rig.asks("n2")
        await asyncio.sleep(0.6)
        rig.unplug("h3")
        for task in tuple(rig.tasks.values()):
            await asyncio.wait_for(task, limit(10))
        assert rig.lost == {}
        rig.plug("h3")
        await rig.asks("n2")
        await rig.quiet()
        await rig.asks("n1")
        await rig.quiet()

    run(test)


def test_one_that_does_not_come_back_is_lost_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "RETURN_S", 1.0)

    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        await asyncio.sleep(0.5)
        rig.unplug("h3", "n1")
        for task in tuple(rig.tasks.values()):
            await asyncio.wait_for(task, limit(10))
        rig.plug("h3")
        await rig.asks("n2")
        began = time.monotonic()
        assert await rig.loses("n1", began) > 0.9
        assert set(rig.lost) == {"n1"}

    run(test)


def test_a_node_of_vhpcds_own_host_proves_nothing(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1")
        await rig.asks("n2", far=False)
        rig.unplug("n1")
        await rig.quiet()
        await rig.quiet()

    run(test)


def test_a_node_that_asks_again_is_not_lost(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        rig.unplug("n1")
        await asyncio.sleep(0.2)
        rig.plug("n1")
        await rig.asks("n1", answered=True)
        await rig.asks("n1")  # the next question closes the answered connection
        await asyncio.sleep(0.1)
        await rig.quiet()

    run(test)


def test_a_database_that_refuses_is_told_again(run: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.refusals.append(FabricError("no database"))
        await rig.asks("n1", "n2")
        began = rig.unplug("n1")
        assert await rig.loses("n1", began) > presence.AGAIN_S

    run(test)


def test_nothing_is_probed_without_connections(run: Run) -> None:
    async def test(rig: Rig) -> None:
        tasks = asyncio.all_tasks()
        await rig.asks("n1")
        rig.peers["n1"].close()
        await asyncio.wait_for(rig.tasks["n1"], limit(5))
        await asyncio.sleep(3 * presence.PROBE_S)
        assert asyncio.all_tasks() == tasks
        await rig.asks("n1", "n2")
        began = rig.unplug("n1")
        await rig.loses("n1", began)

    run(test)
