# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are not needed any more: those that users remove, older ones of a job, and old ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import UNFINISHED, CheckpointState, Generation

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

    def remove(self, serial: int, uid: int | None) -> None:
        """A checkpoint is REMOVED, or forgotten if it has failed; ``uid`` None: root may remove any.

        Raises:
            UserError: it is another user's, or in use.
        """
        one = self._store.checkpoints.get(serial)
        if one is None or one.state is CheckpointState.REMOVED:
            return
        if uid not in (None, one.uid):
            raise UserError(f"checkpoint {serial} belongs to another user", "", "see: vhpc checkpoint ls")
        if why := self._in_use(one):
            raise UserError(f"checkpoint {one.name} is in use", why)
        with self._store.transaction():
            self._discard(one)

    def surplus(self, job_id: int, kept: int = KEPT - 1) -> tuple[StoredCheckpoint, ...]:
        """Return the VALID ones of a job that its next one replaces: not the newest, nor those in use."""
        found = self._store.checkpoints.valid(job_id)[kept:]
        return tuple(one for one in found if not self._in_use(one))

    def remove_surplus(self, job_id: int) -> None:
        """Keep the newest two of a job, within a transaction of the caller's."""
        for one in self.surplus(job_id, KEPT):
            self._discard(one)

    def aged(self) -> tuple[StoredCheckpoint, ...]:
        """Return those that are too old and that no run of a job needs.

        Whether their jobs wait for another run is known to Slurm only.
        """
        if not self._max_age_days:
            return ()
        found = self._store.checkpoints.aged(self._clock() - self._max_age_days * DAY_S)
        return tuple(one for one in found if not self._in_use(one))

    def expire(self, one: StoredCheckpoint) -> None:
        """Remove one of ``aged`` whose jobs have ended, unless another job continues it since then."""
        now = self._store.checkpoints.get(one.serial)
        if now is None or now.resumed_by != one.resumed_by or now.state is not CheckpointState.VALID:
            return
        why = f"older than the site keeps checkpoints (max_age_days = {self._max_age_days})"
        with self._store.transaction():
            self._store.checkpoints.move(one.serial, CheckpointState.REMOVED, self._clock(), why)
        log.info("checkpoint %d (%s) of %s is removed: %s", one.serial, one.name, one.generation, why)

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
