# SPDX-License-Identifier: Apache-2.0
"""Jobs that vhpc submits for its user: how sbatch, squeue and scancel are called, and what they answer.

The commands are scripts that print lines in the form of Slurm's messages. The lines were written
for these tests, not captured; tests/lab/test_bench.py runs Slurm's own commands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.errors import UserError
from vhpc_slurm.slurm import userjobs
from vhpc_slurm.slurm.port import NoSuchJobError, SlurmError
from vhpc_slurm.slurm.userjobs import JobState, UserJobs

REFUSED = "sbatch: error: Batch job submission failed: Node count specification invalid"
AWAY = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
SCRIPT = Path("/tmp/job.sh")


def commands(folder: Path, body: str, **environment: str) -> UserJobs:
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return UserJobs(str(folder), slurm_conf="/etc/x.conf", timeout_s=5, environment=environment)


@pytest.mark.parametrize("printed", ["1004", "1004;vhpc"])
def test_the_id_of_a_submitted_job_is_read(tmp_path: Path, printed: str) -> None:
    assert commands(tmp_path, f"echo '{printed}'").submit(["-N1"], SCRIPT) == 1004


def test_a_refusal_of_sbatch_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Slurm refused the job: .*Node count specification invalid"):
        commands(tmp_path, f"echo '{REFUSED}' >&2; exit 1").submit([], SCRIPT)
    with pytest.raises(SlurmError, match="Unable to contact"):
        commands(tmp_path, f"echo '{AWAY}' >&2; exit 1").submit([], SCRIPT)


@pytest.mark.parametrize("body", ["echo Submitted", "true", "echo 0", "sleep 30"])
def test_an_answer_without_an_id_is_an_error(tmp_path: Path, body: str) -> None:
    jobs = commands(tmp_path, body)
    jobs._timeout_s = 0.5
    with pytest.raises(SlurmError):
        jobs.submit([], SCRIPT)


def test_options_of_the_callers_own_job_do_not_reach_the_job(tmp_path: Path) -> None:
    """VHPC_IMAGE of the caller would put native jobs into guests."""
    dropped = {"VHPC_IMAGE": "a", "SBATCH_PARTITION": "b", "SLURM_JOB_ID": "c"}
    kept = {"HOME": "/home/d", "SLURM_CLUSTERS": "e", "PATH": "/usr/bin:/bin"}
    jobs = commands(tmp_path, f"env >{tmp_path}/seen; echo 7", **dropped, **kept)
    jobs.submit([], SCRIPT)
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert not set(dropped) & set(seen)
    assert {**kept, "SLURM_CONF": "/etc/x.conf"}.items() <= seen.items()


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ("1005|PENDING|Resources|", JobState("PENDING", "Resources", "")),
        ("1005|PENDING|(null)|", JobState("PENDING", "(null)", "")),
        ("1005|RUNNING|None|n[1-2]", JobState("RUNNING", "None", "n[1-2]")),
        ("1005|COMPLETED|None|n1", JobState("COMPLETED", "None", "n1")),
    ],
)
def test_the_state_of_a_job_is_read(tmp_path: Path, row: str, state: JobState) -> None:
    found = commands(tmp_path, f"echo '99|RUNNING|None|n9'; echo '{row}'").state(1005)
    assert found == state
    assert found.ended == (state.state == "COMPLETED")


def test_an_unknown_job_is_distinguished_from_an_outage(tmp_path: Path) -> None:
    for body in ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "true"):
        with pytest.raises(NoSuchJobError):
            commands(tmp_path, body).state(5)
    with pytest.raises(SlurmError) as caught:
        commands(tmp_path, "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1").state(5)
    assert not isinstance(caught.value, NoSuchJobError)


def test_cancelling_an_ended_job_succeeds(tmp_path: Path) -> None:
    commands(tmp_path, "echo 'scancel: error: Kill job error: Invalid job id specified' >&2; exit 1").cancel(
        5
    )
    with pytest.raises(SlurmError, match="scancel 5"):
        commands(tmp_path, "echo 'Access denied' >&2; exit 1").cancel(5)


def test_missing_commands_for_jobs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"controller\.slurm_bin"):
        UserJobs(str(tmp_path)).state(1)


STUBBORN = """
trap '' TERM
echo $$ > $(dirname $0)/pid
echo output
exec >&-
while :; do sleep 0.1; done
"""


def test_an_srun_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(userjobs, "END_S", 0.2)
    jobs = commands(tmp_path, STUBBORN)
    jobs._timeout_s = 0.5
    with (
        pytest.raises(SlurmError, match=r"srun failed: no end within 0.5 s"),
        jobs.step(7, ["true"]) as out,
    ):
        assert out.read() == b"output\n"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
