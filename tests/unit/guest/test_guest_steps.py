# SPDX-License-Identifier: Apache-2.0
"""Steps of guests that are held: their tasks are detached, and taken over when their srun is issued again."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter

import pytest
from guest_processes import CONTROL_OPERATIONS, WAIT_S
from steps_rig import Job

from pace import until
from vhpc_slurm.node.guest import hold as holding
from vhpc_slurm.node.guest.channel import ChannelRefusedError

pytest_plugins = ["guest_rig", "steps_rig"]
pytestmark = CONTROL_OPERATIONS

# Numbered lines with the task's number, as fast as they are read, until a file exists; then its status.
LINES = (
    'i=0; while [ ! -e enough ]; do i=$((i+1)); echo "$SLURM_PROCID $i"; done; '
    "echo $i > count.$SLURM_PROCID; exit $((SLURM_PROCID + 3))"
)


def exact(job: Job) -> None:
    """Each task's lines are there, in order, once."""
    for rank in (0, 1):
        count = int((job.folder / f"count.{rank}").read_text())
        lines = [line for line in job.out(("out", "err")[rank]).splitlines() if line.startswith(f"{rank} ")]
        assert lines == [f"{rank} {number}" for number in range(1, count + 1)]


def test_tasks_continue_in_the_same_run(job: Job) -> None:
    run = job.start(f"{job.srun(LINES)}; echo status $?")
    job.grown()
    for _ in range(3):
        job.hold()
        job.release()
        job.grown()
    (job.folder / "enough").touch()
    assert run.wait(WAIT_S) == 0
    exact(job)
    assert job.out().endswith("status 4\n")
    sruns = job.sruns()
    assert len(sruns) == 4
    assert sruns[3].startswith("--open-mode=append --quiet sh -c ")


def test_tasks_continue_in_the_next_run(job: Job) -> None:
    run = job.start(f"{job.srun(LINES)}; echo status $?")
    job.grown()
    for _ in range(3):
        run = job.next_run(run)
        job.grown()
    (job.folder / "enough").touch()
    assert run.wait(WAIT_S) == 0
    exact(job)
    assert job.out().endswith("status 4\n")


def test_an_srun_that_has_ended_is_not_issued_again(job: Job) -> None:
    run = job.start(f"{job.srun('echo once; exit $((SLURM_PROCID + 5))')}; echo status $?; exec sleep 1000")
    until(lambda: "status" in job.out(), "the step's end")
    job.hold()
    job.release()
    time.sleep(0.3)
    assert job.both() == ["once", "once", "status 6"]
    assert len(job.sruns()) == 1
    run.terminate()
    run.wait(WAIT_S)


def test_an_srun_that_ends_before_the_hold_is_issued_again(job: Job) -> None:
    wait = "echo up; until [ -e enough ]; do sleep 0.05; done; echo done; exit $((SLURM_PROCID + 5))"
    run = job.start(f"{job.srun(wait)}; echo status $?")
    job.tasks_said("up")
    job.prepare()
    (job.folder / "enough").touch()
    job.tasks_said("done")
    time.sleep(0.5)
    assert "status" not in job.out()  # this guest cannot know whether tasks in others were detached
    job.release()
    assert run.wait(WAIT_S) == 0
    assert job.both() == ["done", "done", "status 6", "up", "up"]
    assert len(job.sruns()) == 2


def test_tasks_that_ended_before_are_not_started_again(job: Job) -> None:
    program = "echo up; [ $SLURM_PROCID = 0 ] || exit 9; until [ -e enough ]; do sleep 0.05; done"
    run = job.start(f"{job.srun(program)}; echo status $?")
    job.tasks_said("up")
    time.sleep(0.5)
    run = job.next_run(run)
    time.sleep(0.5)
    (job.folder / "enough").touch()
    assert run.wait(WAIT_S) == 0
    assert [line for line in job.both() if line[0] in "us"] == ["status 9", "up", "up"]


def test_a_step_that_starts_late_is_held_too(job: Job) -> None:
    """Its srun waits for CPUs, as Slurm's does, and gets them when the tasks of another one are detached."""
    job.wait_for("cpus")
    run = job.start(f"{job.srun('echo late; exec sleep 1')}; echo status $?")
    until(job.sruns, "the srun")
    job.prepare()
    (job.folder / "cpus").touch()
    job.hold_prepared()
    text = job.both()
    time.sleep(1.5)
    assert job.both() == text
    job.restore()
    run.wait(WAIT_S)
    run = job.attach()
    assert run.wait(WAIT_S) == 0
    assert [line for line in job.both() if line[0] in "ls"] == ["late", "late", "status 0"]


