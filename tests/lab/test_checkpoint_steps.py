# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of jobs whose steps run: their tasks continue, after the checkpoint and in the next run."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Job, Lab
from injection import ask_again, output_meets, prints, said, settled, until
from saving import checkpoint, checkpoints_on, requeue, written

pytestmark = pytest.mark.lab

TASKS, TURNS = 4, 40
# Each task writes numbered lines to its output and to a file that it keeps open.
COUNT = f"""
srun python3 -u -c '
import os, time
rank = os.environ["SLURM_PROCID"]
log = open(os.path.expanduser("~/%s.%s.log" % (os.environ["SLURM_JOB_ID"], rank)), "w")
for i in range(1, {TURNS} + 1):
    print(rank, i)
    print(i, file=log, flush=True)
    time.sleep(0.25)
raise SystemExit(3 + int(rank))
'
echo status $?
"""
SHORT = """
for i in $(seq 30); do srun sh -c "echo short $i; exit $((i % 3))"; echo code $i $?; done
for i in $(seq 4); do srun sh -c "sleep 1; echo parallel $i" & done; wait
seq 1 5 | srun sed 's/^/input /'
srun -o lines-%t.out sh -c 'for i in $(seq 30); do echo $SLURM_PROCID line $i; sleep 0.2; done'
cat lines-0.out lines-1.out; rm lines-?.out
echo end
"""


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(lab: Lab) -> Iterator[None]:
    with checkpoints_on(lab):
        yield


def counts(lab: Lab, job: Job, least: int) -> None:
    """Wait until each task has written so many lines."""
    wanted = [f"{rank} {least}\n" for rank in range(TASKS)]
    output_meets(job, lambda text: all(line in text for line in wanted), f"line {least} of job {job.id}", 240)


@pytest.mark.promise("checkpoint.step")
def test_tasks_continue_after_a_checkpoint_and_in_the_next_run(lab: Lab) -> None:
    job = lab.submit(COUNT, "-N2", "--ntasks-per-node=2", "--open-mode=append")
    counts(lab, job, 3)
    checkpoint(lab, str(job.id))
    counts(lab, job, 8)
    requeue(lab, job)
    assert job.wait(timeout=300) == "COMPLETED", said(lab, job)
    wanted = [f"{rank} {turn}" for rank in range(TASKS) for turn in range(1, TURNS + 1)]
    assert Counter(written(job)) == Counter([*wanted, "status 6"]), job.output()
    for rank in range(TASKS):
        assert lab.read("alice", f"{job.id}.{rank}.log").split() == [str(i) for i in range(1, TURNS + 1)]
    assert "task 3: Exited with exit code 6" in job.output()
    settled(lab)


@pytest.mark.promise("checkpoint.step")
@pytest.mark.slow
def test_steps_of_a_restarted_job_continue_in_another_one(lab: Lab) -> None:
    """Slurm counts the restarts of the first job, and not of the second one, which has none."""
    shape = ("-N2", "--ntasks-per-node=2")
    job = lab.submit(COUNT, *shape, "--open-mode=append")
    counts(lab, job, 3)
    requeue(lab, job)
    counts(lab, job, 10)
    checkpoint(lab, str(job.id), "--stop", "--name", "restarted")
    job.leave_queue()
    second = lab.submit("echo never", *shape, "--vhpc-resume=restarted", image=None)
    assert second.wait(timeout=300) == "COMPLETED", said(lab, second)
    wanted = [f"{rank} {turn}" for rank in range(TASKS) for turn in range(1, TURNS + 1)]
    assert Counter(written(job) + written(second)) == Counter([*wanted, "status 6"]), second.output()
    settled(lab)


def next_run(lab: Lab, job: Job, restarts: int) -> None:
    """Wait until the script continues in the next run: its first step there has begun."""
    ask_again(lab, job, restarts)
    steps = ("squeue", "-h", "-s", "-j", str(job.id), "-o", "%i")
    until(
        lambda: f"{job.id}.0" in lab.run("ctl", *steps).out or "end" in written(job),
        f"run {restarts} of job {job.id}",
        240,
    )


@pytest.mark.promise("checkpoint.step")
@pytest.mark.slow
@pytest.mark.parametrize("shape", [("-N2", "--ntasks-per-node=1"), ("-N1", "-n2")], ids="".join)
@pytest.mark.parametrize("requeue", [False, True], ids=["continued", "requeued"])
def test_no_checkpoint_loses_or_doubles_a_line_of_short_steps(
    lab: Lab, shape: tuple[str, ...], requeue: bool
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    moments, job = random.Random(seed), lab.submit(SHORT, *shape, "--open-mode=append")
    prints(job, "code 1 1", 240)
    for number in range(1, 6 if requeue else 21):
        time.sleep(moments.uniform(0.1, 2.0))
        if "end" in written(job):
            break
        words = ("vhpc", "checkpoint", str(job.id), *(["--requeue"] if requeue else []))
        done = lab.run("login", *words, user="alice", check=False, timeout=300)
        assert done.code == 0 or "end" in written(job), done
        if requeue and done.code == 0:
            next_run(lab, job, number)
    assert job.wait(timeout=400) == "COMPLETED", said(lab, job)
    wanted = Counter({"end": 1})
    for i in range(1, 31):
        wanted.update({f"short {i}": 2, f"code {i} {i % 3}": 1, f"0 line {i}": 1, f"1 line {i}": 1})
    wanted.update({f"parallel {i}": 2 for i in range(1, 5)})
    # the input goes to all tasks
    wanted.update({f"input {i}": 2 for i in range(1, 6)})
    assert Counter(written(job)) == wanted, job.output()
    settled(lab)
