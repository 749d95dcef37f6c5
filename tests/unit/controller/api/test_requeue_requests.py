# SPDX-License-Identifier: Apache-2.0
"""Jobs that are saved and put back into the queue: what slurmctld is asked, and when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from checkpoint_rig import nodes
from checkpoint_vhpcd import ALICE, Vhpcd, opening, run
from controller_lab import request

from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.model import (
    CheckpointState,
)
from vhpc_slurm.slurm.port import (
    REASON_PROLOG,
    RunningJob,
)


def test_a_requeued_job_is_asked_for_once_in_each_run(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        tend = vhpcd.parts.reconciler._checkpoints
        assert tend is not None
        vhpcd.ctld.times = (RunningJob(7, 0, 1000.0, None, None),)
        await vhpcd.save(generation, "a", requeue=True)
        await asyncio.sleep(0.1)
        assert vhpcd.ctld.requeued == [7]
        # slurmctld starts the next run before its lease is asked for
        vhpcd.ctld.times = (RunningJob(7, 1, 1000.0, None, None),)
        await tend()
        vhpcd.ctld.times = (RunningJob(8, 0, 1000.0, None, None),)
        await tend()
        assert (vhpcd.ctld.requeued, vhpcd.ctld.signalled, vhpcd.ctld.cancelled) == ([7], [], [])
        answer = await vhpcd.ask(opening(request(7, 1), nodes("n3", "n4")))
        assert (answer.lease.state, answer.lease.resume.origin) == ("ready", generation)
        again = await vhpcd.ask(opening(request(7, 1), nodes("n3", "n4")))
        assert again.lease.generation == answer.lease.generation

    run(tmp_path, test)


def test_a_job_that_may_not_be_requeued_is_cancelled(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        vhpcd.ctld.requeueable = False
        vhpcd.ctld.times = (RunningJob(7, 0, 1000.0, None, None),)
        serial = await vhpcd.save(generation, "a", requeue=True)
        await asyncio.sleep(0.1)
        assert (vhpcd.ctld.requeued, vhpcd.ctld.cancelled) == ([], [7])
        assert vhpcd.store.checkpoints.valid(7)[0].serial == serial

    run(tmp_path, test)


def test_a_job_that_may_not_run_again_is_refused(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        vhpcd.ctld.may = False
        answer = await vhpcd.ask(messages.SaveJob(job_id=7, requeue=True), ALICE)
        assert isinstance(answer, wire.Failure)
        assert "job 7 may not be put back into the queue" in answer.what
        assert vhpcd.store.checkpoints.of(generation) is None
        answer = await vhpcd.ask(messages.SaveJob(job_id=7, stop=True), ALICE)
        assert isinstance(answer, messages.CheckpointAnswer)

    run(tmp_path, test)


def test_only_a_job_that_may_run_again_is_saved_by_itself(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        vhpcd.ctld.may = False
        answer = await vhpcd.ask(opening(request(7, checkpoint="limit,preempt"), nodes()))
        assert (answer.lease.state, answer.lease.refusal) == (
            "refused",
            "--vhpc-checkpoint=limit,preempt: the job may not be put back into the queue: it has "
            "--no-requeue, or the site does not requeue jobs (submit it with --requeue)",
        )
        assert vhpcd.parts.requests._leases.opening.refusals == {"checkpoint": 1}
        assert vhpcd.ctld.cancelled == []
        for moments in ("none", None):
            answer = await vhpcd.ask(opening(request(8, checkpoint=moments), nodes()))
            assert answer.lease.state == "ready"
        vhpcd.ctld.may = True
        answer = await vhpcd.ask(opening(request(9, checkpoint="limit"), nodes()))
        assert answer.lease.state == "ready"

    run(tmp_path, test, checkpoint=Checkpoint(folder="/ck"))


def test_slurm_requeues_a_job_that_it_preempts(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7))
        vhpcd.ctld.times = (RunningJob(7, 0, 1000.0, 2000.0, 1900.0),)
        await vhpcd.save(generation, "a", requeue=True)
        await asyncio.sleep(0.1)
        assert (vhpcd.ctld.requeued, vhpcd.ctld.signalled, vhpcd.ctld.cancelled) == ([], [7], [])

    run(tmp_path, test)


def test_jobs_are_saved_at_their_time(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7, checkpoint="limit"))
        start, far = time.time() - 600, time.time() + 3600
        run, store = vhpcd.parts.timed.run, vhpcd.store.checkpoints
        for times in (
            RunningJob(7, 0, start, far, None),
            RunningJob(7, 1, start, start + 601, None),
            RunningJob(8, 0, start, start + 601, None),
        ):
            vhpcd.ctld.times = (times,)
            await run()
            assert store.of(generation) is None, times
        vhpcd.ctld.times = (RunningJob(7, 0, start, start + 601, None),)
        vhpcd.ctld.job = replace(vhpcd.ctld.job, reason=REASON_PROLOG)
        await run()
        assert store.of(generation) is None
        vhpcd.ctld.job = replace(vhpcd.ctld.job, reason="None")
        await run()
        made = store.of(generation)
        assert made is not None
        assert (made.state, made.stop, made.requeue, made.name) == (
            CheckpointState.HOLDING,
            True,
            True,
            "7.1",
        )
        await run()
        assert store.of(generation) == made

    run(tmp_path, test, checkpoint=Checkpoint(folder="/ck"))


def test_a_job_that_is_saved_at_intervals_continues(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        generation = await vhpcd.open(request(7, checkpoint="every:5m"))
        vhpcd.ctld.times = (RunningJob(7, 0, time.time() - 301, None, None),)
        await vhpcd.parts.timed.run()
        made = vhpcd.store.checkpoints.of(generation)
        assert made is not None
        assert (made.stop, made.requeue) == (False, False)
        await vhpcd.parts.timed.run()
        assert vhpcd.store.checkpoints.of(generation) == made

    run(tmp_path, test, checkpoint=Checkpoint(folder="/ck"))


def test_slurm_is_not_asked_without_such_jobs(tmp_path: Any) -> None:
    async def test(vhpcd: Vhpcd) -> None:
        await vhpcd.open(request(7))
        vhpcd.ctld.times = None
        await vhpcd.parts.timed.run()

    run(tmp_path, test)