def test_tasks_that_wait_for_their_step_delay_a_hold(job: Job) -> None:
    """Slurm may take minutes for a step: no program is stopped meanwhile."""
    run = job.start(f"{job.srun(LINES)}; echo status $?")
    job.grown()
    job.wait_for("cpus")
    job.hold()
    job.release()
    until(lambda: len(job.sruns()) == 2, "the srun to be issued again")
    assert job.delay().endswith(" starts")
    (job.folder / "cpus").touch()
    job.grown()
    job.hold()
    job.release()
    job.grown()
    (job.folder / "enough").touch()
    assert run.wait(WAIT_S) == 0
    exact(job)


def test_signals_reach_tasks_that_were_taken_over(job: Job) -> None:
    catch = "trap 'echo got it; exit 2' TERM; echo up; while :; do echo tick; sleep 0.05; done"
    run = job.start(f"{job.srun(catch)} & trap 'kill $!; wait; echo ended' TERM; wait")
    job.tasks_said("up")
    run = job.next_run(run)
    job.grown()  # the tasks are attached
    run.terminate()
    run.wait(WAIT_S)
    job.tasks_said("got it")
    assert job.out().endswith("ended\n")


def test_an_output_without_a_reader_stays_so(job: Job) -> None:
    """The reader of srun's output has ended before: tasks that write again get SIGPIPE."""
    program = "echo up; until [ -e enough ]; do sleep 0.05; done; seq 100000"
    run = job.start(f"{job.srun(program)} | (read line; echo $line); sleep 1000 & wait")
    job.tasks_said("up")
    run = job.next_run(run)
    until(lambda: len(job.sruns()) == 2, "the next srun")
    (job.folder / "enough").touch()
    run.terminate()
    assert run.wait(WAIT_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "stdin", "why"),
    [
        (("--nodelist=n1",), "/dev/null", "step 1 runs"),
        (("--open-mode=truncate",), "/dev/null", "step 1 runs"),
        (("--ntasks=1",), "/dev/null", "step 1 runs"),
        (("--exact",), "/dev/null", "step 1 runs"),
        ((), "fifo", "the command vhpc-agent reads an input that has not ended"),
    ],
)
def test_what_cannot_be_issued_again_delays_a_hold(
    job: Job, options: tuple[str, ...], stdin: str, why: str
) -> None:
    os.mkfifo(job.folder / "fifo")
    run = job.start(f"exec 9<>fifo; {job.srun('echo up; exec sleep 1000', *options)} <{stdin}")
    job.tasks_said("up")
    assert job.delay() == why
    run.terminate()
    run.wait(WAIT_S)


def test_a_hold_needs_guests_that_are_prepared(job: Job) -> None:
    with job.first.control() as channel, pytest.raises(ChannelRefusedError) as caught:
        holding.hold(channel, 1.0)
    assert (caught.value.errno, caught.value.why) == (errno.EINVAL, "the guest was not prepared for it")


def test_a_task_is_taken_over_only_where_it_ran(job: Job) -> None:
    run = job.start(f"{job.srun('echo up; exec sleep 1000')}; echo status $?")
    job.tasks_said("up")
    job.hold()
    job.guests.reverse()  # the next run has placed the tasks the other way round
    job.told()
    job.release()
    until(lambda: "status" in job.out(), "the step's end")
    assert "this task did not run in this guest before the checkpoint" in job.out("err")
    assert "status 126" in job.out()
    assert run.wait(WAIT_S) == 0


def step_ends(job: Job) -> None:
    """Wait for the end of a step, or of the script."""
    text = job.out()
    until(lambda: job.out().count("code") > text.count("code") or "end" in job.out(), "the end of a step")


def test_many_holds_lose_no_short_step(job: Job) -> None:
    """In two guests at once; a hold may find steps that start, run or end."""
    count = 150
    step = job.srun("echo short")
    run = job.start(f"i=0; while [ $i -lt {count} ]; do i=$((i+1)); {step}; echo code $?; done; echo end")
    while "end" not in job.out():
        for _ in range(3):
            job.hold()
            job.release()
            time.sleep(0.005 * (job.serial % 7))
        step_ends(job)  # with slow programs no step would end between two holds
    assert run.wait(WAIT_S) == 0
    assert Counter(job.both()) == {"short": 2 * count, "code 0": count, "end": 1}
