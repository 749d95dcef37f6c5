# SPDX-License-Identifier: Apache-2.0
"""The Slurm port over Slurm's own commands; works with 22.05 to 26.05.

Commands run by full path, without a shell, with a fixed environment (no
variable of a user or of a hook reaches them) and with a deadline: a slurmctld
that hangs must not hang its own hooks.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vhpc_slurm.slurm.hosts import (
    DRAINED_FORMAT,
    SINFO_FORMAT,
    parse_controllers,
    parse_drained,
    parse_node_resources,
    parse_nodes,
    parse_partitions,
)
from vhpc_slurm.slurm.parse import (
    COMMENT_FORMAT,
    REF_FORMAT,
    RUNNING_FORMAT,
    SQUEUE_FORMAT,
    narrower,
    parse_comment,
    parse_job,
    parse_ref,
    parse_requeue,
    parse_running,
    parse_squeue,
    shows_comment,
)
from vhpc_slurm.slurm.port import (
    JobRef,
    JobStatus,
    NodeResources,
    NoSuchJobError,
    NotRequeueableError,
    RunningJob,
    SlurmError,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    Standing,
)
from vhpc_slurm.slurm.settings import SlurmSettings
from vhpc_slurm.terminal import one_line

T = TypeVar("T")
MAX_COMMENT = 1024
MAX_REASON = 256
"""Longest Reason of a drained node that vhpc sets; sinfo -R shows less."""
_NO_JOB = "Invalid job id specified"
_PENDING = "Job is pending execution"
_NO_SCRIPT, _NO_REQUEUE = "Only batch jobs are accepted", "Requested operation is presently disabled"


class Scontrol:
    """Slurm through scontrol, squeue, sinfo, scancel and sacctmgr."""

    def __init__(self, bin_dir: str = "/usr/bin", *, slurm_conf: str = "", timeout_s: float = 5.0) -> None:
        """Use the commands in ``bin_dir``; ``slurm_conf`` empty means Slurm's own default."""
        self._bin = Path(bin_dir)
        self._timeout_s = timeout_s
        self._environment = {"LC_ALL": "C", "PATH": "/usr/bin:/bin", "SLURM_TIME_FORMAT": "%s"}
        if slurm_conf:
            self._environment["SLURM_CONF"] = slurm_conf

    def load(self, job_id: int) -> SlurmJob:
        """One job, by ``scontrol -o show job -d``."""
        return parse_job(self._record(job_id), job_id)

    def load_with_comment(self, job_id: int) -> tuple[SlurmJob, str]:
        """One job and its AdminComment; a second command, squeue, if it seems to have one."""
        record = self._record(job_id)
        job, comment = parse_job(record, job_id), ""
        if shows_comment(record):
            options = ("--noheader", "--all", "--array", "--local", "--states=all", "--jobs", _number(job_id))
            comment = parse_comment(self._run("squeue", *options, "-O", COMMENT_FORMAT), job_id)
        return job, comment

    def may_requeue(self, job_id: int) -> bool:
        """Whether a job may be put back into the queue, by ``scontrol -o show job``."""
        return parse_requeue(self._record(job_id), job_id)

    def _record(self, job_id: int) -> str:
        text = self._show(_number(job_id))
        again = narrower(text, job_id)
        return self._show(again) if again else text

    def _show(self, job: str) -> str:
        return self._run("scontrol", "-o", "show", "job", "-d", job)

    def jobs(self) -> tuple[JobStatus, ...]:
        """All pending, running and completing jobs, one line per array task, also of hidden partitions.

        SlurmError where PrivateData hides jobs from this user: a hidden job must
        not be taken for an ended one.
        """
        return self.all_seen(
            lambda: parse_squeue(
                self._run("squeue", "--noheader", "--all", "--array", "--local", "-O", SQUEUE_FORMAT)
            )
        )

    def all_seen(self, listing: Callable[[], T]) -> T:
        """Return a listing of jobs, and make sure that none was hidden from this user.

        Raises:
            SlurmError: some may have been hidden.
        """
        before = self._sight()
        found = listing()
        if self._sight() != before:
            raise SlurmError("squeue may not have shown all jobs", "slurmctld was restarted while squeue ran")
        return found

    def running(self) -> tuple[RunningJob, ...]:
        """Times of all jobs that run; those that are hidden from this user are not among them."""
        options = ("--noheader", "--all", "--array", "--local", "--states=RUNNING", "-O", RUNNING_FORMAT)
        return parse_running(self._run("squeue", *options))

    def knows(self, job_id: int) -> bool:
        """Whether slurmctld has this job, and the job has not ended."""
        options = ("--noheader", "--all", "--array", "--local", "--jobs", _number(job_id))
        try:
            lines = self._run("squeue", *options, "-O", REF_FORMAT).splitlines()
        except NoSuchJobError:
            return False
        return any(line.split()[:1] == [str(job_id)] for line in lines)

    def ref(self, job_id: int) -> JobRef:
        """Name of a job for Slurm's commands; one RPC.

        Slurm does not tell hooks on nodes whether their job is an array task.

        Raises:
            NoSuchJobError: slurmctld has no such job.
            SlurmError: squeue failed, or its output cannot be parsed.
        """
        options = ("--noheader", "--all", "--array", "--local", "--states=all", "--jobs", _number(job_id))
        return parse_ref(self._run("squeue", *options, "-O", REF_FORMAT), job_id)

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes, by sinfo.

        ``scontrol show node`` also prints text that the node itself sends (name and
        version of its operating system).
        """
        options = ("--all", "--local", "--Node", "--noheader", f"--format={SINFO_FORMAT}")
        return parse_nodes(self._run("sinfo", *options))

    def drained(self) -> frozenset[str]:
        """Nodes that are drained for a reason of vhpc, by sinfo."""
        options = ("--all", "--local", "--Node", "--noheader", "--states=drain")
        return parse_drained(self._run("sinfo", *options, f"--format={DRAINED_FORMAT}"))

    def controllers(self) -> tuple[str, ...]:
        """Hosts of slurmctld, by ``scontrol show config``."""
        return parse_controllers(self._run("scontrol", "show", "config"))

    def node_resources(self, name: str = "") -> tuple[NodeResources, ...]:
        """Memory and GRES of one node or of all, by ``scontrol show node``."""
        return parse_node_resources(self._run("scontrol", "-o", "show", "node", *filter(None, [name])))

    def settings(self) -> SlurmSettings:
        """Slurm's configuration, by ``scontrol show config``."""
        return SlurmSettings.parse(self._run("scontrol", "show", "config"))

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """Partitions, by ``scontrol show partition``."""
        return parse_partitions(self._run("scontrol", "-o", "show", "partition"))

    def admin_level(self, user: str) -> str:
        """AdminLevel of a user in slurmdbd, by sacctmgr."""
        options = ("--noheader", "--parsable2", "show", "user", user, "format=User,AdminLevel")
        rows = [line.partition("|") for line in self._run("sacctmgr", *options).split()]
        return next((level for name, _, level in rows if name == user), "None")

    def standing(self, user: str) -> Standing:
        """AdminLevel and coordinated accounts of a user, by sacctmgr."""
        options = ("--noheader", "--parsable2", "show", "user", user, "withcoord")
        rows = [
            line.split("|")
            for line in self._run("sacctmgr", *options, "format=User,AdminLevel,Coordinators").splitlines()
        ]
        found = next((row for row in rows if len(row) == 3 and row[0] == user), None)
        if found is None:
            return Standing()
        return Standing(found[1], tuple(name for name in found[2].split(",") if name))

    def accounts(self, user: str, account: str = "") -> tuple[str, ...]:
        """Accounts of a user's associations, by ``scontrol show assoc_mgr``; its output may be long."""
        only = (f"accounts={account}",) if account else ()
        known = self._run("scontrol", "show", "assoc_mgr", f"users={user}", *only, "flags=assoc")
        row = rf"^ClusterName=\S+ Account=(\S+) UserName={re.escape(user)}\(\d+\) "
        return tuple(dict.fromkeys(re.findall(row, known, re.MULTILINE)))

    def drain(self, node: str, reason: str) -> None:
        """Drain a node, by ``scontrol update``."""
        self._run(
            "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={one_line(reason)[:MAX_REASON]}"
        )

    def cancel(self, job_id: int) -> None:
        """End a job, by scancel, which reports no error for jobs that have ended."""
        self._scancel(job_id)

    def end_script(self, job_id: int) -> None:
        """Send SIGTERM to the batch script only."""
        self._scancel(job_id, "--batch", "--signal=TERM")

    def _scancel(self, job_id: int, *options: str) -> None:
        try:
            name = self.ref(job_id).whole
        except NoSuchJobError:
            return
        self._run("scancel", *options, name)

    def set_admin_comment(self, job: int | JobRef, text: str) -> None:
        """Set AdminComment to at most MAX_COMMENT characters on one line."""
        line = one_line(text)[:MAX_COMMENT]
        ref = job if isinstance(job, JobRef) else self.ref(job)
        self._run("scontrol", "update", f"jobid={ref.alone}", f"AdminComment={line}")

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue."""
        try:
            self._run("scontrol", "requeue", self.ref(job_id).whole)
        except SlurmError as err:
            if _PENDING in err.why:
                return  # an earlier attempt whose answer was lost, or vhpcd, has requeued it
            if _NO_SCRIPT in err.why or _NO_REQUEUE in err.why:
                raise NotRequeueableError(err.what, err.why) from err
            raise

    def _sees_all(self, settings: str) -> bool:
        """Whether slurmctld shows this user the jobs of other users now.

        Operators see all jobs (slurm.conf(5), PrivateData).  Ask slurmctld for the
        AdminLevel, not slurmdbd: a slurmctld that starts without its database does
        not know who is an operator.
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
        """Start time of slurmctld, to notice that it was restarted or reconfigured.

        Raises:
            SlurmError: jobs of other users are hidden from this user.
        """
        settings = self._run("scontrol", "show", "config")
        if not self._sees_all(settings):
            raise SlurmError(
                "squeue does not show all jobs",
                f"PrivateData in slurm.conf hides jobs of other users from {_user_name(os.geteuid())}",
                "make vhpcd's user an operator (sacctmgr modify user … set adminlevel=operator), or run "
                "vhpcd as SlurmUser (controller.user)",
            )
        boot = re.search(r"^BOOT_TIME\s*=\s*(\S+)", settings, re.MULTILINE)
        return boot[1] if boot else ""

    def _run(self, command: str, *arguments: str) -> str:
        what = f"{_short(command, arguments)} failed"
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
            raise SlurmError(what, str(err), "set controller.slurm_bin in vhpc.toml") from err
        # Names may be in any encoding; what is not UTF-8 becomes U+FFFD.
        complaint = (done.stderr or done.stdout).decode(errors="replace").strip()
        if done.returncode:
            if _NO_JOB in complaint:
                raise NoSuchJobError(what, _NO_JOB)
            raise SlurmError(what, complaint[-300:] or f"exit status {done.returncode}")
        return done.stdout.decode(errors="replace")


def _short(command: str, arguments: tuple[str, ...]) -> str:
    """A command line without options and values, for error messages."""
    words = [command, *(word for word in arguments if not word.startswith("-"))]
    return " ".join(words[:4] if words[1:2] == ["show"] else words[:3])


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _number(job_id: int) -> str:
    if job_id <= 0:
        raise ValueError(f"not a job id: {job_id}")
    return str(job_id)
