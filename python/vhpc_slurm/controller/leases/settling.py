# SPDX-License-Identifier: Apache-2.0
"""Leftovers: releases that a crash interrupted, nodes that never acknowledge, keys without leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.transitions import LostLease, Unclean
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore


class Settling:
    """Runs at start and once a minute; for the database thread only."""

    def __init__(
        self, store: LeaseStore, lifecycle: Lifecycle, *, lost_after_s: float, steady: Callable[[], float]
    ) -> None:
        """A node is lost when it has not acknowledged for ``lost_after_s`` while vhpcd ran."""
        self._store = store
        self._lifecycle = lifecycle
        self._lost_after_s = lost_after_s
        self._steady = steady
        self._ending: dict[Generation, float] = {}

    def run(self) -> None:
        """Release what can be released, and write tombstones for what lost nodes may still use."""
        ending = self._store.ending()
        for record in ending:
            if rules.releasable(record):
                self._lifecycle.release(record.lease.generation)
        self._write_lost_tombstones(ending)
        self._lifecycle.age()
        self._write_orphan_tombstones()

    def _write_lost_tombstones(self, ending: tuple[LeaseRecord, ...]) -> None:
        now = self._steady()
        self._ending = {
            record.lease.generation: self._ending.get(record.lease.generation, now) for record in ending
        }
        for record in ending:
            generation = record.lease.generation
            silent = sorted(rules.holders(record))
            if silent and now - self._ending[generation] >= self._lost_after_s:
                why = f"{' '.join(silent)} did not acknowledge within {self._lost_after_s:g} s"
                self._lifecycle.apply([generation], Unclean(why))

    def _write_orphan_tombstones(self) -> None:
        live = self._store.states()
        orphans = [
            one.generation
            for one in self._store.keys.snapshot().assignments
            if one.generation not in live and one.state not in (KeyState.QUARANTINE, KeyState.TOMBSTONE)
        ]
        if orphans:
            self._lifecycle.apply(orphans, LostLease())
