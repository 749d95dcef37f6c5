# SPDX-License-Identifier: Apache-2.0
"""The Slurm port over Slurm's own commands; works with 22.05 to 26.05.

Commands are run by full path, without a shell, with an environment of their
own (nothing of a user or of slurmctld's hook environment reaches them) and a
deadline, for a slurmctld that hangs must not hang its own hooks.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vhpc_slurm.slurm.hosts import SINFO_FORMAT, parse_controllers, parse_nodes
from vhpc_slurm.slurm.job import (
    JobRef,
    JobStatus,
    NoSuchJobError,
    NotRequeueableError,
    SlurmError,
    SlurmJob,
    SlurmNode,
)
from vhpc_slurm.slurm.parse import REF_FORMAT, SQUEUE_FORMAT, narrower, parse_job, parse_ref, parse_squeue

T = TypeVar("T")
MAX_COMMENT = 1024
_NO_JOB = "Invalid job id specified"
_NO_SCRIPT, _NO_REQUEUE = "Only batch jobs are accepted", "Requested operation is presently disabled"


class Scontrol:
    """Slurm through scontrol, squeue, sinfo and scancel."""

    def __init__(self, bin_dir: str = "/usr/bin", *, slurm_conf: str = "", timeout_s: float = 5.0) -> None:
        """Use the commands in ``bin_dir``; ``slurm_conf`` empty means Slurm's own default."""
        self._bin = Path(bin_dir)
        self._timeout_s = timeout_s
        self._environment = {"LC_ALL": "C", "PATH": "/usr/bin:/bin", "SLURM_TIME_FORMAT": "%s"}
        if slurm_conf:
            self._environment["SLURM_CONF"] = slurm_conf

    def load(self, job_id: int) -> SlurmJob:
        """One job, by ``scontrol -o show job -d``."""
        text = self._show(_number(job_id))
        again = narrower(text, job_id)
        return parse_job(self._show(again) if again else text, job_id)

    def _show(self, job: str) -> str:
        return self._run("scontrol", "-o", "show", "job", "-d", job)

    def jobs(self) -> tuple[JobStatus, ...]:
        """All pending, running and completing jobs, array elements one by one, also of hidden partitions.

        Where PrivateData hides jobs from this user, SlurmError: a job that is
        only hidden must not be taken for one that has ended.
        """
        return self.all_seen(
            lambda: parse_squeue(
                self._run("squeue", "--noheader", "--all", "--array", "--local", "-O", SQUEUE_FORMAT)
            )
        )

    def all_seen(self, listing: Callable[[], T]) -> T:
        """A listing of jobs during which none was hidden from this user.

        Raises:
            SlurmError: some may have been.
        """
        before = self._sight()
        found = listing()
        if self._sight() != before:
            raise SlurmError("squeue may not have shown all jobs", "slurmctld was started anew meanwhile")
        return found

    def knows(self, job_id: int) -> bool:
        """Whether slurmctld has this job, and the job has not ended."""
        options = ("--noheader", "--all", "--array", "--local", "--jobs", _number(job_id))
        try:
            lines = self._run("squeue", *options, "-O", REF_FORMAT).splitlines()
        except NoSuchJobError:
            return False
        return any(line.split()[:1] == [str(job_id)] for line in lines)

    def ref(self, job_id: int) -> JobRef:
        """How a job is called so that nothing else is meant; one RPC.

        Hooks on nodes are not told whether their job is an element of an array.

        Raises:
            NoSuchJobError: it is gone.
            SlurmError: squeue cannot be asked or read.
        """
        options = ("--noheader", "--all", "--array", "--local", "--states=all", "--jobs", _number(job_id))
        return parse_ref(self._run("squeue", *options, "-O", REF_FORMAT), job_id)

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes, by sinfo.

        ``scontrol show node`` would print what a node says of itself (its system's
        name, its version) in front of, or behind, what slurmctld knows.
        """
        options = ("--all", "--local", "--Node", "--noheader", f"--format={SINFO_FORMAT}")
        return parse_nodes(self._run("sinfo", *options))

    def controllers(self) -> tuple[str, ...]:
        """Hosts of slurmctld, by ``scontrol show config``."""
        return parse_controllers(self._run("scontrol", "show", "config"))

    def cancel(self, job_id: int) -> None:
        """End a job, by scancel, which says nothing about jobs that are gone."""
        try:
            name = self.ref(job_id).whole
        except NoSuchJobError:
            return
        self._run("scancel", name)

    def set_admin_comment(self, job_id: int, text: str) -> None:
        """Set AdminComment to at most MAX_COMMENT characters on one line."""
        line = " ".join(text.split())[:MAX_COMMENT]
        self._run("scontrol", "update", f"jobid={self.ref(job_id).alone}", f"AdminComment={line}")

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue."""
        try:
            self._run("scontrol", "requeue", self.ref(job_id).whole)
        except SlurmError as err:
            if _NO_SCRIPT in err.why or _NO_REQUEUE in err.why:
                raise NotRequeueableError(err.what, err.why) from err
            raise

    def _sees_all(self, settings: str) -> bool:
        """Whether slurmctld shows this user the jobs of others, as it is configured and knows him now.

        Operators see all (slurm.conf(5), PrivateData).  slurmctld's own word
        counts, not slurmdbd's: who is one is forgotten where slurmctld starts
        without its database.
        """
        private = re.search(r"^PrivateData\s*=\s*(\S+)", settings, re.MULTILINE)
        if private is None or "jobs" not in private[1].split(","):
            return True
        owner = re.search(r"^SlurmUser\s*=\s*\S+?\((\d+)\)", settings, re.MULTILINE)
        uid = os.geteuid()
        if uid in (0, int(owner[1]) if owner else 0):
            return True
        known = self._run("scontrol", "show", "assoc_mgr", f"users={_user_name(uid)}", "flags=users")
        level = re.search(rf"^UserName=\S+?\({uid}\) .*\bAdminLevel=(\S+)", known, re.MULTILINE)
        return level is not None and level[1] in ("Operator", "Administrator")

    def _sight(self) -> str:
        """Tells one start or configuration of slurmctld from the next.

        Raises:
            SlurmError: jobs of others are hidden from this user.
        """
        settings = self._run("scontrol", "show", "config")
        if not self._sees_all(settings):
            raise SlurmError(
                "squeue does not show all jobs",
                f"PrivateData of slurm.conf hides jobs of others from {_user_name(os.geteuid())}",
                "make vhpcd's user an operator (sacctmgr modify user … set adminlevel=operator), or run "
                "vhpcd as SlurmUser (controller.user)",
            )
        boot = re.search(r"^BOOT_TIME\s*=\s*(\S+)", settings, re.MULTILINE)
        return boot[1] if boot else ""

    def _run(self, command: str, *arguments: str) -> str:
        words = [command, *(word for word in arguments if not word.startswith("-"))]
        what = " ".join(words[:4] if words[1:2] == ["show"] else words[:2]) + " failed"
        try:
            done = subprocess.run(
                [str(self._bin / command), *arguments],
                env=self._environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as err:
            raise SlurmError(
                what, f"no answer within {self._timeout_s:g} s", "is slurmctld up? see: scontrol ping"
            ) from err
        except OSError as err:
            raise SlurmError(what, str(err), "set slurm_bin in vhpc.toml") from err
        # Names may be in any encoding; U+FFFD stands for what is not UTF-8.
        complaint = (done.stderr or done.stdout).decode(errors="replace").strip()
        if done.returncode:
            if _NO_JOB in complaint:
                raise NoSuchJobError(what, _NO_JOB)
            raise SlurmError(what, complaint[-300:] or f"exit status {done.returncode}")
        return done.stdout.decode(errors="replace")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _number(job_id: int) -> str:
    if job_id <= 0:
        raise ValueError(f"not a job id: {job_id}")
    return str(job_id)
