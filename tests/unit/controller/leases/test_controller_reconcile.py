# SPDX-License-Identifier: Apache-2.0
"""Slurm's view of jobs against the leases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.reconcile import Patience, Suspect, judge
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


NOW = 10_000.0


def record(
    job_id: int,
    restart: int = 0,
    state: LeaseState = LeaseState.READY,
    age: float = 600,
    taken: tuple[str, ...] = ("n1", "n2"),
) -> LeaseRecord:
    lease = replace(LEASE, generation=Generation(job_id, restart, "0" * 8), state=state)
    return LeaseRecord(lease, NOW - age, NOW - age, (), taken=taken)


def status(
    job_id: int, state: str = "RUNNING", restarts: int = 0, reason: str = "None", age: float = 0
) -> JobStatus:
    return JobStatus(job_id, restarts, state, reason, NOW - age)


def generations(live: tuple[LeaseRecord, ...]) -> frozenset[Generation]:
    return frozenset(record.lease.generation for record in live)


def ended(node: str) -> Timeline:
    """A node's clock may be an hour ahead."""
    stages = (Stage("start", NOW + 3600, NOW + 3601), Stage("agent", NOW + 3601, NOW + 3602))
    return Timeline(LEASE.generation, node, stages)


@pytest.mark.parametrize(
    ("jobs", "live", "why_ended"),
    [
        ((status(1),), (record(1),), []),
        ((), (record(1),), ["Slurm has no such job"]),
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
    verdict = judge(jobs, live, known=generations(live), stuck_s=900)
    assert [why for _, why in verdict.end] == why_ended
    assert verdict.suspects == ()
    assert judge(jobs, live, known=frozenset(), stuck_s=900).end == (), "made after squeue was started"


@pytest.mark.promise("slurm.lost-start", "clock.step")
@pytest.mark.parametrize(
    ("job", "live", "suspected"),
    [
        (status(1, reason="Prolog"), (), {}),
        (status(1, reason="None"), (record(1, taken=()),), {120: "its Prolog has not run on n1"}),
        (status(1, "CONFIGURING", reason="Prolog"), (record(1),), {}),
        (
            status(1, reason="Prolog"),
            (record(1, state=LeaseState.RESERVED),),
            {900: "its lease was never ready"},
        ),
        (
            status(1, reason="Prolog"),
            (record(1, taken=()),),
            {120: "its Prolog has not run on n1", 900: "no node asked for its lease"},
        ),
        (
            status(1, reason="Prolog"),
            (record(1, taken=("n1",)),),
            {120: "its Prolog has not run on n2", 900: "its Prologs did not end"},
        ),
        (
            status(1, reason="Prolog"),
            (replace(record(1, taken=("n1", "n2")), timelines=(ended("n1"), ended("n2"))),),
            {45: "its Prologs have ended, and Slurm did not notice", 900: "its Prologs did not end"},
        ),
        (
            status(1, reason="Prolog"),
            (replace(record(1, taken=("n1", "n2")), timelines=(ended("n1"),)),),
            {900: "its Prologs did not end"},
        ),
        (status(1, reason="None"), (record(1, taken=("n1", "n2")),), {}),
        (status(1, reason="None"), (record(1, state=LeaseState.REFUSED),), {}),
        (
            status(1, reason="Prolog", restarts=1),
            (record(1, taken=("n1",)),),
            {900: "no lease was made for it"},
        ),
    ],
)
def test_jobs_that_wait_for_prologs_in_vain_are_suspect(
    job: JobStatus, live: tuple[LeaseRecord, ...], suspected: dict[float, str]
) -> None:
    known = generations(live)
    found = judge((job,), live, known=known, stuck_s=900).suspects
    assert {suspect.patience_s: suspect.reason for suspect in found} == suspected
    assert {(suspect.job_id, suspect.restarts) for suspect in found} <= {(job.job_id, job.restarts)}
    assert judge((job,), live, known=known, stuck_s=0).suspects == ()


@pytest.mark.parametrize(
    ("other", "suspected"),
    [
        (record(2, taken=("n1",)), True),
        (record(2, taken=("n2",)), False),
        (replace(record(2, taken=("n2",)), timelines=(ended("n2"),)), True),
        (record(2, state=LeaseState.ENDING, taken=("n2",)), False),
        (replace(record(2, state=LeaseState.ENDING, taken=("n2",)), acknowledged=("n2",)), True),
    ],
    ids=["on-another-node", "its-prolog-runs", "its-prolog-has-ended", "its-epilog-runs", "it-has-ended"],
)
def test_a_prolog_that_waits_for_other_hooks_is_not_missed(other: LeaseRecord, suspected: bool) -> None:
    """With PrologFlags=Serial slurmd runs one after the other."""
    live = (record(1, taken=("n1",)), other)
    jobs = (status(1, reason="Prolog"), status(2, reason="Prolog"))
    found = judge(jobs, live, known=generations(live), stuck_s=900).suspects
    assert any(suspect.job_id == 1 and suspect.patience_s == 120 for suspect in found) is suspected


@pytest.mark.parametrize(
    ("job", "created", "suspected"),
    [
        (status(1, age=300), 299, True),
        (status(1, reason="Prolog", age=300), 299, True),
        (status(1, age=300), 400, False),  # of another job that had this id
        (status(1, restarts=1, age=300), 299, False),
        (status(1, "COMPLETING", age=300), 299, False),
        (status(2, age=300), 299, False),
    ],
)
def test_jobs_running_after_their_nodes_cleared_are_suspect(
    job: JobStatus, created: float, suspected: bool
) -> None:
    old = replace(record(1, state=LeaseState.RELEASED), created=NOW - created)
    found = judge((job,), (), known=(), stuck_s=900, released=(old,)).suspects
    why = "its nodes have cleared it away, and Slurm forgot its end"
    assert found == ((Suspect(1, 0, 45, why),) if suspected else ())
    assert judge((job,), (), known=(), stuck_s=0, released=(old,)).suspects == ()


def test_a_job_that_was_started_again_under_the_same_count_runs() -> None:
    old = replace(record(1, state=LeaseState.RELEASED), created=NOW - 90)
    live = (record(1, age=70),)
    verdict = judge((status(1, age=95),), live, known=generations(live), stuck_s=900, released=(old,))
    assert verdict.suspects == ()


@pytest.mark.promise("clock.step")
def test_a_job_is_requeued_when_it_has_been_suspect_for_long() -> None:
    now = [50.0]
    patience = Patience(lambda: now[0])
    early, late = Suspect(1, 0, 45, "not noticed"), Suspect(1, 0, 900, "never ready")
    other = Suspect(2, 0, 45, "not noticed")
    assert patience.exhausted((early, late, other)) == {}
    now[0] += 44
    assert patience.exhausted((early, late)) == {}
    now[0] += 1
    assert patience.exhausted((early, late, other)) == {1: "not noticed"}, "job 2 was not suspect meanwhile"
    now[0] += 855
    assert patience.exhausted((replace(late, reason="no node asked"),)) == {1: "no node asked"}
    assert patience.exhausted((replace(late, restarts=1),)) == {}, "another start of the job"
