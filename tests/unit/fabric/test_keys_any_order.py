# SPDX-License-Identifier: Apache-2.0
"""Partition keys in any order of events: no two generations share a key, a GUID or a VLAN."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from controller_lab import Alone, allocation, identity, request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from key_fabric import Fabric, Killed
from mariadb_server import HAVE_SERVER, WHY_NOT, emptied, shared
from store_backends import ME

from pace import examples
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import numbers
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState, NetworkIdentity

pytestmark = pytest.mark.promise("fabric.any-order")

NETWORK = Network(allowed=("none", "job"), vni_first=5000, vni_last=6000)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # commits are synchronous, disks slow


class Dying(SqlStore):
    """vhpcd may die with a transaction not committed."""

    fabric: Fabric

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            self.fabric.step()
        self.fabric.step()


class DyingStore(Dying, SqliteStore):
    """An SQLite file."""


class DyingMariaStore(Dying, MariaStore):
    """A database of MariaDB."""

    def close(self) -> None:
        self._maria.close()  # a vhpcd that dies says nothing


class AnyOrder(RuleBasedStateMachine):
    """Jobs, nodes, crashes and time in any order, against a model that knows only who holds what."""

    OWNER: Literal["job", "user"] = "job"
    PORTS: PortMap | None = None
    CLUSTER: str | None = None
    SHARED = False
    """Jobs of a user can have the same key."""
    POOL = KeyPool(0x1000, 0x1002)
    NODES = ("n1", "n2")
    QUARANTINE_S = 10.0
    LOST_AFTER_S = 20.0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.fabric = Fabric(KeyPolicy(self.POOL, ports=self.PORTS))
        self.now = 0.0
        self.had: dict[Generation, tuple[int, frozenset[int], int]] = {}  # key, GUIDs, uid
        self.released: dict[Generation, float] = {}
        # the same steps give the same generations, in the same order: else no example could be run again
        numbers = itertools.count(1)
        self.urandom = mock.patch("os.urandom", lambda size: next(numbers).to_bytes(size, "big"))
        self.urandom.start()
        self.start()

    def opened(self) -> DyingStore | DyingMariaStore:
        return DyingStore(Path(self.folder.name) / "db")

    def start(self) -> None:
        self.fabric.kill_in, kill_in = 0, self.fabric.kill_in  # vhpcd dies only after its start
        self.store = self.opened()
        self.fabric.kill_in = kill_in
        self.store.fabric = self.fabric
        self.service = Alone(
            self.store,
            self.fabric,
            reserve_mib=0,
            job_network=NETWORK,
            quarantine_s=self.QUARANTINE_S,
            lost_after_s=self.LOST_AFTER_S,
            key_owner=self.OWNER,
            clock=lambda: 1.0,
            steady=lambda: self.now,
        )

    def teardown(self) -> None:
        self.urandom.stop()
        self.store.close()
        self.folder.cleanup()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Do something that vhpcd may die in, or that the fabric may refuse."""
        try:
            yield
        except FabricError:
            pass
        except Killed:
            self.fabric.kill_in = 0
            self.store.close()
            self.start()

    jobs = st.integers(1, 4)
    restarts = st.integers(0, 1)
    nodes = st.sampled_from(NODES)

    @rule(job=jobs, restart=restarts, count=st.integers(1, 2))
    def open(self, job: int, restart: int, count: int) -> None:
        with self.alive():
            nodes = allocation(*self.NODES[:count])
            asked = request(job, restart, uid=2001 + job % 2, cluster=self.CLUSTER)
            self.service.open(asked, nodes, identity(0))

    @rule(job=jobs, node=nodes)
    def take(self, job: int, node: str) -> None:
        with self.alive():
            self.service.take(job, None, node)

    @rule(job=jobs, restart=restarts)
    def end(self, job: int, restart: int) -> None:
        with self.alive():
            self.service.end(job, restart)

    @precondition(lambda self: self.had)
    @rule(data=st.data(), node=nodes, clean=st.booleans())
    def acknowledge(self, data: st.DataObject, node: str, clean: bool) -> None:
        generation = data.draw(st.sampled_from(sorted(self.had)))
        with self.alive():
            self.service.acknowledge(generation, node, clean=clean, note="", timeline=None)

    @rule(node=nodes)
    def fence(self, node: str) -> None:
        with self.alive(), suppress(UserError):
            self.service.leases.operator.fence(node, 0)

    @rule()
    def clear(self) -> None:
        with self.alive(), suppress(UserError):
            assignments = self.store.keys.snapshot().assignments
            with_tombstone = [one.generation for one in assignments if one.state is KeyState.TOMBSTONE]
            self.service.leases.operator.clear(with_tombstone, 0)
            self.service.settle()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 21.0, -1e6]))
    def live_on(self, seconds: float) -> None:
        self.now += max(0.0, seconds)
        with self.alive():
            self.service.settle()

    @rule(fails=st.booleans())
    def fabric_fails(self, fails: bool) -> None:
        self.fabric.fails = fails

    @rule(steps=st.integers(1, 8))
    def kill_soon(self, steps: int) -> None:
        self.fabric.kill_in = steps

    @rule(seconds=st.sampled_from([0.0, 100.0]))
    def restart(self, seconds: float) -> None:
        self.store.close()
        self.start()

    def named(self, network: NetworkIdentity, record: LeaseRecord) -> tuple[int, frozenset[int]] | None:
        """The number that a lease has, and the names of its ports."""
        ranks = len(record.lease.allocation.nodes)
        if network.pkey is None:
            return None
        if self.PORTS is not None:
            guids = frozenset(int(word, 16) for row in network.port_guids for word in row)
            assert len(guids) == ranks
            return network.pkey, guids
        return network.pkey, frozenset(
            0x02CC << 48 | network.pkey << 32 | (network.first_rank + rank) << 8 for rank in range(ranks)
        )

    @invariant()
    def nobody_has_what_another_may_still_use(self) -> None:
        found = {record.lease.generation: record for _, record in self.store.page(0)}
        for mine, record in found.items():
            network, uid = record.lease.network, record.lease.request.uid
            if mine in self.had or (found_there := self.named(network, record)) is None:
                continue
            number, guids = found_there
            for other, (pkey, theirs, their_uid) in self.had.items():
                shares = self.SHARED and uid == their_uid
                if guids & theirs or (pkey == number and not shares):
                    assert other in self.released, f"{mine} has what {other} holds"
                # a port with a GUID of its own needs no rest, a key does
                if (guids & theirs and self.PORTS is None) or (pkey == number and not shares):
                    assert self.now - self.released[other] >= self.QUARANTINE_S
            self.had[mine] = (number, guids, uid)
        for mine in self.had:
            record = found[mine]
            if record.lease.state is LeaseState.RELEASED and mine not in self.released:
                self.released[mine] = self.now
                assert set(record.taken) <= set(record.acknowledged), "released while a node holds it"

    @invariant()
    def what_is_released_is_not_on_the_fabric(self) -> None:
        live = {
            guid for mine, (_, guids, _) in self.had.items() if mine not in self.released for guid in guids
        }
        assert set(self.fabric.tables) <= live

    @invariant()
    def a_usable_lease_that_is_ready_has_an_active_assignment(self) -> None:
        snapshot = self.store.keys.snapshot()
        for record in self.store.live():
            assignment = snapshot.of(record.lease.generation)
            assert assignment is not None
            if record.lease.state is LeaseState.READY:
                assert assignment.state is KeyState.ACTIVE
            if record.lease.state is LeaseState.ENDING:
                assert assignment.state in (KeyState.DRAINING, KeyState.TOMBSTONE)


