# SPDX-License-Identifier: Apache-2.0
"""How the assignments of partition keys follow the leases they belong to.

Whatever a lease does to its assignment happens in the transaction in which the lease
is written; a lease without an assignment (there is no network, or it was refused)
makes all of it do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.store import LeaseStore

log = logging.getLogger("vhpcd")

STRIPPABLE = (KeyState.DRAINING, KeyState.TOMBSTONE)
_BEFORE = {
    KeyState.APPLIED: (KeyState.RESERVED,),
    KeyState.VERIFIED: (KeyState.APPLIED,),
    KeyState.STRIPPED: STRIPPABLE,
}


_MAY_BE_UNCLEAN = (KeyState.DRAINING, KeyState.STRIPPED, KeyState.QUARANTINE)


class KeyLifecycle:
    """The assignments of all leases."""

    def __init__(self, store: LeaseStore, quarantine_s: float, steady: Callable[[], float]) -> None:
        """``steady`` is a clock that never jumps; downtime of vhpcd shortens no quarantine."""
        self._store = store
        self._quarantine_s = quarantine_s
        self._steady = steady
        self._aged = steady()

    def wants_fabric(self, record: LeaseRecord) -> bool:
        """Whether the fabric has to be told before this lease can be READY."""
        return record.lease.network.kind != "none"

    def must_hold(self, record: LeaseRecord) -> None:
        """FabricError when there is no assignment for this lease that the fabric could carry."""
        lease = record.lease
        assignment = self._store.keys.snapshot().of(lease.generation)
        if assignment is None or assignment.state not in keys.CARRIED:
            raise FabricError(
                f"lease {lease.generation} has no assignment of its key",
                f"the assignment is {assignment.state if assignment else 'absent'}",
                "was the database of vhpcd restored from a copy?",
            )

    def advance(self, generations: Collection[Generation], state: KeyState) -> None:
        """Note that these assignments have come to ``state``; what is not just before it stays as it is.

        (One may have ended, or got a tombstone, while the fabric was at work.)
        """
        snapshot = self._store.keys.snapshot()
        assignments = [
            assignment
            for assignment in map(snapshot.of, generations)
            if assignment and assignment.state in _BEFORE[state]
        ]
        if assignments:
            with self._store.transaction():
                self._store.keys.update([keys.move(assignment, state) for assignment in assignments])

    def activate(self, generations: Collection[Generation]) -> None:
        """The leases are READY."""
        snapshot = self._store.keys.snapshot()
        assignments = [assignment for assignment in map(snapshot.of, generations) if assignment]
        self._store.keys.update([keys.move(assignment, KeyState.ACTIVE) for assignment in assignments])

    def end(self, record: LeaseRecord) -> None:
        """The lease is ENDING; a tombstone at once where a node has said that it is not clean."""
        assignment = self._store.keys.snapshot().of(record.lease.generation)
        if assignment is not None:
            self._store.keys.update([keys.end(assignment)])
            for node, note in record.unclean:
                self.write_tombstone(assignment.generation, f"{node}: {note}")

    def write_tombstone(self, generation: Generation, why: str) -> None:
        """Somebody cannot say that nothing is left of an ending generation: nobody else gets its key."""
        assignment = self._store.keys.snapshot().of(generation)
        if assignment is not None and assignment.state in _MAY_BE_UNCLEAN:
            self._store.keys.update([keys.move(assignment, KeyState.TOMBSTONE, note=why[:1000])])
            log.error("%s leaves a tombstone on key %s: %s", generation, numbers.label(assignment.pkey), why)

    def has_tombstone(self, generation: Generation) -> bool:
        """Whether a generation has left one."""
        assignment = self._store.keys.snapshot().of(generation)
        return assignment is not None and assignment.state is KeyState.TOMBSTONE

    def has_unclean_tombstone(self, record: LeaseRecord) -> bool:
        """Whether a tombstone stands, and a node's last word is still that it is not clean."""
        assignment = self._store.keys.snapshot().of(record.lease.generation)
        return assignment is not None and assignment.state is KeyState.TOMBSTONE and bool(record.unclean)

    def strippable(self, generation: Generation) -> bool:
        """Whether the fabric has to be stripped of a generation that no node holds any more.

        (All its nodes have said so by now, so a tombstone goes the same way.)
        """
        assignment = self._store.keys.snapshot().of(generation)
        return assignment is not None and assignment.state in STRIPPABLE

    def quarantine(self, generation: Generation) -> bool:
        """The lease is to be RELEASED; False when its assignment is not so far."""
        assignment = self._store.keys.snapshot().of(generation)
        if assignment is not None:
            if assignment.state is not KeyState.STRIPPED:
                return False
            resting = keys.move(assignment, KeyState.QUARANTINE, quarantine_s=self._quarantine_s)
            self._store.keys.update([resting])
        return True

    def age(self) -> None:
        """Let the time that has gone by count, and free what has rested long enough."""
        now = self._steady()
        elapsed_s, self._aged = now - self._aged, now
        resting = [one for one in self._store.keys.snapshot().assignments if one.state is KeyState.QUARANTINE]
        if not resting:
            return
        older = [keys.age(assignment, elapsed_s) for assignment in resting]
        over = [assignment for assignment, one in zip(resting, older, strict=True) if one is None]
        with self._store.transaction():
            self._store.keys.update([one for one in older if one is not None])
            self._store.keys.free([assignment.generation for assignment in over])
        for assignment in over:
            log.info("key %s is free of %s", numbers.label(assignment.pkey), assignment.generation)

    def write_orphan_tombstones(self) -> None:
        """An assignment whose lease is not there cannot be judged by anybody: a tombstone."""
        live = self._store.states()
        for assignment in self._store.keys.snapshot().assignments:
            if assignment.state in (KeyState.QUARANTINE, KeyState.TOMBSTONE):
                continue
            if assignment.generation not in live:
                with self._store.transaction():
                    self._store.keys.update(
                        [keys.move(assignment, KeyState.TOMBSTONE, note="it has no lease any more")]
                    )
                log.error(
                    "%s has no lease any more: tombstone on key %s",
                    assignment.generation,
                    numbers.label(assignment.pkey),
                )
