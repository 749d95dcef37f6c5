# SPDX-License-Identifier: Apache-2.0
"""How a job starts: PrologSlurmctld opens a generation, and Prologs wait until its lease is decided."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.leases.opening import look_up
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.controller.sync.scheduler import BatchScheduler
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Lease, LeaseRecord, LeaseState


class Starting:
    """Requests that may wait for the fabric or for one another; belongs to the event loop."""

    def __init__(
        self,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        scheduler: BatchScheduler,
        watch: IsolationWatch,
        catalog: Path,
    ) -> None:
        """``catalog`` is the folder of the image catalogue."""
        self._leases = leases
        self._executor = executor
        self._scheduler = scheduler
        self._watch = watch
        self._catalog = catalog
        self._opening: dict[int, tuple[asyncio.Lock, int]] = {}
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}

    async def open(self, request: wire.OpenGeneration) -> wire.LeaseAnswer:
        """The job's lease, READY or REFUSED; requests of one job are served one after the other."""
        job, allocation = request.request, wire_types.unpack_allocation(request.node_groups)
        opening = self._leases.opening
        async with self._one_at_a_time(job.job_id):
            record = await self._executor.write(opening.find, job, allocation)
            if record is None or record.lease.state not in rules.DECIDED:
                with self._scheduler.arriving():
                    # The file system of the catalogue may hang; that must not stop the database thread.
                    image = await self._executor.aside(look_up, self._catalog, job.image)
                    self._watch.must_be_safe()
                    record = await self._executor.write(opening.reserve, job, allocation, image)
            if record.lease.state is LeaseState.RESERVED:
                record = await self._scheduler.ready(record.lease.generation)
        self.notify(job.job_id)
        return _lease(record)

    async def get(self, request: wire.GetLease) -> wire.LeaseAnswer:
        """A look at the newest lease; or, with ``wait_s``, the decided lease, which the node takes."""
        if request.wait_s <= 0:
            record = await self._executor.write(self._leases.queries.look, request.job_id, request.restart)
            if record is None:
                raise FabricError(f"there is no lease of job {request.job_id}")
            return _lease(record)
        deadline = asyncio.get_running_loop().time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._listening(request.job_id) as change:
                # Listening begins before the look, or a change between the two would be missed.
                self._watch.must_be_safe()
                record = await self._executor.write(
                    self._leases.nodes.take, request.job_id, request.restart, request.node
                )
                if record is not None:
                    return _lease(record)
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not (await asyncio.wait({change}, timeout=left))[0]:
                    raise FabricError(
                        f"no lease of job {request.job_id} became ready within {request.wait_s:g} s",
                        "PrologSlurmctld did not finish its work",
                        "see the log of vhpcd and of slurmctld",
                    )

    def notify(self, job_id: int) -> None:
        """A lease of the job has changed: nodes that wait for it look again."""
        for change in self._waiting.get(job_id, ()):
            if not change.done():
                change.set_result(None)

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, job_id: int) -> AsyncIterator[None]:
        lock, users = self._opening.get(job_id, (asyncio.Lock(), 0))
        self._opening[job_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._opening.pop(job_id)
            if users > 1:
                self._opening[job_id] = (lock, users - 1)

    @contextlib.contextmanager
    def _listening(self, job_id: int) -> Iterator[asyncio.Future[None]]:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(change)
        try:
            yield change
        finally:
            listeners = self._waiting[job_id]
            listeners.discard(change)
            if not listeners:
                del self._waiting[job_id]


class _SameLease:
    """A lease compared by identity: comparing thousands of nodes would cost as much as packing them."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameLease) and self.lease is other.lease

    def __hash__(self) -> int:
        return id(self.lease)


@functools.lru_cache(maxsize=64)
def _packed(same: _SameLease) -> wire.LeaseAnswer:
    return wire.LeaseAnswer(lease=wire_types.LeaseWire.pack(same.lease))


def _lease(record: LeaseRecord) -> wire.LeaseAnswer:
    return _packed(_SameLease(record.lease))
