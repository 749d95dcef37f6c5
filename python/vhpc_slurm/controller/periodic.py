# SPDX-License-Identifier: Apache-2.0
"""Periodic work of vhpcd: it compares leases with Slurm, and audits the fabric."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.leases import reconcile
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.passes import guarded
from vhpc_slurm.controller.sync.audit import FabricAudit
from vhpc_slurm.controller.sync.audit_trigger import AuditTrigger
from vhpc_slurm.controller.sync.scheduler import BatchScheduler, FabricThread
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.slurm.port import RUNNING, Slurm, requeue_or_cancel

log = logging.getLogger("vhpcd")

AGAIN_S = 1.0
"""Least time between an audit that found something and the next one."""


class Reconciler:
    """Compares leases with Slurm's jobs; belongs to the event loop."""

    def __init__(
        self,
        settings: Controller,
        slurm: Slurm,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        scheduler: BatchScheduler,
        notify: Callable[[int], None],
        checkpoints: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``settings`` has the interval and the deadlines; ``notify`` is told each job whose lease ended.

        ``checkpoints`` is the work on checkpoints in each pass.

        ``drained`` is how many nodes vhpc has drained, for the metrics; None while Slurm does not tell.
        """
        self.patience = reconcile.Patience(time.monotonic)
        self.drained: int | None = None
        self._settings = settings
        self._slurm = slurm
        self._leases = leases
        self._executor = executor
        self._scheduler = scheduler
        self._notify = notify
        self._checkpoints = checkpoints

    async def begin(self) -> None:
        """Continue what the last vhpcd, or a fabric that refused, left unfinished."""
        await self._executor.write(self._leases.settling.run)
        self._scheduler.poke()

    async def run(self) -> None:
        """One pass; FabricError when Slurm cannot be asked, and then no job was judged."""
        await self.begin()
        write, aside, queries = self._executor.write, self._executor.aside, self._leases.queries
        await write(queries.prune, self._settings.history_days * 86400.0)
        await write(self._leases.clusters.prune)
        known = await write(queries.generations)
        jobs = await aside(self._slurm.jobs)
        waiting = frozenset(job.job_id for job in jobs if reconcile.awaits_prologs(job))
        live = await write(queries.live, waiting)
        running = frozenset(job.job_id for job in jobs if job.state == RUNNING)
        released = await write(queries.released, running)
        stuck_s = self._settings.prolog_stuck_s
        await self._carry_out(reconcile.judge(jobs, live, known=known, stuck_s=stuck_s, released=released))

    async def _carry_out(self, verdict: reconcile.Verdict) -> None:
        write, aside = self._executor.write, self._executor.aside
        for generation, why in verdict.end:
            # A job that is missing in a list may exist all the same: Slurm is asked for this one job.
            if why == reconcile.NO_SUCH_JOB and await aside(self._slurm.knows, generation.job_id):
                log.error("job %d was not listed by Slurm, which has it: nothing ended", generation.job_id)
                continue
            await write(self._leases.lifecycle.end, generation, why)
            self._notify(generation.job_id)
        for job_id, why in self.patience.exhausted(verdict.suspects).items():
            log.warning("job %d does not run: %s; requeued, or cancelled if it cannot be", job_id, why)
            try:
                await aside(requeue_or_cancel, self._slurm, job_id, why)
            except VhpcError as err:
                log.error("job %d cannot be requeued: %s", job_id, err.line())

    async def run_for_ever(self) -> None:
        """A pass at each interval; never returns."""
        while True:
            with guarded("not reconciled"):
                await self.run()
            with guarded("checkpoints are looked at later"):
                if self._checkpoints is not None:
                    await self._checkpoints()
            if self._settings.metrics:
                await self._count_drained()
            await asyncio.sleep(self._settings.reconcile_interval_s)

    async def _count_drained(self) -> None:
        try:
            self.drained = len(await self._executor.aside(self._slurm.drained))
        except VhpcError as err:
            self.drained = None
            log.warning("the nodes that vhpc has drained are not counted: %s", err.line())


async def audit_for_ever(
    audit: FabricAudit, trigger: AuditTrigger, thread: FabricThread, interval_s: float
) -> None:
    """Audit the fabric whenever ``trigger`` is due; never returns."""
    try:
        trigger.watch()
    except FabricError as err:
        log.error("the fabric is audited every %g s only: %s", interval_s, err.line())
    failures = 0
    while True:
        try:
            found = await thread.run(audit.run)
            failures = 0
        except VhpcError as err:
            found = True
            failures += 1
            if failures in (1, 2) or not failures % 20:
                log.error("the fabric is not proven (%d times by now): %s", failures, err.line())
        except Exception:
            found = True
            log.exception("not audited")
        if found:
            # The repair of a finding raises file events too.
            await asyncio.sleep(min(AGAIN_S, interval_s))
        await trigger.due(interval_s)
