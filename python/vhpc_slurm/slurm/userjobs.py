# SPDX-License-Identifier: Apache-2.0
"""Jobs that vhpc submits for the user who runs it, with this user's rights and environment.

Hooks and vhpcd use ``port.Slurm`` instead, whose commands have a fixed environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from vhpc_slurm.errors import UserError
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.steps import JobDetails, Step, job_details
from vhpc_slurm.terminal import one_line

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
_IMAGE = re.compile(r" AdminComment=vhpc: image (\S+@sha256:[0-9a-f]{64})")
END_S = 10.0
"""How long an srun may take to end its step."""
_NO_JOB = "Invalid job id specified"
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused", re.IGNORECASE
)
# Options of the caller's own job or shell must not reach the jobs.
_DROPPED = re.compile(r"(?:SLURM|SBATCH|VHPC)_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class JobState:
    """A job as squeue shows it; ``nodes`` is a hostlist, empty before the start."""

    state: str
    reason: str
    nodes: str

    @property
    def ended(self) -> bool:
        """Whether the job has ended and its nodes are free."""
        return self.state in ENDED


class UserJobs:
    """sbatch, srun, squeue, scontrol and scancel."""

    def __init__(
        self,
        bin_dir: str = "/usr/bin",
        *,
        slurm_conf: str = "",
        timeout_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Use the commands in ``bin_dir``; the environment defaults to that of this process."""
        self._bin, self._timeout_s = Path(bin_dir), timeout_s
        given = os.environ if environment is None else environment
        self._environment = {
            name: value for name, value in given.items() if name in _KEPT or not _DROPPED.match(name)
        }
        if slurm_conf:
            self._environment["SLURM_CONF"] = slurm_conf

    def submit(self, options: Sequence[str], script: Path, *arguments: str) -> int:
        """Submit a batch script; returns the job's id.

        Raises:
            UserError: sbatch refused it; the message is sbatch's.
            SlurmError: sbatch does not run, or slurmctld does not answer.
        """
        done = self._run("sbatch", "--parsable", *options, str(script), *arguments)
        if done.returncode:
            raise _refusal(done)
        job = done.stdout.strip().partition(";")[0]
        if not re.fullmatch(r"[1-9][0-9]{0,18}", job):
            raise SlurmError(
                "cannot read the id of the submitted job", f"sbatch printed {done.stdout[:80]!r}"
            )
        return int(job)

    def become_srun(self, arguments: Sequence[str]) -> NoReturn:
        """Replace this process by an srun with a job of its own, also inside another job.

        Raises:
            SlurmError: there is no srun.
        """
        path = self._bin / "srun"
        try:
            os.execve(path, [path.name, *arguments], self._environment)  # noqa: S606 - as the user, who could type it
        except OSError as err:
            raise SlurmError(f"cannot start {path}", err.strerror or str(err)) from err

    @contextlib.contextmanager
    def step(self, job_id: int, command: Sequence[str], node: str = "") -> Iterator[IO[bytes]]:
        """Run one task on a node, by default the first, of a running job of the user; yields its output.

        It shares the CPUs of the job's other steps.  It is ended if the block is left before its output ends.

        Raises:
            UserError: Slurm refused the step, or the command failed; the message is the last line of stderr.
            SlurmError: srun does not run.
        """
        place = f"--nodelist={node}" if node else "--relative=0"
        options = ["--jobid", str(job_id), "--overlap", "-N1", "-n1", place, "--input=none"]
        argv = [str(self._bin / "srun"), *options, *command]
        with tempfile.TemporaryFile() as said:
            try:
                run = subprocess.Popen(
                    argv,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                )
            except OSError as err:
                raise SlurmError(f"cannot start {argv[0]}", err.strerror or str(err)) from err
            assert run.stdout is not None
            try:
                with run.stdout:
                    yield run.stdout
                code = run.wait(self._timeout_s)
            except subprocess.TimeoutExpired as err:
                raise SlurmError(
                    "srun failed", f"no end within {self._timeout_s:g} s after its output"
                ) from err
            finally:
                _end(run)
            said.seek(0)
            lines = said.read(65536).decode("utf-8", "replace").split("\n")
        if code:
            complaints = [one_line(line) for line in lines if line.strip()]
            errors = [line for line in complaints if not line.startswith("srun: error: ")] or complaints
            raise UserError(
                f"the step in job {job_id} failed", errors[-1][-300:] if errors else f"exit status {code}"
            )

    def start_step(self, options: Sequence[str], command: Sequence[str]) -> Step:
        """Start an srun whose standard input and output are pipes of this process.

        Raises:
            SlurmError: srun does not run.
        """
        return Step([str(self._bin / "srun"), *options, *command], self._environment)

    def details(self, job_id: int) -> JobDetails:
        """Owner, state, nodes and image of a job.

        Raises:
            NoSuchJobError: slurmctld no longer has the job.
            SlurmError: scontrol failed.
        """
        return job_details(self._asked(job_id, "scontrol", "-o", "show", "job", str(job_id)).stdout)

    def state(self, job_id: int) -> JobState:
        """State of a job.

        Raises:
            NoSuchJobError: slurmctld no longer has the job.
            SlurmError: squeue failed.
        """
        options = ("--noheader", "--all", "--states=all", "--local", "--jobs", str(job_id))
        done = self._asked(job_id, "squeue", *options, "--format=%i|%T|%r|%N")
        rows = [line.split("|", 3) for line in done.stdout.splitlines()]
        row = next((row for row in rows if len(row) == 4 and row[0].strip() == str(job_id)), None)
        if row is None:
            raise NoSuchJobError(f"job {job_id} is unknown", "squeue does not show it")
        return JobState(row[1].strip(), one_line(row[2].strip()), row[3].strip())

    def image(self, job_id: int) -> str:
        """``NAME:TAG@sha256:…`` of a job's guests, as AdminComment has it; empty if the job has none.

        Raises:
            NoSuchJobError: slurmctld no longer has the job.
            SlurmError: scontrol failed.
        """
        done = self._asked(job_id, "scontrol", "-o", "show", "job", str(job_id))
        found = _IMAGE.search(done.stdout)
        return found[1] if found else ""

    def running(self, user: str) -> list[int]:
        """Ids of a user's running jobs; SlurmError if squeue failed."""
        done = self._run("squeue", "--noheader", "--user", user, "--states=RUNNING", "--format=%A")
        if done.returncode:
            raise SlurmError("squeue failed", _complaint(done))
        return sorted({int(word) for word in done.stdout.split() if word.isdecimal()})

    def partition_state(self, name: str) -> str:
        """The state of a partition, such as UP; empty if Slurm has no such partition.

        Raises:
            SlurmError: scontrol failed.
        """
        done = self._run("scontrol", "--all", "-o", "show", "partition", name)
        if done.returncode and "not found" in done.stdout + done.stderr:
            return ""
        found = re.search(r" State=(\S+)", done.stdout)
        if done.returncode or found is None:
            raise SlurmError("scontrol failed", _complaint(done))
        return found[1]

    def cancel(self, job_id: int) -> None:
        """End a job; a job that has ended is no error.

        Raises:
            SlurmError: scancel failed.
        """
        done = self._run("scancel", str(job_id))
        if done.returncode and _NO_JOB not in done.stderr:
            raise SlurmError(f"cannot cancel job {job_id}", _complaint(done), f"run: scancel {job_id}")

    def _asked(self, job_id: int, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that is about a job; errors as ``state``."""
        done = self._run(command, *arguments)
        if done.returncode and _NO_JOB in done.stderr:
            raise NoSuchJobError(f"job {job_id} is unknown", _NO_JOB)
        if done.returncode:
            raise SlurmError(f"{command} failed", _complaint(done))
        return done

    def _run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [str(self._bin / command), *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=self._timeout_s,
                check=False,
                start_new_session=True,  # a Ctrl-C on the terminal must not end scancel
            )
        except subprocess.TimeoutExpired as err:
            raise SlurmError(
                f"{command} failed", f"no answer within {self._timeout_s:g} s", "see: scontrol ping"
            ) from err
        except OSError as err:
            raise SlurmError(f"{command} failed", str(err), "set controller.slurm_bin in vhpc.toml") from err


def _end(run: subprocess.Popen[bytes]) -> None:
    """End an srun that still runs; it ends its step when it is told to, but not while slurmctld is away."""
    if run.poll() is not None:
        return
    run.terminate()
    try:
        run.wait(END_S)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()


def _refusal(done: subprocess.CompletedProcess[str]) -> UserError | SlurmError:
    complaint = _complaint(done)
    if _UNREACHABLE.search(complaint):
        return SlurmError("sbatch failed", complaint, "see: scontrol ping")
    return UserError("Slurm refused the job", complaint)


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    text = " ".join((done.stderr or done.stdout).replace("sbatch: error: ", "").split())
    return text[-300:] or f"exit status {done.returncode}"
