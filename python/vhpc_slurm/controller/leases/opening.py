# SPDX-License-Identifier: Apache-2.0
"""What PrologSlurmctld asks for: the lease of a job, found or made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm.catalog import resolve
from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.transitions import Ended
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.keys import ExhaustedError, KeyAssignment
from vhpc_slurm.model import (
    MAX_GUESTS_PER_NODE,
    NODE_NAME,
    Allocation,
    Generation,
    ImageIdentity,
    ImageRef,
    JobRequest,
    LeaseRecord,
    LeaseState,
)

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.database import LeaseStore
    from vhpc_slurm.fabric.backend import NetworkBackend

log = logging.getLogger("vhpcd")


def look_up(catalog: Path, ref: ImageRef) -> ImageIdentity | UserError:
    """The image that a name means now, or the user's error; FabricError when the catalogue is unreadable."""
    try:
        return resolve(catalog, ImageRef.parse(str(ref)))
    except UserError as err:
        return err


class LeaseOpening:
    """Finds and makes leases; for the database thread only."""

    def __init__(
        self,
        store: LeaseStore,
        lifecycle: Lifecycle,
        network: NetworkBackend,
        config: Config,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self._store = store
        self._lifecycle = lifecycle
        self._network = network
        self._config = config
        self._clock = clock

    def find(self, request: JobRequest, allocation: Allocation) -> LeaseRecord | None:
        """The lease that this request already has, if it is usable.

        Raises:
            FabricError: the request is invalid, or a later incarnation of the job is alive.
        """
        _check(request, allocation)
        records = self._store.of_job(request.job_id)
        for record in records:
            generation = record.lease.generation
            if generation.restart > request.restart and record.lease.state in rules.USABLE:
                raise FabricError(
                    f"job {request.job_id} has restarted {generation.restart} times",
                    f"this request is of restart {request.restart}",
                )
        if records and rules.serves(records[0], request, allocation):
            return records[0]
        return None

    def reserve(
        self, request: JobRequest, allocation: Allocation, image: ImageIdentity | UserError
    ) -> LeaseRecord:
        """The lease of this request; where there was none, a new one that ends all others of the job.

        A new lease is RESERVED, READY where it has no key, or REFUSED.  ``image``
        is the result of ``look_up``; it counts only where a lease is made.

        Raises:
            FabricError: the request is invalid, or no key is free.
        """
        return self.find(request, allocation) or self._make(request, allocation, image)

    def _make(
        self, request: JobRequest, allocation: Allocation, image: ImageIdentity | UserError
    ) -> LeaseRecord:
        generation = Generation(request.job_id, request.restart, os.urandom(4).hex())
        reason = self._refusal(request, allocation, image)
        self._lifecycle.age()
        stale = [
            old.lease.generation
            for old in self._store.of_job(request.job_id)
            if old.lease.state in rules.USABLE
        ]
        with self._store.transaction():
            self._lifecycle.apply(stale, Ended())
            if reason or isinstance(image, UserError):
                record = rules.refuse(generation, request, allocation, reason, self._clock())
                self._lifecycle.create(record, None)
            else:
                record, key = self._plan(generation, request, allocation, image)
                self._lifecycle.create(record, key)
        for old in stale:
            log.info("%s ending: replaced by %s", old, generation)
            self._lifecycle.release(old)
        log.info(
            "%s %s for %s on %d nodes %s",
            generation,
            record.lease.state,
            request.user,
            len(allocation.nodes),
            record.lease.refusal,
        )
        return record

    def _refusal(self, request: JobRequest, allocation: Allocation, image: ImageIdentity | UserError) -> str:
        """Why the user's request cannot be served, as one line; empty when it can."""
        if isinstance(image, UserError):
            return image.line()
        return rules.impatient(request, allocation, self._config) or rules.misfit(
            request, allocation, image, self._config
        )

    def _plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, image: ImageIdentity
    ) -> tuple[LeaseRecord, KeyAssignment | None]:
        """A lease with its network identity, and the key of that."""
        now = self._clock()
        try:
            network, key = self._network.plan(generation, request, allocation, self._store.keys.snapshot())
        except ExhaustedError as err:
            if self._config.fabric.exhausted != "refuse":
                raise
            return rules.refuse(generation, request, allocation, err.line(), now), None
        record = rules.reserve(generation, request, allocation, image, network, now)
        if network.kind == "none":  # the fabric is not involved
            record = rules.move(record, LeaseState.READY, now)
        return record, key


def _check(request: JobRequest, allocation: Allocation) -> None:
    names = [part.node for part in allocation.nodes]
    what = f"cannot make a lease for job {request.job_id}"
    if not (0 < request.job_id < 1 << 32 and 0 <= request.restart < 10**9):
        raise FabricError(what, "its job id or restart count is out of range")
    if not 1 <= request.guests_per_node <= MAX_GUESTS_PER_NODE:
        raise FabricError(what, f"a node has 1 to {MAX_GUESTS_PER_NODE} guests")
    if not names:
        raise FabricError(what, "it has no nodes (yet)")
    if len(set(names)) != len(names) or not all(NODE_NAME.match(name) for name in names):
        raise FabricError(what, "a node name is invalid, or occurs twice")
    if not all(part.cpu_ids for part in allocation.nodes):
        raise FabricError(what, "it has a node without CPUs")
