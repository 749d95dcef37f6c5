# SPDX-License-Identifier: Apache-2.0
"""Requests about checkpoints: users make and remove them, keepers report and are told what to do."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.changes import Changes
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.checkpoint_rules import COMPLETED
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import (
    Checkpoint,
    Generation,
    KeeperOrder,
    KeeperState,
    OrderKind,
    SavedNode,
    Viewer,
)
from vhpc_slurm.slurm import comments
from vhpc_slurm.slurm.port import REASON_PROLOG, RUNNING, NoSuchJobError, NotRequeueableError, Slurm

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")


class Checkpointing:
    """Belongs to the event loop."""

    def __init__(self, leases: LeaseLayer, executor: LeaseExecutor, slurm: Slurm, changes: Changes) -> None:
        """``changes`` are told each job whose keepers have orders."""
        self._ledger = leases.checkpoints
        self._removal = leases.removal
        self._store = leases.store
        self._executor = executor
        self._slurm = slurm
        self._changes = changes
        self._ends: set[asyncio.Task[None]] = set()

    async def answer(
        self, request: messages.OfCheckpoints, uid: int, viewer: Viewer | None
    ) -> messages.AboutCheckpoints:
        """The answer; ``viewer`` is None for root and SlurmUser.

        Raises:
            UserError: the request is refused.
        """
        match request:
            case messages.SaveJob():
                return await self._save(request, None if viewer is None else uid)
            case messages.RemoveCheckpoints():
                return await self._remove(request, None if viewer is None else uid)
            case messages.AskOrder():
                return await self._order(request)
            case messages.KnownCheckpoints():
                kept = await self._executor.write(self._ledger.kept, request.serials)
                return messages.CheckpointsKept(serials=tuple(sorted(kept)))

    async def _save(self, request: messages.SaveJob, uid: int | None) -> messages.CheckpointAnswer:
        job_id = request.job_id
        lease = await self._executor.write(self._ledger.owned, job_id, uid)
        await self._executor.aside(self._check_running, lease.generation, request.requeue)

        def begin() -> Checkpoint:
            made = self._ledger.begin(
                job_id, request.name or "", stop=request.stop, requeue=request.requeue, uid=uid
            )
            return shown(self._store, made)

        found = await self._executor.write(begin)
        self._changes.notify(job_id)
        return messages.CheckpointAnswer(checkpoint=found)

    async def save(self, generation: Generation, requeue: bool) -> None:
        """Save a job without a request of its user, and put it back into the queue if that is wanted.

        Raises:
            UserError: it cannot be saved now.
        """
        await self._executor.aside(self._check_running, generation, False)

        def begin() -> None:
            self._ledger.begin(generation.job_id, "", stop=requeue, requeue=requeue, uid=None)

        await self._executor.write(begin)
        self._changes.notify(generation.job_id)

    def _check_running(self, generation: Generation, requeue: bool) -> None:
        """UserError unless the batch script of a job runs, and may run again where that is asked for."""
        what = f"job {generation.job_id} cannot be saved"
        try:
            job = self._slurm.load(generation.job_id)
        except NoSuchJobError as err:
            raise UserError(what, "Slurm has no such job") from err
        if job.state != RUNNING or job.restarts != generation.restart:
            raise UserError(what, f"it is {job.state}")
        if job.reason == REASON_PROLOG:
            raise UserError(what, "its guests have not booted yet", "try again when it has started")
        if not job.batch_host:
            raise UserError(what, "it has no batch script that another job could continue")
        if requeue and not self._slurm.may_requeue(generation.job_id):
            raise UserError(
                f"job {generation.job_id} may not be put back into the queue",
                "it was submitted with --no-requeue, or the site does not requeue jobs",
                "save it with --stop, and continue it with sbatch --vhpc-resume",
            )

    async def _order(self, request: messages.AskOrder) -> messages.OrderAnswer:
        """Take the report of a keeper; the answer comes when there is an order, or after ``wait_s``."""
        generation, write = Generation.parse(request.generation), self._executor.write
        asked = await write(self._ledger.ask, generation, request.node, request.report)
        if asked.changed:
            self._changes.notify(generation.job_id)
        if asked.ends is not None:
            self._end_soon(asked.ends)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._changes.listening(generation.job_id) as change:
                order = await write(self._commented_order, generation, request)
                left = deadline - loop.time()
                if order.kind is not OrderKind.WAIT or left <= 0:
                    return messages.OrderAnswer(order=order)
                await asyncio.wait({change}, timeout=left)

    def _commented_order(self, generation: Generation, request: messages.AskOrder) -> KeeperOrder:
        """The order for a keeper; that of the job's first node has the comment about a valid checkpoint."""
        order = self._ledger.order(generation, request.report)
        if order.kind is not OrderKind.CONTINUE:
            return order
        one = self._store.checkpoints.get(order.serial)
        valid = one is not None and one.state in COMPLETED and one.generation == generation
        if one is None or not valid or request.node != one.origin.allocation.node_names[0]:
            return order
        return replace(order, comment=comments.of_lease(one.origin, comments.saved(one.name)))

    def _end_soon(self, one: StoredCheckpoint) -> None:
        """End the run of a job whose checkpoint is complete; ``run`` repeats it."""
        task = asyncio.create_task(self._end(one))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, one: StoredCheckpoint) -> None:
        try:
            if one.requeue:
                await self._executor.aside(self._requeue, one.generation)
            else:
                await self._executor.aside(self._slurm.cancel, one.job_id)
        except VhpcError as err:
            log.error("job %d, which was saved, cannot be ended: %s", one.job_id, err.line())

    def _requeue(self, generation: Generation) -> None:
        """Put a job back into the queue, if this run has not ended; cancel one that may not be requeued.

        Slurm puts a job that it preempts back by itself when its script ends. After `scontrol requeue` it
        would do so once more, at the end of the next run (GRACE_PREEMPT in slurmctld).
        """
        found = (job for job in self._slurm.running() if job.job_id == generation.job_id)
        job = next(found, None)
        if job is None or job.restarts != generation.restart:
            return
        try:
            if job.preempted is not None:
                self._slurm.end_script(job.job_id)
            else:
                self._slurm.requeue(job.job_id)
        except NoSuchJobError:
            return
        except NotRequeueableError as err:
            log.warning("job %d is cancelled, its checkpoint stays: %s", job.job_id, err.line())
            self._slurm.cancel(job.job_id)

    async def run(self) -> None:
        """Periodic work: what is late has failed, old ones are removed, jobs are ended again."""
        for job_id in await self._executor.write(self._ledger.expire):
            self._changes.notify(job_id)
        await self._executor.write(self._ledger.prune)
        old = await self._unneeded(await self._executor.write(self._removal.too_old))
        await self._executor.write(self._removal.expire_too_old, old)
        for one in await self._executor.write(self._ledger.to_end):
            await self._end(one)

    async def _remove(
        self, request: messages.RemoveCheckpoints, uid: int | None
    ) -> messages.CheckpointsRemoved:
        write = self._executor.write
        done = await write(self._removal.remove, request.names, uid)
        if request.older_s is not None:
            old = await self._unneeded(await write(self._removal.older, request.older_s, uid))
            done = replace(done, removed=done.removed + await write(self._removal.expire, old))
        return messages.CheckpointsRemoved(done=done)

    async def _unneeded(self, found: tuple[StoredCheckpoint, ...]) -> list[StoredCheckpoint]:
        """Those of some checkpoints that no job in Slurm's queue can continue."""
        if not found:
            return []
        queued = {job.job_id for job in await self._executor.aside(self._slurm.jobs)}
        jobs = {one.serial: {one.job_id} for one in found}
        for one in found:
            if one.resumed_by is not None:
                jobs[one.serial].add(one.resumed_by.job_id)
        # A job that is missing in a list may exist all the same: Slurm is asked for this one job.
        for job_id in set().union(*jobs.values()) - queued:
            if await self._executor.aside(self._slurm.knows, job_id):
                queued.add(job_id)
        return [one for one in found if not jobs[one.serial] & queued]


def shown(store: LeaseStore, one: StoredCheckpoint) -> Checkpoint:
    """A checkpoint as users see it, without proofs of its files; for the database thread."""
    place = {node: number for number, node in enumerate(one.origin.allocation.node_names)}
    reports = store.checkpoints.reports(one.serial)
    return Checkpoint(
        serial=one.serial,
        name=one.name,
        uid=one.uid,
        generation=one.generation,
        image=str(one.origin.image or one.origin.request.image),
        state=one.state,
        created=one.created,
        stop=one.stop,
        requeue=one.requeue,
        node_count=len(place),
        held=sum(state in (KeeperState.HELD, KeeperState.SAVED) for state in reports.values()),
        nodes=tuple(map(_sizes, sorted(store.checkpoints.saved(one.serial), key=lambda at: place[at.node]))),
        error=one.error,
        resumed_by=one.resumed_by,
        paused_s=one.paused_s,
        running=store.state(one.generation) in rules.USABLE,
    )


def _sizes(node: SavedNode) -> SavedNode:
    guests = (
        replace(
            guest,
            state=replace(guest.state, root=b""),
            disk=None if guest.disk is None else replace(guest.disk, root=b""),
        )
        for guest in node.guests
    )
    return replace(node, guests=tuple(guests))
