# SPDX-License-Identifier: Apache-2.0
"""Slurm's view of jobs against the leases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.reconcile import judge
from vhpc_slurm.model import (
    Generation,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    Stage,
    Timeline,
)
from vhpc_slurm.slurm.port import JobStatus

LEASE = rules.reserve(
    Generation(1, 0, "0" * 8), request(1), allocation(), identity(), NetworkIdentity(), 0.0
).lease


ASKED = 10_000.0


def record(
    job_id: int,
    restart: int = 0,
    state: LeaseState = LeaseState.READY,
    age: float = 600,
    taken: tuple[str, ...] = (),
) -> LeaseRecord:
    lease = replace(LEASE, generation=Generation(job_id, restart, "0" * 8), state=state)
    return LeaseRecord(lease, ASKED - age, ASKED - age, (), taken=taken)


def status(
    job_id: int, state: str = "RUNNING", restarts: int = 0, reason: str = "None", age: float = 0
) -> JobStatus:
    return JobStatus(job_id, restarts, state, reason, ASKED - age)


def ended(node: str, ago: float) -> Timeline:
    stages = (Stage("start", ASKED - ago - 9, ASKED - ago - 1), Stage("agent", ASKED - ago - 1, ASKED - ago))
    return Timeline(LEASE.generation, node, stages)


@pytest.mark.parametrize(
    ("jobs", "live", "why_ended"),
    [
        ((status(1),), (record(1),), []),
        ((), (record(1),), ["Slurm has no such job"]),
        ((), (record(1, age=5),), []),
        ((), (record(1, state=LeaseState.ENDING),), []),
        ((status(1, restarts=1),), (record(1),), ["Slurm has the job's restart 1"]),
        ((status(1, "PENDING"),), (record(1),), ["the job is PENDING"]),
        ((status(1, "COMPLETING"),), (record(1, state=LeaseState.REFUSED),), ["the job is COMPLETING"]),
        ((status(1, "CONFIGURING"),), (record(1, state=LeaseState.RESERVED),), []),
        ((status(1, "SUSPENDED"),), (record(1),), []),
        ((status(2),), (record(1), record(2)), ["Slurm has no such job"]),
    ],
)
def test_generations_without_their_job_are_ended(
    jobs: tuple[JobStatus, ...], live: tuple[LeaseRecord, ...], why_ended: list[str]
) -> None:
    verdict = judge(jobs, live, asked=ASKED, stuck_s=900)
    assert [why for _, why in verdict.end] == why_ended
    assert verdict.requeue == ()


@pytest.mark.parametrize(
    ("job", "live", "requeued"),
    [
        (status(1, reason="Prolog", age=9999), (), ""),
        (status(1, reason="Prolog", age=899), (record(1),), ""),
        (status(1, reason="None", age=9999), (record(1),), ""),
        (status(1, "CONFIGURING", reason="Prolog", age=901), (record(1),), ""),
        (
            status(1, reason="Prolog", age=901),
            (record(1, state=LeaseState.RESERVED),),
            "its lease was never ready",
        ),
        (status(1, reason="Prolog", age=901), (record(1),), "no node asked for its lease"),
        (status(1, reason="Prolog", age=901), (record(1, taken=("n1",)),), "its Prologs did not end"),
        (
            status(1, reason="Prolog", age=99),
            (replace(record(1), timelines=(ended("n1", 46), ended("n2", 90))),),
            "its Prologs have ended, and Slurm did not notice",
        ),
        (status(1, reason="Prolog", age=99), (replace(record(1), timelines=(ended("n1", 46),)),), ""),
        (
            status(1, reason="Prolog", age=99),
            (replace(record(1), timelines=(ended("n1", 44), ended("n2", 90))),),
            "",
        ),
        (
            status(1, reason="None", age=99),
            (replace(record(1), timelines=(ended("n1", 46), ended("n2", 90))),),
            "",
        ),
        (
            status(1, reason="Prolog", age=901, restarts=1),
            (record(1, taken=("n1",)),),
            "no lease was made for it",
        ),
    ],
)
def test_jobs_that_wait_for_prologs_in_vain_are_requeued(
    job: JobStatus, live: tuple[LeaseRecord, ...], requeued: str
) -> None:
    verdict = judge((job,), live, asked=ASKED, stuck_s=900)
    assert [why for _, why in verdict.requeue] == ([requeued] if requeued else [])
    assert judge((job,), live, asked=ASKED, stuck_s=0).requeue == ()


@pytest.mark.parametrize(
    ("job", "created", "cleared", "requeued"),
    [
        (status(1, age=300), 299, 50, True),
        (status(1, reason="Prolog", age=300), 299, 50, True),
        (status(1, age=300), 299, 40, False),  # Slurm may just be learning of it
        (status(1, age=300), 400, 350, False),  # of another job that had this id
        (status(1, restarts=1, age=300), 299, 50, False),
        (status(1, "COMPLETING", age=300), 299, 50, False),
        (status(2, age=300), 299, 50, False),
    ],
)
def test_jobs_running_after_their_nodes_cleared_are_requeued(
    job: JobStatus, created: float, cleared: float, requeued: bool
) -> None:
    old = replace(record(1, state=LeaseState.RELEASED), created=ASKED - created, updated=ASKED - cleared)
    verdict = judge((job,), (), asked=ASKED, stuck_s=900, released=(old,))
    why = "its nodes have cleared it away, and Slurm forgot its end"
    assert verdict.requeue == (((1, why),) if requeued else ())
    assert judge((job,), (), asked=ASKED, stuck_s=0, released=(old,)).requeue == ()


def test_a_job_that_was_started_again_under_the_same_count_runs() -> None:
    old = replace(record(1, state=LeaseState.RELEASED), created=ASKED - 90, updated=ASKED - 80)
    verdict = judge((status(1, age=95),), (record(1, age=70),), asked=ASKED, stuck_s=900, released=(old,))
    assert verdict.requeue == ()
