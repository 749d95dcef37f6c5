# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are not needed any more: those that users remove, older ones of a job, and old ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.model import UNFINISHED, CheckpointState, Generation, InUse, Removed

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")

KEPT = 2
"""VALID checkpoints of a job."""
DAY_S = 86400.0


class CheckpointRemoval:
    """For the database thread only; nodes delete the files of what is removed."""

    def __init__(self, store: LeaseStore, *, clock: Callable[[], float], max_age_days: int = 0) -> None:
        """``clock`` is the wall clock; ``max_age_days`` 0: checkpoints do not become too old."""
        self._store = store
        self._clock = clock
        self._max_age_days = max_age_days

    def remove(self, names: Iterable[str], uid: int | None) -> Removed:
        """The newest checkpoint of each name, if possible a VALID one, is removed unless it is in use.

        ``uid`` None: root may remove those of all users.
        """
        removed, missing, in_use = [], [], []
        with self._store.transaction():
            for name in dict.fromkeys(names):
                one = self._find(name, uid)
                if one is None:
                    missing.append(name)
                elif why := self._in_use(one):
                    in_use.append(InUse(name, why))
                else:
                    self._discard(one)
                    removed.append(name)
        return Removed(tuple(removed), tuple(missing), tuple(in_use))

    def _find(self, name: str, uid: int | None) -> StoredCheckpoint | None:
        found = self._store.checkpoints.named(uid, name)
        there = [one for one in found if one.state is not CheckpointState.REMOVED]
        return next((one for one in there if one.state is CheckpointState.VALID), next(iter(there), None))

    def surplus(self, job_id: int, kept: int = KEPT - 1) -> tuple[StoredCheckpoint, ...]:
        """Return the VALID ones of a job that its next one replaces. Those in use stay."""
        found = self._store.checkpoints.valid(job_id)[kept:]
        return tuple(one for one in found if not self._in_use(one))

    def remove_surplus(self, job_id: int) -> None:
        """Keep the newest two of a job, within a transaction of the caller's."""
        for one in self.surplus(job_id, KEPT):
            self._discard(one)

    def older(self, age_s: float, uid: int | None) -> tuple[StoredCheckpoint, ...]:
        """Return the VALID ones of a user (None: of all) of an age that no run of a job needs.

        Whether their jobs wait for another run is known to Slurm only.
        """
        found = self._store.checkpoints.aged(self._clock() - age_s, uid)
        return tuple(one for one in found if not self._in_use(one))

    def too_old(self) -> tuple[StoredCheckpoint, ...]:
        """Return those that are older than the site permits, as ``older``."""
        return self.older(self._max_age_days * DAY_S, None) if self._max_age_days else ()

    def expire(self, found: Iterable[StoredCheckpoint], why: str = "") -> tuple[str, ...]:
        """Remove some of ``older`` whose jobs have ended; returns their names.

        One that another job continues since then stays.
        """
        removed = []
        with self._store.transaction():
            for one in found:
                now = self._store.checkpoints.get(one.serial)
                if now is None or (now.state, now.resumed_by) != (one.state, one.resumed_by):
                    continue
                self._store.checkpoints.move(one.serial, CheckpointState.REMOVED, self._clock(), why)
                log.info("checkpoint %d (%s) of %s is removed: %s", one.serial, one.name, one.generation, why)
                removed.append(one.name)
        return tuple(removed)

    def expire_too_old(self, found: Iterable[StoredCheckpoint]) -> None:
        """As ``expire``, for some of ``too_old``."""
        self.expire(found, f"older than the site keeps checkpoints (max_age_days = {self._max_age_days})")

    def _discard(self, one: StoredCheckpoint) -> None:
        """Remove a checkpoint, within a transaction of the caller's."""
        if one.state is CheckpointState.VALID:
            self._store.checkpoints.move(one.serial, CheckpointState.REMOVED, self._clock())
        else:
            self._store.checkpoints.delete(one.serial)

    def _in_use(self, one: StoredCheckpoint) -> str:
        """Why the files of a checkpoint are needed; empty if they are not."""
        if one.state in UNFINISHED:
            return f"job {one.job_id} is being saved"
        if one.state is CheckpointState.VALID and one.stop and self._runs(one.generation):
            return f"job {one.job_id} is being ended"
        if one.resumed_by is not None and self._runs(one.resumed_by):
            return f"job {one.resumed_by.job_id} continues it"
        return ""

    def _runs(self, generation: Generation) -> bool:
        return self._store.state(generation) in rules.USABLE
