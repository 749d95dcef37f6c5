# SPDX-License-Identifier: Apache-2.0
"""What vhpcd does, without sockets: requests in the model's terms, one step of a lease after the other.

Not for use by several threads: the server calls it from one thread only, which
makes every method here one indivisible change of the controller's state.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vhpc_slurm.catalog import resolve
from vhpc_slurm.config import Config
from vhpc_slurm.controller import leases
from vhpc_slurm.controller.key_lifecycle import KeyLifecycle
from vhpc_slurm.controller.lease_transitions import LeaseTransitions
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.keys import ExhaustedError
from vhpc_slurm.model import (
    ALARM,
    MAX_GUESTS_PER_NODE,
    NODE_NAME,
    Alarm,
    Allocation,
    Generation,
    ImageIdentity,
    ImageRef,
    JobRequest,
    LeaseRecord,
    LeaseState,
    Timeline,
)

if TYPE_CHECKING:
    from vhpc_slurm.controller.store import LeaseStore
    from vhpc_slurm.fabric.backend import NetworkBackend

log = logging.getLogger("vhpcd")

ALARMS_MAX = 100
ALARMS_S = 7 * 86400.0
"""Older ones are history."""


def look_up(catalog: Path, ref: ImageRef) -> ImageIdentity | UserError:
    """What the name means now, or the user's error; FabricError when the catalogue cannot be read."""
    try:
        return resolve(catalog, ImageRef.parse(str(ref)))
    except UserError as err:
        return err


