# SPDX-License-Identifier: Apache-2.0
"""Reports about a job that was saved, requeued and resumed agree with sacct, files and its own clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from cluster import Job, Lab
from injection import await_requeue, said, settled, start_soon, until
from saving import FOLDER, checkpoint, checkpoints_on

pytestmark = pytest.mark.lab

TICKS = "while true; do date +tick%s.%N; sleep 0.2; done"
CLOCK_S = 3.0
"""Between a moment and the second in which Slurm or a busy host records it."""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    """The site has a folder for checkpoints."""
    with checkpoints_on(lab):
        yield


def ticks(lab: Lab, job: Job) -> list[float]:
    """The times that TICKS has written."""
    return [float(line[4:]) for line in said(lab, job).splitlines() if line.startswith("tick")]


def goes_on(lab: Lab, job: Job, more: int = 10) -> None:
    """Wait until the script has written more."""
    before = len(ticks(lab, job))
    until(lambda: len(ticks(lab, job)) >= before + more, f"job {job.id} to write", 240)


def document(lab: Lab, job: Job, verb: str = "report") -> Any:
    """A report that the owner reads."""
    return json.loads(lab.run("login", "vhpc", verb, str(job.id), "--json", user=job.user).out)


def accounted(lab: Lab, job: Job) -> list[tuple[str, float, float]]:
    """State, start and end of each run, by sacct."""
    options = ("-nXPD", "-j", str(job.id), "-o", "State,Start,End")
    rows = lab.run("ctl", "env", "SLURM_TIME_FORMAT=%s", "sacct", *options).out.splitlines()
    cells = (row.split("|") for row in rows)
    return [(state.split()[0], float(start), float(end)) for state, start, end in cells]


def file_bytes(lab: Lab, serial: int) -> int:
    """The sizes of all files of a checkpoint, without those of seals."""
    names = (f"{FOLDER}/{serial}", "-type", "f", "!", "-name", "*.tags")
    sizes = lab.run("n1", "find", *names, "-printf", "%s\\n").out
    return sum(map(int, sizes.split()))


def commented(lab: Lab, job: Job) -> str:
    """The job's AdminComment while it is in the queue."""
    return lab.run("login", "squeue", "-h", "-j", str(job.id), "-O", "admin_comment:900").out.strip()


@pytest.mark.promise("checkpoint.report", "checkpoint.comment")
@pytest.mark.slow
def test_report_and_timeline_have_all_runs_and_checkpoints(lab: Lab) -> None:
    job = lab.submit(TICKS, "-w", "n1", "-n1", "--mem=600", "--open-mode=append")
    goes_on(lab, job)
    checkpoint(lab, str(job.id), "--name", "inplace")
    until(lambda: commented(lab, job).endswith("; saved as checkpoint inplace"), "the comment", 30)
    goes_on(lab, job)
    in_first = ticks(lab, job)
    checkpoint(lab, str(job.id), "--requeue")
    await_requeue(job)
    until(lambda: commented(lab, job).endswith(f"; requeued with checkpoint {job.id}.1"), "the comment", 30)
    start_soon(lab, job.id)
    goes_on(lab, job)
    again = next(tick for tick in ticks(lab, job) if tick > in_first[-1] + 3)
    checkpoint(lab, str(job.id), "--stop", "--name", "last")
    job.leave_queue()
    job.accounted()  # waits for the end

    rows, found = accounted(lab, job), document(lab, job)
    assert [state for state, _, _ in rows] == ["REQUEUED", "CANCELLED"]
    runs = found["runs"]
    assert [run["restart"] for run in runs] == [0, 1]
    for run, (_, start, end) in zip(runs, rows, strict=True):
        assert start - CLOCK_S <= run["began"] <= start + CLOCK_S
        assert all(start <= one["began"] <= end + CLOCK_S for one in run["checkpoints"])
    whole = [one for run in runs for one in run["checkpoints"]]
    assert [(one["name"], one["end"]) for one in whole] == [
        *(("inplace", "continued"), (f"{job.id}.1", "requeued"), ("last", "stopped")),
    ]
    # the first of three is removed when the third is valid
    assert [one["state"] for one in whole] == ["removed", "valid", "valid"]
    assert [one["bytes"] for one in whole[1:]] == [file_bytes(lab, one["serial"]) for one in whole[1:]]
    longest = max(later - tick for tick, later in pairwise(in_first))
    assert 0 < whole[0]["pause_s"] <= longest + 0.5
    assert whole[0]["write_s"] <= whole[0]["pause_s"]
    assert [one["pause_s"] for one in whole[1:]] == [None, None]
    assert runs[0]["continued"] is None
    own = {"checkpoint": f"{job.id}.1", "serial": whole[1]["serial"], "job": job.id}
    assert runs[1]["continued"] == own | {"generation": runs[0]["generation"]}
    assert 0 < runs[1]["ready_s"] <= again - rows[1][1] + CLOCK_S

    lines = document(lab, job, "timeline")["runs"]
    assert [{**run, "timelines": None} for run in lines] == [{**run, "timelines": None} for run in runs]
    assert [line["ready_s"] for run in lines for line in run["timelines"]] == [one["ready_s"] for one in runs]
    text = lab.run("login", "vhpc", "timeline", str(job.id), user="alice").out
    assert f"continues checkpoint {job.id}.1 of run 0" in text

    (text,) = job.accounted("AdminComment")
    assert text.endswith(f"continues checkpoint {job.id}.1 of job {job.id}; stopped with checkpoint last")

    other = lab.submit("echo never", "-w", "n2", "-n1", "--mem=600", "--vhpc-resume=last", image=None)
    goes_on(lab, other)
    (run,) = document(lab, other)["runs"]
    assert (run["continued"]["checkpoint"], run["continued"]["job"]) == ("last", job.id)
    lab.run("ctl", "scancel", str(other.id))
    settled(lab)


@pytest.mark.promise("checkpoint.comment")
@pytest.mark.slow
def test_a_job_that_was_not_saved_before_its_end_says_why(lab: Lab) -> None:
    job = lab.submit("srun -w n1 sleep 600", "-w", "n1", "-n1", "--time=1", "--vhpc-checkpoint=limit")
    assert job.wait(timeout=300) == "TIMEOUT"
    (comment,) = job.accounted("AdminComment")
    assert f"; not saved before its end: checkpoint {job.id}.1: n1: " in comment
    settled(lab)


def test_a_job_that_may_not_run_again_says_so_in_its_output(lab: Lab) -> None:
    job = lab.submit("echo never", "-n1", "--no-requeue", "--vhpc-checkpoint=limit")
    assert job.wait(timeout=300) == "FAILED"
    why = "--vhpc-checkpoint=limit: the job may not be put back into the queue: it has --no-requeue"
    assert why in job.output()
    assert "never" not in job.output()
    assert why in lab.run("login", "vhpc", "ps", "--all", user="alice").out
    assert why in job.accounted("AdminComment")[0]
    settled(lab)
