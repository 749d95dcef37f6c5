# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two jobs in any order of requests, reports and deaths, for each engine of the store."""

from __future__ import annotations

from contextlib import suppress

from checkpoint_rig import NODES, Site, nodes
from controller_lab import request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import CheckpointState, Generation, KeeperState, Lease, OrderKind

PREPARED, HELD, SAVED, CONTINUED, FAILED = (
    KeeperState.PREPARED,
    KeeperState.HELD,
    KeeperState.SAVED,
    KeeperState.CONTINUED,
    KeeperState.FAILED,
)


class Keeper:
    """The guests of a node, and the keeper that is their only master; ``gaps`` counts when they ran."""

    def __init__(self) -> None:
        self.held: int | None = None
        self.saved = False
        self.ended = False
        self.gaps = 0
        self.report: tuple[KeeperState, int] | None = None

    def go_on(self) -> None:
        assert not self.ended, "guests that were ended have continued"
        self.held, self.saved, self.gaps = None, False, self.gaps + 1


class AnyOrder(RuleBasedStateMachine):
    """Keepers obey or die, answers are lost, vhpcd starts again; a model knows when guests have run."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site(self.store())
        self.leases: dict[int, Lease] = {}
        self.keepers: dict[tuple[Generation, str], Keeper] = {}
        self.prepared: set[tuple[int, str]] = set()
        self.at_hold: dict[tuple[int, str], int] = {}
        self.at_save: dict[tuple[int, str], int] = {}
        self.ended: set[tuple[Generation, str]] = set()
        for job in (1, 2):
            self.start_job(job)

    def store(self) -> LeaseStore:
        return SqliteStore(":memory:")

    def teardown(self) -> None:
        self.site.store.close()

    jobs = st.integers(1, 2)
    places = st.sampled_from(NODES)

    def start_job(self, job: int) -> None:
        if job not in self.leases:
            restart = self.site.store.newest(job)
            number = 0 if restart is None else restart.lease.generation.restart + 1
            lease = self.site.open(request(job, number), nodes())
            self.leases[job] = lease
            for node in NODES:
                self.keepers[lease.generation, node] = Keeper()

    @rule(job=jobs, again=st.sampled_from([True, True, False]))
    def job_ends(self, job: int, again: bool) -> None:
        if job in self.leases:
            self.site.end(self.leases.pop(job))
        if again:
            self.start_job(job)

    @rule(
        job=jobs,
        stop=st.booleans(),
        name=st.sampled_from(["", "a", "b"]),
        asked=st.lists(places, max_size=30),
    )
    def save(self, job: int, stop: bool, name: str, asked: list[str]) -> None:
        """Begin a checkpoint; for a while nothing goes wrong."""
        with suppress(UserError):
            self.site.ledger.begin(job, name, stop=stop, uid=2001)
        for node in asked:
            self.keeper_asks(job, node, lost=False, obeys=True)

    @rule()
    def vhpcd_starts_again(self) -> None:
        self.site.start()

    @rule(seconds=st.sampled_from([1.0, 61.0, 121.0, 8 * 86400.0]))
    def time_passes(self, seconds: float) -> None:
        self.site.now += seconds
        self.site.ledger.expire()
        self.site.ledger.prune()

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = self.site.store.checkpoints.page(0)
        if known:
            self.site.layer.removal.remove([data.draw(st.sampled_from(known)).name], None)

    @rule(job=jobs, node=places, lost=st.booleans(), obeys=st.booleans())
    def a_keeper_asks(self, job: int, node: str, lost: bool, obeys: bool) -> None:
        self.keeper_asks(job, node, lost, obeys)

    def keeper_asks(self, job: int, node: str, lost: bool, obeys: bool) -> None:
        """A keeper asks; its answer may be lost, and it may fail to do what it is told."""
        lease = self.leases.get(job)
        if lease is not None:
            keeper = self.keepers[lease.generation, node]
            state, serial = keeper.report or (None, 0)
            kind = self.site.say(lease.generation, node, state, serial, "broken")
            if kind is OrderKind.END:
                self.ended.add((lease.generation, node))
            elif kind is OrderKind.CONTINUE:
                assert (lease.generation, node) not in self.ended, "CONTINUE after END"
            if not lost:
                self.obey(lease, node, keeper, kind, obeys)

    def obey(self, lease: Lease, node: str, keeper: Keeper, kind: OrderKind, obeys: bool) -> None:
        active = self.site.store.checkpoints.of(lease.generation)
        serial = 0 if active is None else active.serial
        if kind is OrderKind.PREPARE and keeper.held is None:
            if obeys:
                keeper.held, keeper.report = serial, (PREPARED, serial)
                self.prepared.add((serial, node))
            else:
                keeper.report = (FAILED, serial)
        elif kind is OrderKind.HOLD and keeper.report == (PREPARED, keeper.held):
            assert {(serial, name) for name in NODES} <= self.prepared, "HOLD before all nodes are prepared"
            if obeys:
                keeper.report = (HELD, serial)
                self.at_hold[serial, node] = keeper.gaps
            else:
                keeper.report = (FAILED, serial)
                keeper.go_on()
        elif kind is OrderKind.SAVE and keeper.held is not None and not keeper.saved:
            if obeys:
                keeper.saved, keeper.report = True, (SAVED, keeper.held)
                self.at_save[keeper.held, node] = keeper.gaps
            else:
                keeper.report = (FAILED, keeper.held)
                keeper.go_on()
        elif kind is OrderKind.CONTINUE and keeper.held is not None:
            keeper.report = (CONTINUED, keeper.held)
            keeper.go_on()
        elif kind is OrderKind.END:
            keeper.ended, keeper.report = True, None

    @rule(job=jobs, node=places)
    def keeper_dies(self, job: int, node: str) -> None:
        """The next one lets the guests continue before it asks; it knows of nothing."""
        lease = self.leases.get(job)
        keeper = None if lease is None else self.keepers[lease.generation, node]
        if keeper is not None and not keeper.ended:
            keeper.go_on()
            keeper.report = None

    @rule(
        job=jobs, node=places, state=st.none() | st.sampled_from(list(KeeperState)), serial=st.integers(0, 9)
    )
    def keeper_of_an_older_run_asks(
        self, job: int, node: str, state: KeeperState | None, serial: int
    ) -> None:
        """Nothing that it says counts, and it has to end."""
        for generation, place in tuple(self.keepers):
            lease = self.leases.get(job)
            if (
                generation.job_id == job
                and place == node
                and (lease is None or lease.generation != generation)
            ):
                kind = self.site.say(generation, node, state, serial)
                assert kind in (OrderKind.OVER, OrderKind.END)

    @invariant()
    def valid_only_if_all_nodes_saved_guests_that_stood_still(self) -> None:
        for one in self.site.store.checkpoints.page(0):
            if one.state is CheckpointState.VALID:
                assert self.site.store.checkpoints.reports(one.serial) == dict.fromkeys(NODES, SAVED)
                assert len(self.site.store.checkpoints.saved(one.serial)) == len(NODES)
                for node in NODES:
                    held, saved = self.at_hold[one.serial, node], self.at_save[one.serial, node]
                    assert held == saved, f"the guests of {node} have run between HELD and SAVED"

    @invariant()
    def one_active_checkpoint_of_a_job_that_runs(self) -> None:
        active = [one.generation for one in self.site.store.checkpoints.active()]
        assert len(active) == len(set(active))
        assert set(active) <= {lease.generation for lease in self.leases.values()}

    @invariant()
    def two_valid_ones_of_a_job_are_kept(self) -> None:
        for job in (1, 2):
            assert len(self.site.store.checkpoints.valid(job)) <= 2
