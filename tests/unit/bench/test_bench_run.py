# SPDX-License-Identifier: Apache-2.0
"""vhpc bench runs its jobs: order, the same nodes, ends of all kinds. The lab tests use Slurm itself.

Here a job is a local process: it runs job.sh with the real measuring programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vhpc_slurm.bench import run as running
from vhpc_slurm.bench.jobfolder import JobFolder, outcome, parameters
from vhpc_slurm.bench.run import GaveUpError, Run, options, rounds, sides
from vhpc_slurm.bench.wish import Wish, choose, sizes
from vhpc_slurm.errors import UserError
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.userjobs import JobState

PROGRAMS = Path(os.environ.get("VHPC_GUEST_BIN", "")).parent / "measure"
SMALL = ["triad-mib=1", "triad-rounds=2", "files-mib=1", "files-count=3"]
SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "3"}
ORDER = [(1, "native"), (1, "guest"), (2, "guest"), (2, "native")]
pytestmark = pytest.mark.skipif(
    not (PROGRAMS / "vhpc-measure").is_file(), reason="programs are not built: run by `make unit`"
)


class Local:
    """Jobs that run at once on this host; ``states`` are shown before the end of each."""

    def __init__(self, states: tuple[JobState, ...] = (), end: str = "COMPLETED") -> None:
        self.states, self.end = states, end
        self.options: list[list[str]] = []
        self.cancelled: list[int] = []
        self.shown = 0

    def submit(self, options: list[str], script: Path, *arguments: str) -> int:
        self.options.append(options)
        self.shown = 0
        output = next(word for word in options if word.startswith("--output=")).partition("=")[2]
        with Path(output).open("w") as file:
            environment = {
                "PATH": os.environ["PATH"],
                "SLURM_JOB_NODELIST": "n[1-2]",
                "SLURM_CPUS_ON_NODE": "3",
            }
            subprocess.run(["sh", script, *arguments], env=environment, stdout=file, stderr=file, check=True)
        return 40 + len(self.options)

    def state(self, job_id: int) -> JobState:
        self.shown += 1
        if self.shown <= len(self.states):
            return self.states[self.shown - 1]
        return JobState(self.end, "None", "n[1-2]")

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "POLL_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path, PROGRAMS)


def wish(
    tests: str = "triad", *, rounds: int = 1, nodes: int = 1, setup: str = "", queue_s: int = 60
) -> Wish:
    return Wish(
        "node",
        "tiny",
        nodes,
        choose("node", tests),
        True,
        rounds,
        sizes(SMALL),
        queue_s=queue_s,
        native_setup=setup,
        guest_sbatch=("--vhpc-vfs=1",),
    )


def finish(
    wanted: Wish, folder: JobFolder, jobs: Local, say: Callable[[str], None] = lambda _: None
) -> list[Run]:
    return list(rounds(wanted, folder, jobs, say))


def test_rounds_alternate_and_stay_on_the_first_jobs_nodes(folder: JobFolder) -> None:
    jobs = Local()
    found = finish(wish(rounds=2), folder, jobs)
    assert [(run.round, run.side) for run in found] == [
        (1, "native"),
        (1, "guest"),
        (2, "guest"),
        (2, "native"),
    ]
    assert ["--nodelist=n[1-2]" in words for words in jobs.options] == [False, True, True, True]
    assert ["--vhpc-image=tiny" in words for words in jobs.options] == [False, True, True, False]
    assert sides(3) == ("native", "guest")
    assert {run.machine["kernel"] for run in found} == {os.uname().release}
    assert all(run.outcomes["triad"].figures for run in found)


def test_both_sides_differ_in_the_guest_only(folder: JobFolder) -> None:
    native, guest = (set(options(wish(nodes=2), side, folder.path, "n1")) for side in sides(1))
    assert native - guest == {"--job-name=vhpc-bench-native"}
    assert guest - native == {
        "--job-name=vhpc-bench-guest",
        "--vhpc-image=tiny",
        "--vhpc-network=job",
        "--vhpc-vfs=1",
    }
    assert "--vhpc-network=job" not in options(wish(), "guest", folder.path, "")
    assert {"--exclusive", "--no-requeue", "--nodelist=n1"} <= native


def test_files_and_triad_leave_nothing_but_results(folder: JobFolder) -> None:
    (first, _) = finish(wish("files,triad"), folder, Local())
    figures = first.outcomes["files"].figures
    assert figures is not None
    assert len(figures.values) == 6
    assert min(figures.values.values()) > 0
    job = folder.path / "round1-native"
    assert not [path for path in job.iterdir() if path.is_dir()]
    assert first.shape["ranks"] == "3"
    folder.remove()
    assert not folder.path.exists()


def test_missing_programs_are_reported_as_missing(folder: JobFolder, tmp_path: Path) -> None:
    """Without LAMMPS and HPCC on this host, as in an image without them."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cat", "mv", "rm", "nproc"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "bin"))
        (first, _) = finish(wish("lammps,hpcc"), folder, Local())
    for name, program in (("lammps", "lmp"), ("hpcc", "hpcc")):
        found = first.outcomes[name]
        assert (found.missing, found.figures) == (True, None)
        assert found.problem.startswith(f"{program} is not installed")