class AnyOrderOfUsers(AnyOrder):
    OWNER = "user"
    SHARED = True


class AnyOrderOfClusters(AnyOrder):
    """The jobs of each user are a cluster."""

    CLUSTER = "dask"
    SHARED = True

    @invariant()
    def members_that_have_not_ended_have_one_key(self) -> None:
        found: dict[int, set[int | None]] = {}
        for record in self.store.live():
            if record.lease.state in (LeaseState.RESERVED, LeaseState.READY):
                found.setdefault(record.lease.request.uid, set()).add(record.lease.network.pkey)
        assert all(len(pkeys) == 1 for pkeys in found.values())


class AnyOrderOfPorts(AnyOrder):
    PORTS = PortMap("ports", {("n1", 0): (0xA1, 0xA2), ("n2", 0): (0xB1, 0xB2)})


class AnyOrderOfVlans(AnyOrder):
    OWNER = "user"
    SHARED = True
    POOL = KeyPool(100, 102, space=numbers.VLANS)

    def named(self, network: NetworkIdentity, record: LeaseRecord) -> tuple[int, frozenset[int]] | None:
        if network.vlan is None:
            return None
        assert (network.kind, network.pkey) == ("ethernet", None)
        ranks = range(network.first_rank, network.first_rank + len(record.lease.allocation.nodes))
        return network.vlan, frozenset(0x02 << 40 | network.vlan << 28 | rank << 8 for rank in ranks)


class AnyOrderInMariadb(AnyOrder):
    """A vhpcd that dies closes its connection without a word; the next one takes the database from it."""

    def __init__(self) -> None:
        emptied(in_mariadb())
        super().__init__()

    def opened(self) -> DyingMariaStore:
        DyingMariaStore.fabric = self.fabric
        return DyingMariaStore(in_mariadb(), ME)


@functools.cache
def in_mariadb() -> Database:
    found = shared().database()
    MariaStore(found, ME).close()
    return found


AnyOrder.TestCase.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
AnyOrderOfClusters.TestCase.settings = AnyOrder.TestCase.settings
AnyOrderOfUsers.TestCase.settings = AnyOrder.TestCase.settings
AnyOrderOfPorts.TestCase.settings = AnyOrder.TestCase.settings
AnyOrderOfVlans.TestCase.settings = AnyOrder.TestCase.settings
AnyOrderInMariadb.TestCase.settings = settings(AnyOrder.TestCase.settings, max_examples=examples(5))
TestAnyOrder = AnyOrder.TestCase
TestAnyOrderInMariadb = pytest.mark.skipif(not HAVE_SERVER, reason=WHY_NOT)(AnyOrderInMariadb.TestCase)
TestAnyOrderOfClusters = AnyOrderOfClusters.TestCase
TestAnyOrderOfPorts = AnyOrderOfPorts.TestCase
TestAnyOrderOfUsers = AnyOrderOfUsers.TestCase
TestAnyOrderOfVlans = AnyOrderOfVlans.TestCase
