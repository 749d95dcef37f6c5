# SPDX-License-Identifier: Apache-2.0
"""Compares Slurm's jobs with the leases, once a minute.  Pure.

A hook may never run: slurmctld is killed between scheduling and the end of
PrologSlurmctld, EpilogSlurmctld cannot reach vhpcd, or a job is lost with slurmctld's
unsaved state. squeue shows, in one RPC, which generations have no job any more, and
which jobs wait for Prologs that will never run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vhpc_slurm.model import Generation, LeaseRecord, LeaseState
from vhpc_slurm.slurm.port import COMPLETING, PENDING, REASON_PROLOG, RUNNING, JobStatus

log = logging.getLogger("vhpcd")

GRACE_S = 30.0
"""Seconds; a younger lease is not judged: it may have been made after squeue was asked."""
NO_SUCH_JOB = "Slurm has no such job"
NOTICE_S = 45.0
"""Seconds after the end of the last Prolog by which slurmctld has noticed it, or never will."""


@dataclass(frozen=True)
class Verdict:
    """Generations to end and jobs to requeue, each with the reason."""

    end: tuple[tuple[Generation, str], ...]
    requeue: tuple[tuple[int, str], ...]


def judge(
    jobs: tuple[JobStatus, ...],
    live: tuple[LeaseRecord, ...],
    *,
    asked: float,
    stuck_s: float,
    released: tuple[LeaseRecord, ...] = (),
) -> Verdict:
    """Compare; pure.

    Args:
        jobs: all jobs of the cluster as of the time ``asked`` (seconds since the epoch).
        live: all leases that are not released, as of a later moment; with the timelines of those whose
            job waits for Prologs.
        asked: when squeue was started.
        stuck_s: how long a job may be in Reason=Prolog without a usable lease; 0: unlimited.
        released: released leases of jobs that run.
    """
    by_id = {job.job_id: job for job in jobs}
    end = []
    for record in live:
        generation = record.lease.generation
        if record.lease.state is not LeaseState.ENDING and record.updated < asked - GRACE_S:
            reason = _over(generation, by_id.get(generation.job_id))
            if reason:
                end.append((generation, reason))
    ending = {generation for generation, _ in end}
    usable = {
        (record.lease.generation.job_id, record.lease.generation.restart): record
        for record in live
        if record.lease.state is not LeaseState.ENDING and record.lease.generation not in ending
    }
    ours = {record.lease.generation.job_id for record in live}
    over = {(record.lease.generation.job_id, record.lease.generation.restart): record for record in released}
    requeue = []
    for job in jobs:
        if stuck_s and job.state == RUNNING and (job.job_id, job.restarts) not in usable:
            reason = _end_lost(job, over.get((job.job_id, job.restarts)), asked)
            if reason:
                requeue.append((job.job_id, reason))
                continue
        # A job that never had a lease may have no guests: it is not judged.
        if job.job_id in ours and stuck_s and awaits_prologs(job):
            lease = usable.get((job.job_id, job.restarts))
            reason = _unnoticed(lease, asked)
            if not reason and job.started is not None and asked - job.started > stuck_s:
                reason = _stuck(lease)
            if reason:
                requeue.append((job.job_id, reason))
    return Verdict(tuple(end), tuple(requeue))


def _over(generation: Generation, job: JobStatus | None) -> str:
    """Why a generation is over; empty when it is not."""
    if job is None:
        return NO_SUCH_JOB
    if job.restarts != generation.restart:
        return f"Slurm has the job's restart {job.restarts}"
    if job.state in (PENDING, COMPLETING):
        return f"the job is {job.state}"
    return ""


def awaits_prologs(job: JobStatus) -> bool:
    """Whether Slurm waits for the Prologs of a job's nodes."""
    return job.state == RUNNING and job.reason == REASON_PROLOG


def _unnoticed(record: LeaseRecord | None, asked: float) -> str:
    """Why a job waits although every Prolog of it has ended; empty when that is not so.

    slurmd tells slurmctld once that a Prolog has ended.  A slurmd or slurmctld
    that was restarted meanwhile is never told, and the job would hold its
    nodes until BatchStartTimeout is over.
    """
    if record is None:
        return ""
    ended = {line.node: max(stage.ended for stage in line.stages) for line in record.timelines if line.stages}
    nodes = set(record.lease.allocation.node_names)
    if nodes <= ended.keys() and max(ended.values()) < asked - NOTICE_S:
        return "its Prologs have ended, and Slurm did not notice"
    return ""


def _end_lost(job: JobStatus, record: LeaseRecord | None, asked: float) -> str:
    """Why a job seems to run that has ended; empty when that is not so.

    A slurmctld that is killed forgets ends that it has not saved.  It finds
    out by itself only when BatchStartTimeout is over.  Ids are used again
    after such a crash, so the lease must be of this start of the job.
    """
    if record is None or job.started is None or record.created < job.started - 1.0:
        return ""
    if record.updated < asked - NOTICE_S:
        return "its nodes have cleared it away, and Slurm forgot its end"
    return ""


def _stuck(record: LeaseRecord | None) -> str:
    """Why a job that has waited very long for Prologs will wait for ever.

    Slurm 25.05 to 26.05 take a PrologSlurmctld that their own shutdown killed
    for a success, and then run no Prolog: no lease, or one that no node took.
    A Prolog that was killed together with its slurmd never ends at all.
    """
    if record is None:
        return "no lease was made for it"
    if record.lease.state is LeaseState.RESERVED:
        return "its lease was never ready"
    if not record.taken:
        return "no node asked for its lease"
    return "its Prologs did not end"
