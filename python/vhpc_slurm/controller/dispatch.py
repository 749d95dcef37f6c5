# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: authority, waiting, and which thread does what.

All changes of leases run in one thread (the store's one writer); what may hang
on the fabric, a file system or Slurm runs elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from vhpc_slurm import __version__
from vhpc_slurm.config import Config
from vhpc_slurm.controller import leases, reconcile, wire_types
from vhpc_slurm.controller import protocol as wire
from vhpc_slurm.controller.fabric_scheduler import FabricScheduler
from vhpc_slurm.controller.fabric_sync import FabricSync
from vhpc_slurm.controller.service import LeaseService, look_up
from vhpc_slurm.controller.writer import Writer
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.model import Generation, Lease, LeaseRecord, LeaseState, Timeline
from vhpc_slurm.slurm.port import RUNNING, Slurm, requeue_or_cancel

log = logging.getLogger("vhpcd")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Dispatcher:
    """Answers requests that were found authentic, authorised and fresh."""

    def __init__(
        self,
        config: Config,
        service: LeaseService,
        network: NetworkBackend,
        slurm: Slurm,
        writer: Writer | None = None,
    ) -> None:
        """Nothing runs yet; ``close`` ends the threads, also ``writer``: the one that has the database."""
        self._config = config
        self._service = service
        self._slurm = slurm
        self._writer = writer or Writer(service.store)
        self._slow = ThreadPoolExecutor(8, "slow")
        self._began = time.monotonic()
        self._opening: dict[int, tuple[asyncio.Lock, int]] = {}
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.connections = 0
        fabric = config.fabric
        self._fabric_sync = FabricSync(
            service.transitions,
            network,
            self._writer.submit,
            open_deadline_s=fabric.open_deadline_s,
            unread_deadline_s=fabric.unread_deadline_s,
        )
        self._scheduler = FabricScheduler(
            self._fabric_sync,
            interval_s=fabric.sweep_interval_s,
            # Sooner than the client gives up, or he would not hear why.
            deadline_s=max(1.0, config.controller.request_timeout_s - 1.0),
        )

    async def answer(self, request: wire.Request, uid: int = 0) -> wire.Answer:
        """Do what ``uid`` asks; every VhpcError becomes a Failure, and nothing else escapes."""
        try:
            return await self._answer(request, uid)
        except VhpcError as err:
            return wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
        except (ValueError, msgspec.MsgspecError) as err:
            return wire.Failure(kind="fabric", what="vhpcd cannot use that request", why=str(err)[:300])
        except Exception:
            log.exception("internal error")
            return wire.Failure(kind="fabric", what="vhpcd failed", hint="see its log")

    async def reconcile(self) -> None:
        """One pass; FabricError when Slurm cannot be asked, and then no job was judged."""
        await self.begin()
        await self._write(self._service.prune, self._config.controller.history_days * 86400.0)
        asked = time.time()
        jobs = await self._aside(self._slurm.jobs)
        waiting = frozenset(job.job_id for job in jobs if reconcile.awaits_prologs(job))
        live = await self._write(self._service.live, waiting)
        running = frozenset(job.job_id for job in jobs if job.state == RUNNING)
        released = await self._write(self._service.released, running)
        stuck_s = self._config.controller.prolog_stuck_s
        verdict = reconcile.judge(jobs, live, asked=asked, stuck_s=stuck_s, released=released)
        for generation, why in verdict.end:
            # What is missing in a list is no proof: it is asked for by itself.
            if why == reconcile.NO_SUCH_JOB and await self._aside(self._slurm.knows, generation.job_id):
                log.error("job %d was not listed by Slurm, which has it: nothing ended", generation.job_id)
                continue
            await self._write(self._service.end_generation, generation, why)
            self._notify(generation.job_id)
        for job_id, why in verdict.requeue:
            log.warning("job %d does not run, requeued: %s", job_id, why)
            try:
                await self._aside(requeue_or_cancel, self._slurm, job_id, why)
            except VhpcError as err:
                log.error("job %d cannot be requeued: %s", job_id, err.line())

    async def audit(self) -> bool:
        """Look at the fabric, and say whether something was wrong; FabricError when it was not put right."""
        return await self._scheduler.run(self._fabric_sync.audit)

    async def begin(self) -> None:
        """Take up what the last vhpcd, or a fabric that would not, left undone."""
        await self._write(self._service.transitions.settle)
        self._scheduler.poke()

    async def audit_due(self, seconds: float) -> None:
        """Wait so long, or until the fabric was changed, by vhpcd or by others."""
        await self._scheduler.audit_due(seconds)

    def watch(self) -> None:
        """Watch what others do to the fabric; FabricError when only the auditor will see it."""
        self._scheduler.watch()

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        self._scheduler.close()
        self._writer.close()
        self._slow.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: wire.Request, uid: int) -> wire.Answer:
        service = self._service
        match request:
            case wire.OpenGeneration() | wire.GetLease():
                return _lease(
                    await (
                        self._open(request)
                        if isinstance(request, wire.OpenGeneration)
                        else self._get(request)
                    )
                )
            case wire.Ending():
                await self._write(service.end, request.job_id, request.restart)
                self._notify(request.job_id)
            case wire.Acknowledge():
                await self._acknowledge(request)
            case wire.ReportTimeline():
                await self._write(service.report, request.timeline.unpack())
            case wire.ListLeases():
                return await self._leases(request)
            case wire.ListTimelines():
                return await self._timelines(request)
            case wire.AskStatus():
                return await self._status()
            case wire.Fence() | wire.ClearKey() | wire.TellFabric():
                return await self._operate(request, uid)
        return wire.Done()

    async def _operate(
        self, request: wire.Fence | wire.ClearKey | wire.TellFabric, uid: int
    ) -> wire.Fenced | wire.Done:
        """What an operator asks of the fabric."""
        transitions = self._service.transitions
        if isinstance(request, wire.Fence):
            fenced, in_use = await self._write(transitions.fence, request.node, uid)
            return wire.Fenced(generations=tuple(map(str, fenced)), in_use=tuple(map(str, in_use)))
        if isinstance(request, wire.TellFabric):
            log.warning("uid %d has the fabric told anew%s", uid, ", by force" * request.force)
            await self._scheduler.run(lambda: self._fabric_sync.run_batch(anew=True, force=request.force))
            return wire.Done()
        generations = tuple(map(Generation.parse, request.generations))
        await self._write(transitions.clear, generations, uid)
        try:
            results = await self._scheduler.run(self._fabric_sync.run_batch)
        finally:
            # What was not cleared now is not cleared behind the operator's back later.
            await self._write(transitions.leaving.difference_update, generations)
        for generation in generations:
            if isinstance(why := results.get(generation), FabricError):
                raise why
        return wire.Done()

    async def _open(self, request: wire.OpenGeneration) -> LeaseRecord:
        job, allocation = request.request, wire_types.unpack_allocation(request.node_groups)
        async with self._one_at_a_time(job.job_id):
            record = await self._write(self._service.find, job, allocation)
            if record is None or record.lease.state not in leases.DECIDED:
                with self._scheduler.arriving():
                    # The catalogue may lie on a file system that hangs: not the writer's business.
                    image = await self._aside(look_up, Path(self._config.images.catalog), job.image)
                    self._fabric_sync.watch.must_be_safe()
                    record = await self._write(self._service.reserve, job, allocation, image)
            if record.lease.state is LeaseState.RESERVED:
                record = await self._scheduler.ready(record.lease.generation)
        self._notify(job.job_id)
        return record

    async def _get(self, request: wire.GetLease) -> LeaseRecord:
        if request.wait_s <= 0:
            record = await self._write(self._service.look, request.job_id, request.restart)
            if record is None:
                raise FabricError(f"there is no lease of job {request.job_id}")
            return record
        deadline = asyncio.get_running_loop().time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._listening(request.job_id) as change:
                # Listening begins before the look, or a change between the two would be missed.
                self._fabric_sync.watch.must_be_safe()
                record = await self._write(self._service.take, request.job_id, request.restart, request.node)
                if record is not None:
                    return record
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not (await asyncio.wait({change}, timeout=left))[0]:
                    raise FabricError(
                        f"no lease of job {request.job_id} became ready within {request.wait_s:g} s",
                        "PrologSlurmctld did not finish its work",
                        "see the log of vhpcd and of slurmctld",
                    )

    async def _acknowledge(self, request: wire.Acknowledge) -> None:
        generation = Generation.parse(request.generation)
        stages = request.stages
        timeline = None if stages is None else Timeline(generation, request.node, stages)
        await self._write(
            functools.partial(
                self._service.acknowledge,
                generation,
                request.node,
                clean=request.clean,
                note=request.note[:1000],
                timeline=timeline,
            )
        )

    async def _leases(self, request: wire.ListLeases) -> wire.LeasePage:
        rows = await self._write(
            functools.partial(
                self._service.store.page, request.after, job_id=request.job_id, live=request.live
            )
        )
        page, more = _fill(
            [(serial, wire_types.RecordWire.pack(record)) for serial, record in rows], full=100
        )
        return wire.LeasePage(records=page, more=more)

    async def _timelines(self, request: wire.ListTimelines) -> wire.TimelinePage:
        rows = await self._write(
            functools.partial(self._service.store.timelines, request.after, job_id=request.job_id)
        )
        packed = [
            (
                serial,
                wire_types.TimelineWire(generation=str(line.generation), node=line.node, stages=line.stages),
            )
            for serial, line in rows
        ]
        page, more = _fill(packed, full=100)
        return wire.TimelinePage(timelines=page, more=more)

    async def _status(self) -> wire.Status:
        counts = await self._write(self._service.store.counts)
        alarms = await self._write(self._service.alarms)
        return wire.Status(
            version=__version__,
            protocol=wire.VERSION,
            time=time.time(),
            uptime_s=time.monotonic() - self._began,
            database=self._config.controller.database,
            leases=counts,
            connections=self.connections,
            fabric=self._fabric_sync.watch.state(),
            alarms=tuple(
                wire.AlarmWire(job_id=one.job_id, node=one.node, time=one.time, what=one.what)
                for one in alarms
            ),
        )

    async def _write(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        run = functools.partial(call, *args, **kwargs)
        # A change that has begun is finished, even when its client has gone away.
        done = await asyncio.shield(asyncio.wrap_future(self._writer.submit(run)))
        if self._service.transitions.leaving:
            self._scheduler.poke()
        return done

    async def _aside(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        run = functools.partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._slow, run)

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

    def _notify(self, job_id: int) -> None:
        for change in self._waiting.get(job_id, ()):
            if not change.done():
                change.set_result(None)


class _SameLease:
    """A lease that is equal to itself only: to compare thousands of nodes would cost what is to be saved."""

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


Item = TypeVar("Item")


def _fill(rows: list[tuple[int, Item]], full: int) -> tuple[tuple[Item, ...], int | None]:
    """As many rows as fit a page (at least one), and where the next page begins."""
    size = 0
    for count, (_, item) in enumerate(rows):
        size += len(msgspec.json.encode(item))
        if count and size > wire.PAGE_BYTES:
            return tuple(item for _, item in rows[:count]), rows[count - 1][0]
    return tuple(item for _, item in rows), rows[-1][0] if len(rows) >= full else None
