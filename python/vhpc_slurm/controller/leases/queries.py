# SPDX-License-Identifier: Apache-2.0
"""Leases for readers: one job's, all live ones, history; and the end of history."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")


class LeaseQueries:
    """Reads the store; for the database thread only."""

    def __init__(self, store: LeaseStore, clock: Callable[[], float]) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self._store = store
        self._clock = clock

    def look(self, job_id: int, restart: int | None) -> LeaseRecord | None:
        """The newest lease of a job (of that restart count), in whatever state, without what nodes said."""
        newest = self._store.newest(job_id)  # each node's Epilog asks for it: no list of nodes is read
        if newest is None or restart is None or newest.lease.generation.restart == restart:
            return newest
        for record in self._store.of_job(job_id):
            if restart is None or record.lease.generation.restart == restart:
                return record
        return None

    def live(self, with_timelines: frozenset[int]) -> tuple[LeaseRecord, ...]:
        """All leases that are not released; those of the jobs ``with_timelines`` with their timelines."""
        return tuple(
            self._with_timelines(record) if record.lease.generation.job_id in with_timelines else record
            for record in self._store.live()
        )

    def generations(self) -> frozenset[Generation]:
        """All generations with a lease that is not released."""
        return frozenset(self._store.states())

    def released(self, jobs: frozenset[int]) -> tuple[LeaseRecord, ...]:
        """All released leases of some jobs."""
        return self._store.released(jobs)

    def prune(self, older_than_s: float) -> None:
        """Delete leases that were released longer ago than this."""
        with self._store.transaction():
            count = self._store.prune(self._clock() - older_than_s)
        if count:
            log.info("deleted %d old leases", count)

    def _with_timelines(self, record: LeaseRecord) -> LeaseRecord:
        generation = record.lease.generation
        limit = len(record.lease.allocation.nodes) * (generation.restart + 1)
        lines = self._store.timelines(0, job_id=generation.job_id, limit=limit)
        return replace(record, timelines=tuple(line for _, line in lines if line.generation == generation))
