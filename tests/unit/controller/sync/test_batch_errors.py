# SPDX-License-Identifier: Apache-2.0
"""Errors within a batch of the fabric that no author of a backend has foreseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

import pytest
from controller_lab import Alone, allocation, identity, request
from key_fabric import Fabric

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.sync.scheduler import BatchScheduler, FabricThread
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import FabricFinding, KeyPolicy, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState

Result = TypeVar("Result")


class Defective(Fabric):
    """A fabric whose backend has a defect, which some jobs meet."""

    def __init__(self) -> None:
        super().__init__(KeyPolicy(KeyPool(0x1000, 0x1010)))
        self.strips: set[int] = set()
        self.verifies: set[int] = set()
        self.audits = False

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        for one in generations:
            if one.job_id in self.verifies:
                raise KeyError(one.job_id)
        return super().verify(generations, snapshot)

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        for one in generations:
            if one.job_id in self.strips:
                raise KeyError(one.job_id)
        return super().strip(generations, snapshot)

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        if self.audits:
            raise KeyError("audit")
        return super().audit(snapshot, unsure=unsure)


class TestsThread(FabricThread):
    """Runs calls in the test's own thread, which owns the database."""

    __test__ = False

    async def run(self, call: Callable[[], Result]) -> Result:
        return call()


@pytest.fixture
def network() -> Defective:
    return Defective()


@pytest.fixture
def service(network: Defective) -> Alone:
    return Alone(SqliteStore(":memory:"), network, reserve_mib=0, quarantine_s=30.0)


def reserve(service: Alone, job_id: int) -> Generation:
    return service.reserve(request(job_id), allocation("n1"), identity()).lease.generation


def states(service: Alone) -> dict[int, str]:
    assignments = service.store.keys.snapshot().assignments
    return {one.generation.job_id: one.state.value for one in assignments}


@pytest.mark.promise("fabric.batch")
def test_a_key_that_cannot_be_stripped_stops_no_start(service: Alone, network: Defective) -> None:
    for job_id in (1, 2):
        service.open(request(job_id), allocation("n1"), identity())
    network.strips = {1}
    for job_id in (1, 2):
        service.end(job_id, 0)
    assert states(service) == {1: "draining", 2: "quarantine"}
    record = service.open(request(3), allocation("n1"), identity())
    assert record.lease.state is LeaseState.READY
    network.strips = set()
    service.settle()
    assert states(service) == {1: "quarantine", 2: "quarantine", 3: "active"}


def test_one_job_s_internal_error_fails_no_other_job(service: Alone, network: Defective) -> None:
    network.verifies = {1}
    first, second = reserve(service, 1), reserve(service, 2)
    results = service.batches.run([first, second])
    assert isinstance(results[second], LeaseRecord)
    why = results[first]
    assert isinstance(why, FabricError)
    assert why.line() == "vhpcd failed: internal error: KeyError(1) (see the log of vhpcd)"


@pytest.mark.promise("fabric.batch")
def test_ready_jobs_are_answered_when_a_later_step_fails(
    service: Alone, network: Defective, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.open(request(1), allocation("n1"), identity())
    service.leases.lifecycle.end_job(1, 0)
    ready = reserve(service, 2)

    def stripped(found: ProofResults) -> None:
        raise RuntimeError("a defect of the database layer")

    monkeypatch.setattr(service.leases.batches, "stripped", stripped)
    scheduler = BatchScheduler(service.batches, TestsThread(), interval_s=0.0, deadline_s=30.0)

    async def start() -> LeaseRecord:
        try:
            return await scheduler.ready(ready)
        finally:
            scheduler.close()

    assert asyncio.run(start()).lease.state is LeaseState.READY


def test_an_answer_is_kept_when_the_fabric_fails(service: Alone, network: Defective) -> None:
    before = service.open(request(1), allocation("n1"), identity())
    network.fails = True
    second = reserve(service, 2)
    results = service.batches.run([before.lease.generation, second])
    assert results[before.lease.generation] == before
    assert isinstance(results[second], FabricError)


@pytest.mark.promise("fabric.batch")
def test_an_audit_that_fails_counts_as_unread(service: Alone, network: Defective) -> None:
    service.audit.run()
    network.audits = True
    service.audit.run()
    state = service.audit.watch.state()
    assert state.open_since is not None, "the time until guests must end has begun"
    assert "internal error: KeyError('audit')" in state.what
    network.audits = False
    service.audit.run()
    assert service.audit.watch.state().open_since is None


def test_ports_are_read_when_a_batch_has_a_defect(
    service: Alone, network: Defective, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(snapshot: KeySnapshot, *, force: bool = False) -> None:
        raise KeyError("apply")

    def audit(snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        return (FabricFinding(1, "port 0x1 is open", open=True),)

    monkeypatch.setattr(network, "apply", apply)
    monkeypatch.setattr(network, "audit", audit)
    with pytest.raises(FabricError, match="internal error: KeyError"):
        service.audit.run()
    assert service.audit.watch.state().what == "port 0x1 is open"
