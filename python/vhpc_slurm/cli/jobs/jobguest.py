# SPDX-License-Identifier: Apache-2.0
"""A guest of a running job, as `vhpc forward`, `vhpc ssh` and `vhpc cp` choose it, and steps in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from vhpc_slurm.cli import context
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.slurm.hostlist import expand
from vhpc_slurm.slurm.steps import MARK, Step
from vhpc_slurm.slurm.userjobs import UserJobs

NodeOfJob = Annotated[
    str | None,
    typer.Option("--node", metavar="NODE", help="Node of the guest; default that of the batch script."),
]
GuestOfNode = Annotated[
    int, typer.Option("--guest", metavar="N", min=0, help="Number of the guest on its node, from 0.")
]
GUESTS_MAX = 64
"""Most guests of a job on a node, as in guest/lib/sbcast.h."""
PROBE_S = 60.0
ONLY_TASK = '[ "${SLURM_PROCID:-0}" = "$1" ] || exit 0; shift\n'
"""Beginning of a shell script whose first argument is ``JobGuest.task``: all other tasks end at once."""


@dataclass(frozen=True)
class JobGuest:
    """One guest of a job.

    A step has one task for each guest of the node up to the chosen one's number: Slurm's options cannot
    name a guest, but tasks fill the guests of a node in order.
    """

    jobs: UserJobs = field(repr=False)
    job_id: int
    node: str
    task: int = 0
    tasks: int = 1
    nodes: str = ""
    """All nodes of the job, as a hostlist."""

    def __str__(self) -> str:
        return f"guest {self.task} of {self.node}" if self.tasks > 1 else f"the guest of {self.node}"

    def start(self, name: str, command: Sequence[str]) -> Step:
        """Start a step in which one task runs in this guest and has the standard streams.

        Args:
            name: of the step, as squeue shows it.
            command: program and arguments; with several guests, further tasks run it too.

        Raises:
            SlurmError: there is no srun.
        """
        options = [
            *("--jobid", str(self.job_id), f"--job-name={name}", "--quiet", "--overlap", "--mem=0"),
            *("--mpi=none", "--cpu-bind=none", "--chdir=/", "--wait=0", "--kill-on-bad-exit=0"),
            *("--nodes=1", f"--ntasks={self.tasks}", f"--nodelist={self.node}"),
        ]
        if self.tasks > 1:
            options += [f"--input={self.task}", f"--output={self.task}"]
        return self.jobs.start_step(options, command)

    def failure(self, step: Step, code: int | None) -> VhpcError:
        """Why a step has failed, as one line for the user."""
        said = step.complaints()
        return UserError(f"the step in job {self.job_id} failed", said[0] if said else f"exit status {code}")


def find(jobs: UserJobs, job_id: int, node: str | None, guest: int) -> JobGuest:
    """Check that a job runs and belongs to the user, and choose one of its guests.

    Args:
        jobs: Slurm's commands.
        job_id: the job.
        node: name of a node of the job; None is the node of the batch script.
        guest: number of the guest on the node, from 0.

    Raises:
        UserError: the job does not run, belongs to another user, has no guests, or has not this one.
        NoSuchJobError: slurmctld does not know the job.
        SlurmError: slurmctld cannot be asked.
    """
    job, uid = jobs.details(job_id), os.geteuid()
    if uid not in (0, job.uid):
        owner = context.user_name(job.uid) if job.uid >= 0 else "another user"
        raise UserError(f"job {job_id} is not yours", f"it belongs to {owner}", "see: squeue --me")
    if job.state != "RUNNING":
        raise UserError(f"job {job_id} does not run", f"its state is {job.state or 'unknown'}", "see: squeue")
    if not job.image:
        raise UserError(
            f"job {job_id} has no guests", "its AdminComment names no image", "see: sbatch --vhpc-image"
        )
    names = expand(job.nodes)
    if not names or (node is not None and node not in names):
        raise UserError(f"job {job_id} is not on node {node}", f"its nodes are {job.nodes or 'unknown'}")
    found = JobGuest(jobs, job_id, node or names[0], nodes=job.nodes)
    if guest == 0:
        return found
    count = _count(found)
    if guest >= count:
        has = "one guest" if count == 1 else f"{count} guests, from 0 to {count - 1}"
        raise UserError(f"there is no guest {guest} on {found.node}", f"the job has {has} there")
    return JobGuest(jobs, job_id, found.node, guest, count, job.nodes)


def _count(first: JobGuest) -> int:
    """How many guests the job has on a node, as one of them says."""
    step = first.start("vhpc-guests", ["/bin/sh", "-c", f'echo {MARK}; echo "${{VHPC_JOB_GUESTS:-1}}"'])
    try:
        line = step.read_line(16, PROBE_S) if step.begins(PROBE_S) else b""
        if line == b"" and (code := step.wait(PROBE_S)) != 0:
            raise first.failure(step, code)
    finally:
        step.end()
    text = (line or b"").decode("ascii", "replace")
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= GUESTS_MAX:
        raise UserError(f"cannot count the guests on {first.node}", "a guest gave an unexpected answer")
    return int(text)
