# SPDX-License-Identifier: Apache-2.0
"""When a job with --vhpc-checkpoint is saved: pure rules."""

from __future__ import annotations

import pytest
from checkpoint_rig import nodes, saved
from controller_lab import identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.controller.leases import savable, timed
from vhpc_slurm.model import Generation, Lease, LeaseState, NetworkIdentity
from vhpc_slurm.slurm.port import RunningJob

START, END = 10_000.0, 13_600.0


def lease(asked: str | None) -> Lease:
    return Lease(
        Generation(7, 0, "0123abcd"),
        LeaseState.READY,
        request(7, checkpoint=asked),
        nodes(memory_mib=6000),
        identity(0),
        NetworkIdentity(),
    )


@pytest.mark.parametrize(("asked", "wanted"), [(None, False), ("none", False), ("limit", True)])
def test_only_jobs_that_ask_for_it(asked: str | None, wanted: bool) -> None:
    assert savable.is_asked(lease(asked).request) is wanted


@pytest.mark.parametrize(
    ("asked", "ends", "preempted", "now", "why"),
    [
        ("limit", END, None, END - 101, ""),
        ("limit", END, None, END - 100, "limit"),
        ("limit", None, None, END, ""),
        ("limit", START + 150, None, START + 74, ""),  # half of the time is the job's
        ("limit", START + 150, None, START + 75, "limit"),
        ("limit", START + 500, START + 480, START + 480, "limit"),  # preempted: its end is near
        ("preempt", END, None, END - 1, ""),
        ("preempt", END, START + 5, START + 5, "preempt"),
        ("limit,preempt", END, START + 5, START + 5, "preempt"),
        ("limit,preempt", END, None, END - 1, "limit"),
        ("none", END, START + 5, END - 1, ""),
    ],
)
def test_a_job_is_due(asked: str, ends: float | None, preempted: float | None, now: float, why: str) -> None:
    job = RunningJob(7, 0, START, ends, preempted)
    assert timed.due(lease(asked), job, 100.0, None, now) == why


@pytest.mark.parametrize(
    ("asked", "saved", "now", "why"),
    [
        ("every:30m", None, START + 1799, ""),
        ("every:30m", None, START + 1800, "every"),
        ("every:30m", START + 1800, START + 3599, ""),
        ("every:30m", START + 1800, START + 3600, "every"),
        ("limit,every:30m", None, END - 50, "limit"),
        ("limit", None, START + 1800, ""),
    ],
)
def test_a_job_is_saved_at_intervals(asked: str, saved: float | None, now: float, why: str) -> None:
    assert timed.due(lease(asked), RunningJob(7, 0, START, END, None), 100.0, saved, now) == why


def test_the_time_for_a_checkpoint() -> None:
    config = Config(checkpoint=Checkpoint(folder="/ck", hold_timeout_s=40, write_mib_s=200))
    first = timed.lead_s(config, lease("limit"), ())
    assert first == pytest.approx(40 + 6000 / 200 + 10 + timed.SPARE_S)
    later = timed.lead_s(config, lease("limit"), (saved("n1", 0), saved("n2", 1)))
    assert later == pytest.approx(40 + timed.SLOWER * 1.5 + 10 + timed.SPARE_S)
