# SPDX-License-Identifier: Apache-2.0
"""Batches of changes under a real OpenSM: killed at each step, refused, and with many adapters."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from backend_site import Site
from controller_lab import allocation, identity, request, wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    HAVE_SIMULATOR,
    NEEDED,
    SM_GUID,
    SimulatedFabric,
    crowding,
    holding,
    may_lose_packets,
    sets,
    simulated_fabric,
    tree,
)

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.fabric.opensm import Opensm
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.model import LeaseRecord, LeaseState

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), pytest.mark.long, may_lose_packets]


# --- killed between any two steps ----------------------------------------------------------------


class Clockwork:
    """Ends this process, as kill -9 does, when so many steps are done."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self) -> None:
        self.left -= 1
        if not self.left:
            os._exit(9)


def dying_site(
    fabric: SimulatedFabric, reader: FabricReader, database: Path, clockwork: Clockwork, last: Path
) -> Site:
    """vhpcd's own parts; before and after whatever is durable they may die.

    While a new partitions file could be lost in a power cut, ``last`` is the one that would be back.
    """

    class DyingStore(SqliteStore):
        @contextmanager
        def transaction(self) -> Iterator[None]:
            with super().transaction():
                yield
                clockwork.step()
            clockwork.step()

    class DyingOpensm(Opensm):
        def replace(self, data: bytes) -> None:
            clockwork.step()
            if not last.exists():
                last.write_bytes(fabric.partitions.read_bytes())
            super().replace(data)
            clockwork.step()

        def keep(self) -> None:
            clockwork.step()
            super().keep()
            last.unlink(missing_ok=True)

        def sweep(self) -> None:
            super().sweep()
            clockwork.step()

    return Site(fabric, reader, database, store=DyingStore, opensm=DyingOpensm)


def life(site: Site) -> None:
    """Two jobs come, one goes, its node acknowledges."""
    first = site.open(1, "n1", "n2").lease
    site.service.take(1, 0, "n1")
    site.open(2, "n1")
    site.service.end(1, 0)
    site.service.acknowledge(first.generation, "n1", clean=True, note="", timeline=None)


@pytest.mark.promise("fabric.steps", "fabric.power-cut")
@pytest.mark.parametrize("cut", [False, True], ids=["kill -9", "power cut"])
def test_killed_between_any_steps_vhpcd_reaches_the_same_end(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path, cut: bool
) -> None:
    died = lost = 0
    for steps in range(1, 100):
        fabric.replace(DEFAULT)
        fabric.sweep()
        database, last = tmp_path / f"db-{steps}", tmp_path / f"last-{steps}"
        child = os.fork()
        if child == 0:
            try:
                life(dying_site(fabric, reader, database, Clockwork(steps), last))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if not cut:
            ends_well(Site(fabric, reader, database), fabric, reader, f"killed after {steps} steps")
        elif last.exists():
            lost += 1
            fabric.replace(last.read_bytes())
            fabric.sweep()  # as the OpenSM does that is started then
            ends_well(Site(fabric, reader, database), fabric, reader, f"no power after {steps} steps")
        if os.waitstatus_to_exitcode(status) == 0:
            break
        died += 1
    assert died > 20, "it was killed at each step there is"
    assert bool(lost) == cut


def ends_well(site: Site, fabric: SimulatedFabric, reader: FabricReader, what: str) -> None:
    """A vhpcd that was just started knows all that is on the fabric, and continues."""
    snapshot = site.store.keys.snapshot()
    tables = reader.scan(5.0).tables()
    on_fabric = {entry & 0x7FFF for entries in tables.values() for entry in entries} - {0x7FFF}
    assert on_fabric <= {assignment.pkey for assignment in snapshot.assignments}, (
        "the database knows all that is there"
    )
    for record in site.store.live():
        if record.lease.state is LeaseState.READY:
            assignment = snapshot.must(record.lease.generation)
            assert assignment.state is KeyState.ACTIVE
            assert assignment.pkey in on_fabric, "what was told to be READY is on the fabric"
    site.backend.validate(snapshot)
    site.service.settle()
    site.service.audit.run()
    known = {record.lease.request.job_id: record for _, record in site.store.page(0)}
    if 1 not in known or known[1].lease.state in (LeaseState.RESERVED, LeaseState.READY):
        first = site.open(1, "n1", "n2").lease
        site.service.take(1, 0, "n1")
        site.service.end(1, 0)
    else:
        first = known[1].lease
    site.open(2, "n1")
    site.service.acknowledge(first.generation, "n1", clean=True, note="", timeline=None)
    site.service.settle()
    assert site.states() == {1: "quarantine", 2: "active"}, what
    assert sets(fabric) == holding((site.store.keys.snapshot().assignments[-1].pkey, 1)), what
    site.store.close()


# --- what is refused, and what there is not enough of ------------------------------------------------


