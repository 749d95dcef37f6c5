# SPDX-License-Identifier: Apache-2.0
"""Events of leases in any order, for each engine of the store."""

from __future__ import annotations

from controller_lab import Alone, allocation, identity, request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import (
    Generation,
    ImageIdentity,
    LeaseState,
)

UNKNOWN = UserError("image nix:latest is unknown", "no such name", "see: vhpc image ls")


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, against a model that only knows who holds what."""

    NODES = ("n1", "n2")

    def __init__(self) -> None:
        super().__init__()
        self.service = Alone(self.store(), NoNetwork(), reserve_mib=0, clock=lambda: 1.0)
        self.holds: dict[Generation, set[str]] = {}
        self.took: dict[Generation, set[str]] = {}
        self.over: set[Generation] = set()

    def store(self) -> LeaseStore:
        return SqliteStore(":memory:")

    def teardown(self) -> None:
        self.service.store.close()

    jobs = st.integers(1, 2)
    restarts = st.integers(0, 2)
    nodes = st.sampled_from(NODES)

    @rule(job=jobs, restart=restarts, cores=st.sampled_from([(0,), (1,)]), known=st.booleans())
    def open(self, job: int, restart: int, cores: tuple[int, ...], known: bool) -> None:
        image: ImageIdentity | UserError = identity(0) if known else UNKNOWN
        try:
            record = self.service.open(request(job, restart), allocation(*self.NODES, cpu_ids=cores), image)
        except FabricError:
            return
        mine = record.lease.generation
        assert mine not in self.over
        self.holds.setdefault(mine, set())
        self.over |= {other for other in self.holds if other.job_id == job and other != mine}

    @rule(job=jobs, restart=st.none() | restarts, node=nodes)
    def take(self, job: int, restart: int | None, node: str) -> None:
        try:
            record = self.service.take(job, restart, node)
        except FabricError:
            return
        if record is not None:
            assert record.lease.generation not in self.over
            self.holds[record.lease.generation].add(node)
            self.took.setdefault(record.lease.generation, set()).add(node)

    @rule(job=jobs, restart=st.none() | restarts)
    def end(self, job: int, restart: int | None) -> None:
        self.service.end(job, restart)
        self.over |= {
            known
            for known in self.holds
            if known.job_id == job and (restart is None or known.restart <= restart)
        }

    @rule(data=st.data(), node=nodes, clean=st.booleans())
    def acknowledge(self, data: st.DataObject, node: str, clean: bool) -> None:
        if self.holds:
            generation = data.draw(st.sampled_from(list(self.holds)))
            self.service.acknowledge(generation, node, clean=clean, note="", timeline=None)
            released = generation in self.over and not self.holds[generation]
            if clean:
                self.holds[generation].discard(node)
            elif not released and node in self.took.get(generation, ()):
                self.holds[generation].add(node)  # its last report counts

    @invariant()
    def at_most_one_usable_lease_a_job(self) -> None:
        usable = [
            r.lease.generation.job_id for r in self.service.store.live() if r.lease.state in rules.USABLE
        ]
        assert len(usable) == len(set(usable))

    @invariant()
    def released_exactly_when_over_and_held_by_nobody(self) -> None:
        for generation, holders in self.holds.items():
            record = self.service.store.get(generation)
            assert record is not None
            assert (record.lease.state is LeaseState.RELEASED) == (generation in self.over and not holders)
            assert (record.lease.state in rules.USABLE) == (generation not in self.over)
