# SPDX-License-Identifier: Apache-2.0
"""Silent nodes: connections between network namespaces whose interfaces go down and come up again."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from network_lab import Host, inside, ip, usable

from pace import limit, until
from vhpc_slurm.controller.api import presence
from vhpc_slurm.controller.api.connection import Connection
from vhpc_slurm.controller.api.presence import Place, Presence
from vhpc_slurm.errors import FabricError

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())

LOST_S = 1.8
"""A node that is silent is lost within this time: a second until it is probed, 0.6 s, and one to spare."""
QUIET_S = 2.5
"""A node that is not lost by then is not lost."""


class Wire:
    """vhpcd's host, and nodes with one interface each, on a switch."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        try:
            switch = self._add("sw", "")
            with inside(switch.namespace):
                ip("link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
                ip("link", "set", "switch", "up")
            self.switch = switch
            self.vhpcd = self._plugged("ctl", 10)
            self.nodes = {f"n{number}": self._plugged(f"n{number}", number) for number in (1, 2, 3)}
        except BaseException:
            self.close()
            raise

    def _plugged(self, name: str, number: int) -> Host:
        host = self._add(name, f"192.0.2.{number}")
        host.plug(self.switch)
        return host

    def _add(self, name: str, address: str) -> Host:
        host = Host(name, address)
        self.hosts.append(host)
        return host

    def unplug(self, *names: str) -> float:
        """Cut hosts off at the switch, as a lost power supply does; returns the time."""
        for name in names:
            self._set(name, "down")
        return time.monotonic()

    def plug(self, *names: str) -> None:
        for name in names:
            self._set(name, "up")

    def _set(self, name: str, state: str) -> None:
        with inside(self.switch.namespace):
            subprocess.run(["ip", "link", "set", name, state], check=True)

    def close(self) -> None:
        for host in self.hosts:
            host.close()


@dataclass
class Rig:
    """Presence with connections of nodes.

    Attributes:
        lost: places that were lost, with the times.
        refusals: the next errors of the database.
    """

    wire: Wire
    presence: Presence
    server: socket.socket
    lost: dict[str, float] = field(default_factory=dict)
    refusals: list[Exception] = field(default_factory=list)
    peers: dict[str, socket.socket] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def lose(self, generation: str, node: str) -> None:
        assert generation == f"job of {node}"
        if self.refusals:
            raise self.refusals.pop(0)
        self.lost[node] = time.monotonic()

    async def asks(self, *nodes: str, answered: bool = False, far: bool = True) -> None:
        """Nodes ask; the questions wait, or are answered."""
        for node in nodes:
            with inside(self.wire.nodes[node].namespace):
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
            if answered:
                await connection.send(b"the answer")
                await self.presence.hold(connection)
            else:
                await connection.unless_gone(asyncio.sleep(600))
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


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


Run = Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(wire: Wire) -> Iterator[Run]:
    def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            with inside(wire.vhpcd.namespace):
                server = socket.create_server((wire.vhpcd.address, 0))
            rig = Rig(wire, Presence(), server)
            rig.presence.tell(rig.lose)
            try:
                await asyncio.wait_for(test(rig), 60)
            finally:
                rig.presence.close()
                for one in (server, *rig.peers.values()):
                    one.close()

        asyncio.run(bounded())

    yield run
    wire.plug("ctl", "n1", "n2", "n3")
    until(
        lambda: all(_reaches(host, wire.vhpcd.address) for host in wire.nodes.values()), "the switch to be up"
    )


def _reaches(host: Host, address: str) -> bool:
    with inside(host.namespace), socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex((address, 9)) == 111  # ECONNREFUSED


@pytest.mark.promise("cluster.silent")
@pytest.mark.parametrize("after_s", [0.1, 0.6, 1.1, 3.0])
def test_a_node_without_network_is_lost(run: Run, after_s: float) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2", "n3")
        await asyncio.sleep(after_s)
        began = rig.wire.unplug("n1")
        assert await rig.loses("n1", began) < limit(LOST_S)
        await asyncio.sleep(1)
        assert set(rig.lost) == {"n1"}

    run(test)


@pytest.mark.promise("cluster.silent")
def test_a_node_that_does_not_get_its_answer_is_lost(run: Run) -> None:
    """Two nodes lose their power: the answer that the first is lost goes to the second."""

    async def test(rig: Rig) -> None:
        await rig.asks("n2", "n3")
        await asyncio.sleep(0.3)
        began = rig.wire.unplug("n1")
        rig.wire.plug("n1")
        await rig.asks("n1", answered=True)
        await asyncio.sleep(1.5)  # it has the answer, and has not asked again yet
        assert rig.lost == {}
        began = rig.wire.unplug("n1")
        assert await rig.loses("n1", began) < limit(LOST_S)

    run(test)


@pytest.mark.promise("cluster.silent")
def test_an_answer_that_is_not_confirmed_says_so_sooner(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n2", "n3")
        with inside(rig.wire.nodes["n1"].namespace):
            peer = socket.create_connection(rig.server.getsockname(), 10)
        own, _ = rig.server.accept()
        own.setblocking(False)
        rig.peers["n1"] = peer
        await asyncio.sleep(1)
        began = rig.wire.unplug("n1")
        task = asyncio.create_task(rig._talk(Connection(own), ("job of n1", "n1"), True, True))
        assert await rig.loses("n1", began) < limit(1.5)
        await task

    run(test)


@pytest.mark.promise("cluster.silent")
def test_a_closed_connection_is_no_lost_node(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2", "n3")
        rig.peers["n1"].close()  # the kernel does so for a killed process
        rig.peers["n2"].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        rig.peers["n2"].close()  # RST
        await asyncio.wait([rig.tasks["n1"], rig.tasks["n2"]], timeout=limit(5))
        assert rig.tasks["n1"].done()
        assert rig.tasks["n2"].done()
        rig.wire.unplug("n1", "n2")
        await rig.quiet()

    run(test)


@pytest.mark.promise("cluster.silent")
def test_without_own_network_nobody_is_lost(run: Run) -> None:
    """Also not while the nodes come back one after the other."""

    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2", "n3")
        await asyncio.sleep(0.5)
        rig.wire.unplug("ctl")
        for task in rig.tasks.values():
            await asyncio.wait_for(task, limit(10))
        await rig.quiet()
        rig.wire.plug("ctl")
        until(lambda: _reaches(rig.wire.nodes["n2"], rig.wire.vhpcd.address), "the network")
        await rig.asks("n2")
        await rig.quiet()
        await rig.asks("n1", "n3")
        await rig.quiet()

    run(test)


def test_one_that_does_not_come_back_is_lost_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "RETURN_S", 1.0)

    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        await asyncio.sleep(0.5)
        rig.wire.unplug("ctl", "n1")
        for task in tuple(rig.tasks.values()):
            await asyncio.wait_for(task, limit(10))
        rig.wire.plug("ctl")
        until(lambda: _reaches(rig.wire.nodes["n2"], rig.wire.vhpcd.address), "the network")
        await rig.asks("n2")
        began = time.monotonic()
        assert await rig.loses("n1", began) > 0.9
        assert set(rig.lost) == {"n1"}

    run(test)


def test_a_node_of_vhpcds_own_host_proves_nothing(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1")
        await rig.asks("n2", far=False)
        rig.wire.unplug("n1")
        await rig.quiet()
        await rig.quiet()

    run(test)


def test_a_node_that_asks_again_is_not_lost(run: Run) -> None:
    async def test(rig: Rig) -> None:
        await rig.asks("n1", "n2")
        rig.wire.unplug("n1")
        await asyncio.sleep(0.2)
        rig.wire.plug("n1")
        until(lambda: _reaches(rig.wire.nodes["n1"], rig.wire.vhpcd.address), "the network")
        await rig.asks("n1", answered=True)
        await rig.asks("n1")  # the next question closes the answered connection
        await asyncio.sleep(0.1)
        await rig.quiet()

    run(test)


def test_a_database_that_refuses_is_told_again(run: Run) -> None:
    async def test(rig: Rig) -> None:
        rig.refusals.append(FabricError("no database"))
        await rig.asks("n1", "n2")
        began = rig.wire.unplug("n1")
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
        began = rig.wire.unplug("n1")
        await rig.loses("n1", began)

    run(test)