def test_a_port_without_room_holds_up_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fabric of its own: opensm never finds back to the default key on a port that was full once.
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric:
        reader = FabricReader(environment=fabric.environment)
        reader.scan(60.0)
        site = Site(fabric, reader, tmp_path / "db", site=crowding(GUIDS[0], 63))
        site.service.batches.run()
        generations = [
            site.service.reserve(request(job_id), allocation("n1"), identity(0)).lease.generation
            for job_id in (1, 2, 3)
        ]
        results = site.service.batches.run(generations)
        assert {job: type(results[job]).__name__ for job in generations} == {
            generations[0]: "ComplaintError",
            generations[1]: "LeaseRecord",
            generations[2]: "LeaseRecord",
        }
        assert "ERR 0512" in str(results[generations[0]])
        assert site.states() == {1: "reserved", 2: "active", 3: "active"}
        assert sets(fabric)[GUIDS[4]] == {0x7FFF, 0x9001}
        assert sets(fabric)[GUIDS[8]] == {0x7FFF, 0x9002}
        site.service.end(1, 0)
        assert site.states()[1] == "quarantine"
        reader.close()


def test_without_a_free_key_a_job_retries_or_fails_as_set(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db", last=0x1000)
    site.open(1, "n1")
    with pytest.raises(FabricError, match=r"no partition key is free: 1 are in use.*a Slurm license"):
        site.open(2, "n1")
    assert [record.lease.request.job_id for _, record in site.store.page(0)] == [1], "nothing is left of it"
    site.service.end(1, 0)
    site.now += 31
    site.service.settle()
    assert site.open(2, "n1").lease.state is LeaseState.READY
    site.service.end(2, 0)
    refusing = Site(fabric, reader, tmp_path / "db", last=0x1000, refuse_exhausted=True)
    record = refusing.open(3, "n1")
    assert record.lease.state is LeaseState.REFUSED
    assert "no partition key is free: 0 are in use, 1 in quarantine" in record.lease.refusal
    assert refusing.open(3, "n1").lease == record.lease, "decided once"


# --- another subnet manager -----------------------------------------------------------------------


def test_a_standby_with_a_stale_file_is_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric:
        reader = FabricReader(environment=fabric.environment)
        reader.scan(60.0)
        site = Site(fabric, reader, tmp_path / "db")
        site.open(1, "n1", "n2")
        stale = fabric.partitions.read_bytes()
        site.service.end(1, 0)
        site.open(2, "n1", "n2")
        standby = fabric.start_standby("H16", stale)
        site.service.audit.run()
        assert site.service.audit.watch.state().what == ""
        fabric.opensm.kill()
        fabric.opensm.wait()
        carriers = (GUIDS[0], GUIDS[1])
        wait_for(lambda: 0x9000 in sets(fabric, *carriers)[GUIDS[0]], "no standby takes over")
        with pytest.raises(FabricError, match="OpenSM does not run"):
            site.service.audit.run()
        state = site.service.audit.watch.state()
        assert state.open_since is not None, "ports have the key of a job that is over"
        # Not both at once: the simulator loses packets of a handover, and opensm waits for them without end.
        os.kill(int(standby.pidfile.read_text()), signal.SIGKILL)
        fabric.start_opensm()
        wait_for(lambda: _audited(site), "not overruled")
        assert sets(fabric, *GUIDS[:8]) == {guid: holding((0x1001, 2))[guid] for guid in GUIDS[:8]}
        reader.close()


def _audited(site: Site) -> bool:
    with suppress(FabricError):
        site.service.audit.run()
    return site.service.audit.watch.state().what == ""


# --- many adapters -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [256, 1024])
def test_on_a_large_fabric_each_port_has_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path, tree(adapters)) as fabric:
        reader = FabricReader(environment=fabric.environment)
        assert len(reader.scan(60.0).ports) == adapters + 1
        jobs = adapters // 16
        last = 0x1000 + jobs - 1
        site = Site(fabric, reader, tmp_path / "db", last=last, timeout_s=30.0)
        nodes = allocation(*(f"n{number}" for number in range(16)))
        generations = [
            site.service.reserve(request(job_id), nodes, identity(0)).lease.generation
            for job_id in range(1, jobs + 1)
        ]
        before = fabric.sweeps()
        results = site.service.batches.run(generations)
        assert all(isinstance(one, LeaseRecord) for one in results.values()), results
        assert fabric.sweeps() - before == 1
        site.service.audit.run()
        assert site.service.audit.watch.state().what == ""
        chance = random.Random(adapters)
        guids = chance.sample(fabric.shape.guids, 60)
        assert sets(fabric, SM_GUID, *guids) == {SM_GUID: {0xFFFF}} | {
            guid: {0x7FFF, 0x8000 | guid >> 32 & 0x7FFF} for guid in guids
        }
        for job_id in range(1, jobs + 1):
            site.service.leases.lifecycle.end_job(job_id, 0)
        site.service.batches.run()
        assert fabric.sweeps() - before == 2
        assert set(site.states().values()) == {"quarantine"}
        assert sets(fabric, *guids) == {guid: {0x7FFF} for guid in guids}
        data = b"Default=0x7fff, ipoib : ALL=full ;\n"
        fabric.replace(data)
        fabric.sweep()
        site.service.audit.run()
        assert sets(fabric, *guids) == {guid: {0x7FFF} for guid in guids}
        assert partitions.parse(fabric.partitions.read_bytes()) == (partitions.DEFAULT,)
        reader.close()
