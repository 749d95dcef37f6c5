# SPDX-License-Identifier: Apache-2.0
"""Compares Slurm's jobs with the leases, once a minute.  Pure.

A hook may never run: slurmctld is killed between scheduling and the end of
PrologSlurmctld, EpilogSlurmctld cannot reach vhpcd, or a job is lost with slurmctld's
unsaved state. squeue shows, in one RPC, which generations have no job any more, and
which jobs wait for Prologs that will never run.

The wall clock can be set, and clocks of hosts differ, so no time of one host is compared
with that of another, and no age is computed by the wall clock: what looks wrong must look
wrong for a while by a clock that never jumps (``Patience``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from vhpc_slurm.model import Generation, LeaseRecord, LeaseState
from vhpc_slurm.slurm.port import COMPLETING, PENDING, REASON_PROLOG, RUNNING, JobStatus

log = logging.getLogger("vhpcd")

NO_SUCH_JOB = "Slurm has no such job"
NOTICE_S = 45.0
"""Seconds after an event; if slurmctld has not noticed it by then, it never will."""
NO_PROLOG_S = 120.0
"""slurmctld has the Prolog started within a second after the lease, or when the node answers again."""


@dataclass(frozen=True)
class Suspect:
    """A start of a job that will hold its nodes for nothing, if this lasts for ``patience_s`` seconds."""

    job_id: int
    restarts: int
    patience_s: float
    reason: str

    @property
    def key(self) -> tuple[int, int, float]:
        """Tells suspicions apart; the reason may change meanwhile."""
        return self.job_id, self.restarts, self.patience_s


@dataclass(frozen=True)
class Verdict:
    """Generations to end, each with the reason, and jobs that may have to be requeued."""

    end: tuple[tuple[Generation, str], ...]
    suspects: tuple[Suspect, ...]


class Patience:
    """Remembers since when jobs are suspect; what is not suspect once is forgotten."""

    def __init__(self, steady: Callable[[], float]) -> None:
        """``steady`` is a clock in seconds that never jumps."""
        self._steady = steady
        self._since: dict[tuple[int, int, float], float] = {}

    def exhausted(self, suspects: Iterable[Suspect]) -> dict[int, str]:
        """The jobs to requeue now, with the reasons."""
        now, all_ = self._steady(), tuple(suspects)
        self._since = {one.key: self._since.get(one.key, now) for one in all_}
        return {one.job_id: one.reason for one in all_ if now - self._since[one.key] >= one.patience_s}


def judge(
    jobs: tuple[JobStatus, ...],
    live: tuple[LeaseRecord, ...],
    *,
    known: Collection[Generation],
    stuck_s: float,
    released: tuple[LeaseRecord, ...] = (),
) -> Verdict:
    """Compare; pure.

    Args:
        jobs: all jobs of the cluster.
        live: all leases that are not released, as of a later moment; with the timelines of those whose
            job waits for Prologs.
        known: generations that had a lease before squeue was started: ``jobs`` has their jobs, if they exist.
        stuck_s: how long a job may be in Reason=Prolog without a usable lease; 0: unlimited.
        released: released leases of jobs that run.
    """
    by_id = {job.job_id: job for job in jobs}
    end = []
    for record in live:
        generation = record.lease.generation
        if record.lease.state is not LeaseState.ENDING and generation in known:
            reason = _over(generation, by_id.get(generation.job_id))
            if reason:
                end.append((generation, reason))
    ending = {generation for generation, _ in end}
    usable = {
        _start(record): record
        for record in live
        if record.lease.state is not LeaseState.ENDING and record.lease.generation not in ending
    }
    ours = {record.lease.generation.job_id for record in live}
    over = {_start(record): record for record in released}
    busy = _busy(live, {job.job_id for job in jobs if awaits_prologs(job)})
    suspects = []
    for job in jobs if stuck_s else ():
        start = (job.job_id, job.restarts)
        # A job that never had a lease may have no guests: it is not judged.
        if job.state == RUNNING and start not in usable and _end_lost(job, over.get(start)):
            why = "its nodes have cleared it away, and Slurm forgot its end"
            suspects.append(Suspect(*start, NOTICE_S, why))
        elif job.job_id in ours and awaits_prologs(job):
            lease = usable.get(start)
            if _unnoticed(lease):
                suspects.append(Suspect(*start, NOTICE_S, "its Prologs have ended, and Slurm did not notice"))
            suspects.append(Suspect(*start, stuck_s, _stuck(lease)))
        if job.state == RUNNING and (node := _without_prolog(usable.get(start), busy)):
            suspects.append(Suspect(*start, NO_PROLOG_S, f"its Prolog has not run on {node}"))
    return Verdict(tuple(end), tuple(suspects))


def _start(record: LeaseRecord) -> tuple[int, int]:
    return record.lease.generation.job_id, record.lease.generation.restart


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


def _unnoticed(record: LeaseRecord | None) -> bool:
    """Whether every Prolog of a job that waits for them has ended.

    slurmd tells slurmctld once that a Prolog has ended.  A slurmd or slurmctld
    that was restarted meanwhile is never told, and the job would hold its
    nodes until BatchStartTimeout is over.
    """
    if record is None:
        return False
    return _prologs_over(record).issuperset(record.lease.allocation.node_names)


def _prologs_over(record: LeaseRecord) -> set[str]:
    """The nodes that have reported the end of their Prolog."""
    return {line.node for line in record.timelines if line.stages}


def _busy(live: tuple[LeaseRecord, ...], waiting: Collection[int]) -> frozenset[str]:
    """Nodes on which a Prolog or Epilog may run now: with PrologFlags=Serial slurmd starts no other there.

    ``waiting`` are the jobs that wait for Prologs, whose records have timelines.
    """
    busy: set[str] = set()
    for record in live:
        if record.lease.state is LeaseState.ENDING:
            busy |= set(record.taken) - set(record.acknowledged)
        elif record.lease.generation.job_id in waiting:
            busy |= set(record.taken) - _prologs_over(record)
    return frozenset(busy)


def _without_prolog(record: LeaseRecord | None, busy: Collection[str]) -> str:
    """The first node that has not asked for this lease, and where no other hook runs; empty: no node.

    A Prolog is lost if slurmctld is killed before it has had it started on a node that did not answer,
    and if the node is rebooted just then.  Slurm waits for it until BatchStartTimeout is over.
    """
    if record is None or record.lease.state is not LeaseState.READY:
        return ""
    absent = (node for node in record.lease.allocation.node_names if node not in record.taken)
    return next((node for node in absent if node not in busy), "")


def _end_lost(job: JobStatus, record: LeaseRecord | None) -> bool:
    """Whether a job seems to run that has ended.

    A slurmctld that is killed forgets ends that it has not saved.  It finds
    out by itself only when BatchStartTimeout is over.  Ids are used again
    after such a crash, so the lease must be of this start of the job.  Both
    times are of the controller; a step of its clock in between makes the
    comparison say no.
    """
    return record is not None and job.started is not None and record.created >= job.started - 1.0


def _stuck(record: LeaseRecord | None) -> str:
    """Why a job that has waited very long for Prologs will not start.

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
