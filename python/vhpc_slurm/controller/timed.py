# SPDX-License-Identifier: Apache-2.0
"""Jobs with --vhpc-checkpoint are saved before their time is over, and when they are preempted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import timed
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.passes import guarded
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Generation, Lease
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpcd")


class TimedCheckpoints:
    """Begins checkpoints of jobs with --vhpc-checkpoint; belongs to the event loop."""

    def __init__(
        self,
        config: Config,
        slurm: Slurm,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        begin: Callable[[Generation, bool], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``begin`` saves a job, and puts it back into the queue if its second argument is true.

        It raises UserError if that is not possible now.
        """
        self._config = config
        self._slurm = slurm
        self._ledger = leases.checkpoints
        self._executor = executor
        self._begin = begin
        self._clock = clock

    async def run(self) -> None:
        """One pass.

        Raises:
            FabricError: Slurm cannot be asked.
        """
        found = await self._executor.write(self._ledger.timed)
        if not found:
            return
        running = {job.job_id: job for job in await self._executor.aside(self._slurm.running)}
        for one in found:
            lease = one.lease
            job = running.get(lease.generation.job_id)
            if job is None or job.restarts != lease.generation.restart:
                continue
            lead_s = timed.lead_s(self._config, lease, one.last)
            if why := timed.due(lease, job, lead_s, one.saved, self._clock()):
                await self._save(lease, why)

    async def _save(self, lease: Lease, why: str) -> None:
        job_id = lease.generation.job_id
        try:
            await self._begin(lease.generation, why != timed.EVERY)
        except UserError as err:
            log.info("job %d is not saved now (%s): %s", job_id, why, err.line())
        else:
            log.info("job %d is saved (%s)", job_id, why)

    async def run_for_ever(self) -> None:
        """A pass at each interval; never returns."""
        while True:
            with guarded("jobs with --vhpc-checkpoint are looked at later"):
                await self.run()
            await asyncio.sleep(timed.look_s(self._config))
