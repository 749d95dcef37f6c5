# SPDX-License-Identifier: Apache-2.0
"""Writes what ``transitions`` computes: the lease and the key of a generation, in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.transitions import (
    STRIPPABLE,
    Aged,
    Ended,
    Event,
    Holding,
    Stripped,
    transition,
)
from vhpc_slurm.fabric import numbers
from vhpc_slurm.fabric.keys import KeyAssignment, KeyState
from vhpc_slurm.model import JOB_ENDED, Generation, LeaseRecord, LeaseState

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")


class Lifecycle:
    """Applies events to generations; for the database thread only."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        quarantine_s: float,
        segment_quarantine_s: float = 0.0,
        clock: Callable[[], float],
        steady: Callable[[], float],
    ) -> None:
        """``clock`` is the wall clock; ``steady`` never jumps, and counts only while vhpcd runs."""
        self._store = store
        self._quarantine_s = quarantine_s
        self._segment_quarantine_s = segment_quarantine_s
        self._clock = clock
        self._steady = steady
        self._aged = steady()
        self._leaving: set[Generation] = set()

    def holding(self, generation: Generation) -> Holding:
        """Lease and key of a generation."""
        return Holding(self._store.get(generation), self._store.keys.snapshot().of(generation))

    def create(self, record: LeaseRecord, key: KeyAssignment | None) -> None:
        """Write a new lease together with its key."""
        with self._store.transaction():
            if key is not None:
                self._store.keys.add(key)
            self._store.put(record)

    def apply(self, generations: Collection[Generation], event: Event) -> dict[Generation, Holding]:
        """One event for several generations, in one transaction; what each is after it."""
        with self._store.transaction():
            before = {generation: self.holding(generation) for generation in generations}
            return self._write(before, event)

    def _write(self, before: dict[Generation, Holding], event: Event) -> dict[Generation, Holding]:
        now = self._clock()
        after = {generation: transition(held, event, now) for generation, held in before.items()}
        changed, freed = [], []
        for generation, held in after.items():
            old = before[generation]
            if held.record is not None and held.record is not old.record:
                self._store.put(held.record)
                if held.state in (LeaseState.ENDING, LeaseState.RELEASED):
                    self._store.checkpoints.give_up(generation, JOB_ENDED, now)
                    self._store.clusters.leave(generation, now)
            if held.key is not None and held.key is not old.key:
                changed.append(held.key)
            if held.key is None and old.key is not None:
                freed.append(generation)
        self._store.keys.update(changed)
        self._store.keys.free(freed)
        for generation, held in after.items():
            self._settle_segment(generation, held)
        for generation, held in after.items():
            _log(generation, before[generation], held)
        return after

    def _settle_segment(self, generation: Generation, held: Holding) -> None:
        """A VNI is held until its lease is released, and again when a node reports that it is not clean."""
        if held.record is None or held.state is not LeaseState.RELEASED or held.record.lease.segment is None:
            return
        if held.record.unclean:
            self._store.segments.hold_again(generation)
        else:
            self._store.segments.rest(generation, self._segment_quarantine_s)

    def end(self, generation: Generation, why: str) -> None:
        """End one generation, and release it where no node and no port holds it."""
        record = self._store.get(generation)
        if record is None or record.lease.state not in rules.USABLE:
            return
        self.apply([generation], Ended())
        log.info("%s ending: %s", generation, why)
        self.release(generation)

    def end_job(self, job_id: int, restart: int | None) -> None:
        """End a job's generations up to that restart count (None: all); an unknown job is no error."""
        for record in self._store.of_job(job_id):
            if restart is None or record.lease.generation.restart <= restart:
                self.end(record.lease.generation, "the job has ended")

    def release(self, generation: Generation) -> None:
        """Release an ended generation that no node holds; one with a key leaves in the next batch."""
        # A thousand nodes ask this one by one: the lease and its list of nodes are read for the last of them.
        state = self._store.state(generation)
        if state in rules.USABLE or (state is LeaseState.ENDING and self._store.has_holders(generation)):
            return
        held = self.holding(generation)
        if held.record is None or not held.nodes_are_clean():
            return
        if held.key_state in STRIPPABLE:
            self._leaving.add(generation)
        else:
            self.stripped([generation])

    def stripped(self, generations: Collection[Generation]) -> None:
        """Nothing is left of these generations on the fabric: release those that no node holds."""
        with self._store.transaction():
            self.age()  # or the time before it would count for this quarantine
            after = self.apply(generations, Stripped(self._quarantine_s))
        self.stay([generation for generation, held in after.items() if held.key_state not in STRIPPABLE])

    def age(self) -> None:
        """Count the seconds since the last call for quarantines: after its own, a key or VNI is free."""
        now = self._steady()
        elapsed_s, self._aged = now - self._aged, now
        resting = [one for one in self._store.keys.snapshot().assignments if one.state is KeyState.QUARANTINE]
        if resting:
            with self._store.transaction():
                # Their leases are over and do not change: reading them would cost as much again.
                self._write({one.generation: Holding(None, one) for one in resting}, Aged(elapsed_s))
        if any(one.left_s is not None for one in self._store.segments.held()):
            with self._store.transaction():
                self._store.segments.age(elapsed_s)

    # --- what leaves with the next batch ---------------------------------------

    def leave(self, generation: Generation) -> None:
        """Have the next batch strip the fabric of a generation."""
        self._leaving.add(generation)

    def stay(self, generations: Collection[Generation]) -> None:
        """Take back ``leave``."""
        self._leaving.difference_update(generations)

    def leaving(self) -> tuple[Generation, ...]:
        """Generations whose keys the next batch removes from the fabric."""
        held = {one.generation for one in self._store.keys.snapshot().assignments if one.state in STRIPPABLE}
        self._leaving &= held
        return tuple(sorted(self._leaving))

    @property
    def has_leaving(self) -> bool:
        """Whether there is work for a batch; any thread may ask."""
        return bool(self._leaving)


def _log(generation: Generation, before: Holding, after: Holding) -> None:
    if after.key is not None and after.key_state is KeyState.TOMBSTONE is not before.key_state:
        label = numbers.label(after.key.pkey)
        log.error("%s leaves a tombstone on key %s: %s", generation, label, after.key.note)
    if before.key is not None and after.key is None:
        log.info("key %s is free; %s had it", numbers.label(before.key.pkey), generation)
    if after.state is LeaseState.RELEASED and before.state is not LeaseState.RELEASED:
        log.info("%s released", generation)
