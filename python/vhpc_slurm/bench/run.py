# SPDX-License-Identifier: Apache-2.0
"""Running the rounds: each is a native job and a job with guests, one after another on the same nodes.

Each round reverses the order of the one before, so that a change over time (a node
that gets warmer, a file system that others use) affects both sides.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from vhpc_slurm.bench.jobfolder import (
    SCRIPT,
    JobFolder,
    Outcome,
    Side,
    facts,
    job_error,
    outcome,
    setup_problem,
)
from vhpc_slurm.bench.wish import Wish
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.userjobs import JobState

POLL_S = 1.0
OUTAGE_S = 300.0
"""How long slurmctld may be silent before the run ends."""
TEARDOWN_S = 900.0
"""How long a job may take, beyond its time limit, for boot, Epilog and KillWait."""
SETTLE_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Say = Callable[[str], None]


class Jobs(Protocol):
    """The methods of ``slurm.userjobs.UserJobs`` that are used here."""

    def submit(self, options: list[str], script: Path, *arguments: str) -> int:
        """Submit a batch script."""

    def state(self, job_id: int) -> JobState:
        """State of a job."""

    def cancel(self, job_id: int) -> None:
        """End a job."""


@dataclass
class Run:
    """The results of one job.

    Attributes:
        round: number of the round, from 1.
        side: native or guest.
        job_id: Slurm's job id.
        outcomes: of each test, by its name.
        machine: the first node as the job saw it.
        shape: nodes and ranks.
        problem: why the job as a whole failed; empty if it succeeded.
    """

    round: int
    side: Side
    job_id: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    shape: dict[str, str] = field(default_factory=dict)
    problem: str = ""


class GaveUpError(VhpcError):
    """A job was cancelled because a deadline had passed."""

    kind = "user"


def sides(number: int) -> tuple[Side, Side]:
    """Order of the jobs in a round, counted from 1."""
    return ("native", "guest") if number % 2 else ("guest", "native")


def rounds(wish: Wish, folder: JobFolder, jobs: Jobs, say: Say) -> Iterator[Run]:
    """Run the rounds and yield each job's results; stop after a job that failed.

    Raises:
        UserError: Slurm refused a job.
        SlurmError: Slurm does not answer.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; the job is cancelled first.
    """
    nodes = ""
    for number in range(1, wish.rounds + 1):
        for side in sides(number):
            run = _one(wish, folder, jobs, say, number, side, nodes)
            yield run
            if run.problem:
                return
            nodes = nodes or run.shape.get("nodelist", "")


def options(wish: Wish, side: Side, job: Path, nodes: str) -> list[str]:
    """Options of sbatch for one job; ``nodes`` is the hostlist of the first job, empty before it."""
    given = [
        f"--job-name=vhpc-bench-{side}",
        "--no-requeue",
        "--exclusive",
        f"--nodes={wish.nodes}",
        f"--time={wish.minutes}",
        f"--output={str(job / 'job.out').replace('%', '%%')}",
        f"--chdir={job}",
        *([f"--ntasks-per-node={wish.tasks}"] if wish.tasks is not None else []),
        *wish.sbatch,
        *([f"--nodelist={nodes}"] if nodes else []),
    ]
    if side == "native":
        return given
    network = ["--vhpc-network=job"] if wish.nodes > 1 else []
    return [*given, f"--vhpc-image={wish.image}", *network, *wish.guest_sbatch]


def _one(wish: Wish, folder: JobFolder, jobs: Jobs, say: Say, number: int, side: Side, nodes: str) -> Run:
    path = folder.job(wish, number, side)
    what = f"round {number} of {wish.rounds}, {side}"
    job_id = 0
    with _signals_interrupt():
        try:
            with _signals_blocked():  # a job whose id was not read yet could not be cancelled
                job_id = jobs.submit(options(wish, side, path, nodes), folder.path / SCRIPT, str(path))
            problem = _wait(wish, jobs, say, job_id, what)
        except BaseException:
            if job_id:
                _cancel(jobs, say, job_id)
            raise
    _settle(path, complete=not problem)
    run = Run(number, side, job_id, machine=facts(path, "machine"), shape=facts(path, "shape"))
    run.outcomes = {test.name: outcome(path, test) for test in wish.tests}
    if problem or not run.machine:
        run.problem = _problem(path, f"{side} job {job_id}", problem)
    return run


def _problem(path: Path, job: str, problem: str) -> str:
    """Why a job failed, or why one that is COMPLETED has no results."""
    error = job_error(path)
    if problem:
        return f"{job} {problem}" + (f": {error}" if error else "")
    nothing = f"no results in {path}: do all nodes see --dir?"
    return f"{job}: {setup_problem(path) or error or nothing}"


def _settle(job: Path, *, complete: bool) -> None:
    """Wait until a network file system shows this host the last files of a job that has ended."""
    until = time.monotonic() + SETTLE_S
    while complete and time.monotonic() < until:
        if (job / "ended").exists():
            return
        time.sleep(POLL_S)


def _wait(wish: Wish, jobs: Jobs, say: Say, job_id: int, what: str) -> str:
    """Wait for the end of a job; returns its state unless it is COMPLETED."""
    shown = ""
    pending_until = time.monotonic() + wish.queue_s
    end_by: float | None = None
    answered = time.monotonic()
    while True:
        try:
            found = jobs.state(job_id)
            answered = time.monotonic()
        except NoSuchJobError:
            return "" if shown else "has disappeared from Slurm"
        except SlurmError:
            if time.monotonic() - answered > OUTAGE_S:
                raise
            time.sleep(POLL_S)
            continue
        if found.ended:
            say(f"{what}: job {job_id} {found.state} on {found.nodes or 'no node'}")
            return "" if found.state == "COMPLETED" else f"ended as {found.state}"
        now, line = time.monotonic(), found.state.lower()
        if found.state == "PENDING":
            line += f" ({found.reason})"
            end_by = None
        elif end_by is None:
            end_by = now + 60 * wish.minutes + TEARDOWN_S
        if line != shown:
            say(f"{what}: job {job_id} {line}")
            shown = line
        if found.state == "PENDING" and now > pending_until:
            raise GaveUpError(
                f"job {job_id} did not start within {wish.queue_s} s",
                f"Slurm's reason is {found.reason}",
                "raise --queue-timeout, or give a reservation with --sbatch --reservation=NAME",
            )
        if end_by is not None and now > end_by:
            raise GaveUpError(f"job {job_id} is still {found.state}", "its time limit has passed long ago")
        time.sleep(POLL_S)


def _cancel(jobs: Jobs, say: Say, job_id: int) -> None:
    with _signals_blocked():
        try:
            jobs.cancel(job_id)
            say(f"job {job_id} is cancelled")
        except SlurmError as err:
            say(err.line())


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # a handler that was not set from Python
                signal.signal(number, handler)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Signals arrive at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