class LeaseService:
    """Leases of all jobs; what the fabric has to do with them is in ``transitions``."""

    def __init__(
        self,
        store: LeaseStore,
        network: NetworkBackend,
        *,
        reserve_mib: int,
        config: Config | None = None,
        quarantine_s: float = 0.0,
        lost_after_s: float = 900.0,
        refuse_exhausted: bool = False,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """``reserve_mib`` is the memory that stays outside guests where the user did not say.

        It is more where the nodes' formula says so; ``config`` has what that depends on.
        A key that was stripped rests ``quarantine_s`` before it is another's.  Of
        a node that has not acknowledged for ``lost_after_s`` nobody knows what it does.
        A job without a key fails where ``refuse_exhausted``, else it may ask again.
        """
        self.store = store
        self._keys = KeyLifecycle(store, quarantine_s, steady)
        self.transitions = LeaseTransitions(
            store, self._keys, lost_after_s=lost_after_s, clock=clock, steady=steady
        )
        self._network = network
        config = config or Config()
        guests = msgspec.structs.replace(config.guests, memory_reserve_mib=reserve_mib)
        self._config = msgspec.structs.replace(config, guests=guests)
        self._refuse_exhausted = refuse_exhausted
        self._clock = clock
        self._alarms = deque(store.alarms(ALARMS_MAX), ALARMS_MAX)

    def alarms(self) -> tuple[Alarm, ...]:
        """What nodes want somebody to hear of, newest last."""
        return tuple(alarm for alarm in self._alarms if alarm.time > self._clock() - ALARMS_S)

    def _alarm(self, alarm: Alarm) -> None:
        if not any(replace(old, time=alarm.time) == alarm for old in self._alarms):
            self._alarms.append(alarm)

    def find(self, request: JobRequest, allocation: Allocation) -> LeaseRecord | None:
        """The lease that this request has already, in whatever usable state.

        Raises:
            FabricError: the request makes no sense, or a later incarnation of the job is alive.
        """
        _check(request, allocation)
        records = self.store.of_job(request.job_id)
        for record in records:
            generation = record.lease.generation
            if generation.restart > request.restart and record.lease.state in leases.USABLE:
                raise FabricError(
                    f"job {request.job_id} has restarted {generation.restart} times",
                    f"this request is of restart {request.restart}",
                )
        if records and leases.serves(records[0], request, allocation):
            return records[0]
        return None

    def reserve(
        self, request: JobRequest, allocation: Allocation, image: ImageIdentity | UserError
    ) -> LeaseRecord:
        """The lease of this request, made RESERVED (or REFUSED) if it was not there.

        Every other generation of the job is over from then on.  ``image`` is
        what ``look_up`` said; it counts only where a new lease is made.  A lease
        without an assignment of a key has nothing to wait for and is READY at once.

        Raises:
            FabricError: the request makes no sense, or no key is free.
        """
        record = self.find(request, allocation) or self._make(request, allocation, image)
        if record.lease.state is not LeaseState.RESERVED or self._keys.wants_fabric(record):
            return record
        return self.transitions.ready([record])[0]

    def look(self, job_id: int, restart: int | None) -> LeaseRecord | None:
        """The newest lease of a job (of that incarnation), in whatever state."""
        for record in self.store.of_job(job_id):
            if restart is None or record.lease.generation.restart == restart:
                return record
        return None

    def live(self, with_timelines: frozenset[int]) -> tuple[LeaseRecord, ...]:
        """All leases that are not released, those of some jobs with what their nodes reported."""
        return tuple(
            self._with_timelines(record) if record.lease.generation.job_id in with_timelines else record
            for record in self.store.live()
        )

    def released(self, jobs: frozenset[int]) -> tuple[LeaseRecord, ...]:
        """All released leases of some jobs."""
        return self.store.released(jobs)

    def _with_timelines(self, record: LeaseRecord) -> LeaseRecord:
        generation = record.lease.generation
        limit = len(record.lease.allocation.nodes) * (generation.restart + 1)
        lines = self.store.timelines(0, job_id=generation.job_id, limit=limit)
        return replace(record, timelines=tuple(line for _, line in lines if line.generation == generation))

    def take(self, job_id: int, restart: int | None, node: str) -> LeaseRecord | None:
        """Hand the decided lease to a node and remember it; None while there is none to hand out.

        Raises:
            FabricError: the lease is over, or the job has no part on that node.
        """
        record = self.store.newest(job_id)
        if record is None or record.lease.state is LeaseState.RESERVED:
            return None
        generation = record.lease.generation
        if restart is not None and generation.restart < restart:
            return None
        if restart is not None and generation.restart > restart:
            raise FabricError(f"job {job_id} was restarted", f"its lease is {generation} now")
        if record.lease.state not in leases.DECIDED:
            raise FabricError(
                f"lease {generation} is {record.lease.state}", "the job has ended or was requeued"
            )
        if not any(part.node == node for part in record.lease.allocation.nodes):
            raise FabricError(f"lease {generation} has no part on node {node[:80]}")
        with self.store.transaction():
            self.store.take(generation, node, self._clock())
        return record

    def end(self, job_id: int, restart: int | None) -> None:
        """Mark the job's generations up to that restart count as ending; unknown jobs are no error."""
        for record in self.store.of_job(job_id):
            if restart is None or record.lease.generation.restart <= restart:
                self.end_generation(record.lease.generation, "the job has ended")

    def end_generation(self, generation: Generation, why: str) -> None:
        """Mark one generation as ending, and release it where nothing holds it back."""
        record = self.store.get(generation)
        if record is None or record.lease.state not in leases.USABLE:
            return
        with self.store.transaction():
            self.store.put(leases.move(record, LeaseState.ENDING, self._clock()))
            self._keys.end(record)
        log.info("%s ending: %s", generation, why)
        self.transitions.release(generation)

    def acknowledge(
        self, generation: Generation, node: str, *, clean: bool, note: str, timeline: Timeline | None
    ) -> None:
        """Note what a node says it still holds; a generation unknown here is no error.

        (A node keeps acknowledgements on disk until they are accepted; after the
        loss of this database they would never be, if unknown ones were refused.)
        """
        if self.store.get(generation) is None:
            log.warning("%s unknown, acknowledged by %s (clean: %s) %s", generation, node, clean, note)
            return
        with self.store.transaction():
            self.store.acknowledge(generation, node, clean=clean, note=note, now=self._clock())
            if timeline is not None:
                self.store.report(timeline)
            if not clean:
                self._keys.write_tombstone(generation, f"{node}: {note}")
        if not clean:
            log.error("%s not clean on %s: %s", generation, node, note)
        elif note.startswith(ALARM):
            log.error("%s on %s: %s", generation, node, note)
            self._alarm(Alarm(generation.job_id, node, self._clock(), note.removeprefix(ALARM)))
        self.transitions.release(generation)

    def report(self, timeline: Timeline) -> None:
        """Keep a node's timeline."""
        with self.store.transaction():
            self.store.report(timeline)

    def prune(self, older_than_s: float) -> None:
        """Forget leases that were released so long ago."""
        with self.store.transaction():
            count = self.store.prune(self._clock() - older_than_s)
        if count:
            log.info("forgot %d old leases", count)

    def _make(
        self, request: JobRequest, allocation: Allocation, image: ImageIdentity | UserError
    ) -> LeaseRecord:
        now = self._clock()
        generation = Generation(request.job_id, request.restart, os.urandom(4).hex())
        reason = image.line() if isinstance(image, UserError) else ""
        if isinstance(image, ImageIdentity):
            reason = leases.impatient(request, allocation, self._config) or leases.misfit(
                request, allocation, image, self._config
            )
        record: LeaseRecord | None = None
        if reason or isinstance(image, UserError):
            record = leases.refuse(generation, request, allocation, reason, now)
        self._keys.age()
        stale = [old for old in self.store.of_job(request.job_id) if old.lease.state in leases.USABLE]
        with self.store.transaction():
            for old in stale:
                self.store.put(leases.move(old, LeaseState.ENDING, now))
                self._keys.end(old)
            if record is None:
                assert isinstance(image, ImageIdentity)
                record = self._plan(generation, request, allocation, image, now)
                reason = record.lease.refusal
            self.store.put(record)
        for old in stale:
            log.info("%s ending: replaced by %s", old.lease.generation, generation)
            self.transitions.release(old.lease.generation)
        log.info(
            "%s %s for %s on %d nodes %s",
            generation,
            record.lease.state,
            request.user,
            len(allocation.nodes),
            reason,
        )
        return record

    def _plan(
        self,
        generation: Generation,
        request: JobRequest,
        allocation: Allocation,
        image: ImageIdentity,
        now: float,
    ) -> LeaseRecord:
        """A lease RESERVED, with what it has of the network."""
        try:
            network, assignment = self._network.plan(
                generation, request, allocation, self.store.keys.snapshot()
            )
        except ExhaustedError as err:
            if not self._refuse_exhausted:
                raise
            return leases.refuse(generation, request, allocation, err.line(), now)
        if assignment is not None:
            self.store.keys.add(assignment)
        return leases.reserve(generation, request, allocation, image, network, now)


def _check(request: JobRequest, allocation: Allocation) -> None:
    names = [part.node for part in allocation.nodes]
    what = f"cannot make a lease for job {request.job_id}"
    if not (0 < request.job_id < 1 << 32 and 0 <= request.restart < 10**9):
        raise FabricError(what, "no such job id or restart count")
    if not 1 <= request.guests_per_node <= MAX_GUESTS_PER_NODE:
        raise FabricError(what, f"a node has 1 to {MAX_GUESTS_PER_NODE} guests")
    if not names:
        raise FabricError(what, "it has no nodes (yet)")
    if len(set(names)) != len(names) or not all(NODE_NAME.match(name) for name in names):
        raise FabricError(what, "its node names are no node names, or occur twice")
    if not all(part.cpu_ids for part in allocation.nodes):
        raise FabricError(what, "it has a node without CPUs")