def test_setup_changes_the_environment_of_tests(folder: JobFolder) -> None:
    (first, guest) = finish(wish("triad", setup="SLURM_CPUS_ON_NODE=7"), folder, Local())
    assert (first.shape["ranks"], guest.shape["ranks"]) == ("7", "3")


def test_a_setup_that_fails_is_the_reason(folder: JobFolder) -> None:
    (first,) = finish(wish("triad", setup="no-such-module load x"), folder, Local())
    problem = first.outcomes["triad"].problem
    assert problem.startswith("the setup command failed: ")
    assert "no-such-module" in problem
    assert first.problem == f"native job 41: {problem}"


def test_quotes_in_parameters_reach_the_job_as_they_are() -> None:
    setup = 'echo "a\'b" $HOME; `true`'
    done = subprocess.run(
        ["sh", "-c", f'{parameters(wish(setup=setup), "native")}\nprintf %s "$SETUP"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == setup


@pytest.mark.parametrize("end", ["TIMEOUT", "CANCELLED", "FAILED", "NODE_FAIL"])
def test_a_job_that_does_not_complete_ends_the_rounds(folder: JobFolder, end: str) -> None:
    (first,) = finish(wish(rounds=3), folder, Local(end=end))
    assert first.problem == f"native job 41 ended as {end}"
    assert first.outcomes["triad"].figures is not None  # what it has measured is not lost


def test_waiting_is_shown_with_slurms_reason(folder: JobFolder) -> None:
    said: list[str] = []
    states = (JobState("PENDING", "Resources", ""),) * 3 + (JobState("RUNNING", "None", "n1"),)
    finish(wish(), folder, Local(states), said.append)
    assert said[:3] == [
        "round 1 of 1, native: job 41 pending (Resources)",
        "round 1 of 1, native: job 41 running",
        "round 1 of 1, native: job 41 COMPLETED on n[1-2]",
    ]


def test_a_job_that_never_starts_is_cancelled(folder: JobFolder) -> None:
    jobs = Local((JobState("PENDING", "ReqNodeNotAvail", ""),) * 1000)
    with pytest.raises(GaveUpError, match="ReqNodeNotAvail"):
        finish(wish(queue_s=0), folder, jobs)
    assert jobs.cancelled == [41]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_cancel_the_running_job(folder: JobFolder, number: signal.Signals) -> None:
    jobs = Local((JobState("RUNNING", "None", "n1"),) * 100_000)
    before = signal.getsignal(number)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        finish(wish(), folder, jobs)
    assert jobs.cancelled == [41]
    assert signal.getsignal(number) is before


def test_an_outage_of_slurmctld_is_survived_if_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Outage(Local):
        def state(self, job_id: int) -> JobState:
            if self.shown < 3:
                self.shown += 1
                raise SlurmError("squeue failed", "Unable to contact slurm controller")
            return super().state(job_id)

    found = finish(wish(), JobFolder(tmp_path, PROGRAMS), Outage())
    assert [run.problem for run in found] == ["", ""]
    monkeypatch.setattr(running, "OUTAGE_S", -1.0)
    jobs = Outage()
    with pytest.raises(SlurmError):
        finish(wish(), JobFolder(tmp_path, PROGRAMS), jobs)
    assert jobs.cancelled == [41]


def test_a_job_that_slurm_forgot_is_judged_by_its_results(folder: JobFolder) -> None:
    class Forgetful(Local):
        def state(self, job_id: int) -> JobState:
            raise NoSuchJobError("job is unknown")

    (first,) = finish(wish(), folder, Forgetful())
    assert first.problem == "native job 41 has disappeared from Slurm"


def test_nodes_that_do_not_see_the_folder_are_reported(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(Local):
        def submit(self, options: list[str], script: Path, *arguments: str) -> int:
            return 41

    monkeypatch.setattr(running, "SETTLE_S", 0.1)
    (first,) = finish(wish(), folder, Elsewhere())
    assert "do all nodes see --dir?" in first.problem
    assert (
        outcome(folder.path / "round1-native", wish().tests[0]).problem
        == "the job ended before this test did"
    )


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot create a folder"):
        JobFolder(tmp_path / "none", PROGRAMS)
    with pytest.raises(UserError, match=r"cannot copy vhpc-measure .*No such file"):
        JobFolder(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []
