# SPDX-License-Identifier: Apache-2.0
"""Slurm's accounting database: its record of a job, and the AdminComment of a job that has ended.

An id of Slurm's commands can mean more than one job: that of the last array task is also the id of
the array, and that of the first component of a heterogeneous job also of the whole. So a job is
named here as sacct prints it (``7``, ``7_1``, ``7+0``).
"""

from __future__ import annotations

import re

from vhpc_slurm.record import Record
from vhpc_slurm.slurm.port import SlurmError
from vhpc_slurm.slurm.scontrol import MAX_COMMENT, Scontrol
from vhpc_slurm.terminal import one_line

_FIELDS = "JobIDRaw,JobID,State,ElapsedRaw,AllocCPUS,User,AdminComment"
_NAME = re.compile(r"[1-9][0-9]{0,18}(?:[_+][0-9]{1,9})?")
COMMENT_MAX = MAX_COMMENT
"""Characters of an AdminComment that vhpc writes."""
NOT_ENDED = ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING")


class AccountedJob(Record, frozen=True):
    """A job in the accounting database.

    Attributes:
        name: with it Slurm's commands find this job only.
        state: the first word of its state.
        elapsed_s: seconds that it has run; a guest's boot is part of them.
        cpus: allocated CPUs.
        user: its owner.
        comment: its AdminComment.
    """

    name: str
    state: str
    elapsed_s: int
    cpus: int
    user: str
    comment: str

    @property
    def ended(self) -> bool:
        """Whether the database has the job's end."""
        return self.state not in NOT_ENDED


class Accounting(Scontrol):
    """sacct and sacctmgr, with the rights of the user who runs this process."""

    def job(self, job_id: int) -> AccountedJob | None:
        """The last record of a job; None if the database has none that this user may see.

        Raises:
            SlurmError: sacct failed.
        """
        options = ("--noheader", "--parsable2", "--allocations", f"--jobs={int(job_id)}")
        for line in self._run("sacct", *options, f"--format={_FIELDS}").splitlines():
            row = line.split("|", 6)
            if len(row) == 7 and row[0] == str(job_id) and _NAME.fullmatch(row[1]):
                return _job(row)
        return None

    def set_comment(self, job: AccountedJob, text: str) -> None:
        """Replace the AdminComment of a job that has ended; it needs the rights of an operator.

        Raises:
            SlurmError: sacctmgr failed.
        """
        line = one_line(text)[:COMMENT_MAX]
        where = ("where", f"jobid={job.name}")
        self._run("sacctmgr", "-i", "modify", "job", *where, "set", f"AdminComment={line}")


def _job(row: list[str]) -> AccountedJob:
    if not (row[3].isdecimal() and row[4].isdecimal()):
        raise SlurmError(f"cannot read sacct's record of job {row[0]}", f"{row[3:5]!r} are not numbers")
    state = (row[2].split() or ["UNKNOWN"])[0]
    return AccountedJob(row[1], state, int(row[3]), int(row[4]), row[5], row[6])
