# SPDX-License-Identifier: Apache-2.0
"""Steps of guests that are held: their tasks are detached, and taken over when their srun is issued again."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from guest_processes import WAIT_S
from guest_rig import Saved

from pace import until
from vhpc_slurm.node.guest import hold as holding
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.guest.hold import release

pytest_plugins = ["guest_rig"]
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")

# An srun with a task in each guest, whose output goes to stdout and to stderr. As with Slurm's, its status is
# the highest of its tasks, and they get its variables; after a checkpoint the guests have other sockets.
SRUN = """#!/bin/sh
cd {folder}
echo "$*" >> sruns
while [ "${{1#-}}" != "$1" ]; do shift; done
[ ! -e waits ] || until [ -e "$(cat waits)" ]; do sleep 0.05; done
rank=0 pids=
for socket in $(cat sockets); do
    export SLURM_STEP_ID=$(wc -l < sruns) SLURM_PROCID=$rank VHPC_RUN_SOCKET=$socket
    if [ $rank = 0 ]; then exec 3>&1; else exec 3>&2; fi
    {bin}/vhpc-run -- "$@" </dev/null >&3 3>&- &
    pids="$pids $!"; rank=$((rank + 1))
done
trap 'kill -TERM $pids' TERM
status=0
for pid in $pids; do
    wait $pid; code=$?
    if kill -0 $pid 2>/dev/null; then wait $pid; code=$?; fi # the trap has ended the first wait
    [ $code -le $status ] || status=$code
done
exit $status
"""
# Numbered lines with the task's number, as fast as they are read, until a file exists; then its status.
LINES = (
    'i=0; while [ ! -e enough ]; do i=$((i+1)); echo "$SLURM_PROCID $i"; done; '
    "echo $i > count.$SLURM_PROCID; exit $((SLURM_PROCID + 3))"
)


class Job:
    """A job with two guests on one machine; its batch script runs in the first one."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        self.guests = []
        for name in ("g0", "g1"):
            (folder / name).mkdir()
            self.guests.append(Saved(programs, folder / name))
        self.first = self.guests[0]
        commands = folder / "commands"
        commands.mkdir()
        (commands / "srun").write_text(SRUN.format(folder=folder, bin=programs))
        (commands / "srun").chmod(0o755)
        self.env = {"VHPC_RUN_COMMANDS": "srun", "VHPC_RUN_COMMAND_PATH": str(commands)}
        self.env |= {
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NPROCS": "2",
        }
        self.serial = 0
        self.told()

    def wait_for(self, name: str) -> None:
        """The host's srun waits for a file before it starts its tasks."""
        (self.folder / "waits").write_text(name)

    def sruns(self) -> list[str]:
        """The sruns of the host, with their arguments."""
        return self.out("sruns").splitlines()

    def told(self) -> None:
        (self.folder / "sockets").write_text("\n".join(str(guest.socket) for guest in self.guests))

    def srun(self, program: str, *options: str) -> str:
        """The words of the batch script that call srun in the guest."""
        words = [str(self.first.bin / "vhpc-agent"), "--call", "srun", *options, "sh", "-c", program]
        return shlex.join(words)

    def start(self, script: str, **more: str) -> subprocess.Popen[bytes]:
        self.first.script(f"cd {self.folder}\n{script}")
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return self.first.run(out, err, **self.env, **more)

    def attach(self) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return self.first.run(out, err, **self.env, VHPC_RUN_ATTACH="batch")

    def prepare(self) -> None:
        self.serial += 1
        for guest in self.guests:
            with guest.control() as channel:
                holding.prepare(channel, self.serial, WAIT_S)

    def hold(self) -> None:
        """As the keepers of two nodes do: all are prepared before one is held, and they are held at once."""
        self.prepare()
        self.hold_prepared()

    def hold_prepared(self) -> None:
        def hold(guest: Saved) -> None:
            with guest.control() as channel:
                holding.hold(channel, WAIT_S)

        with ThreadPoolExecutor(len(self.guests)) as pool:
            list(pool.map(hold, self.guests))

    def release(self) -> None:
        for guest in self.guests:
            with guest.control() as channel:
                release(channel)

    def restore(self) -> None:
        """The guests go on in another job, with other shims."""
        for guest in self.guests:
            guest.restore()
        self.told()

    def next_run(self, run: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Hold the guests, and continue the script in another job; returns its process on the host."""
        self.hold()
        self.restore()
        run.wait(WAIT_S)
        return self.attach()

    def out(self, name: str = "out") -> str:
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""

    def both(self) -> list[str]:
        """Lines of both tasks and of the script."""
        return sorted((self.out() + self.out("err")).splitlines())

    def tasks_said(self, word: str) -> None:
        until(lambda: self.both().count(word) == 2, f"{word} of both tasks")

    def grown(self) -> None:
        """Wait for more output of each task."""
        sizes = {name: len(self.out(name)) for name in ("out", "err")}
        until(lambda: all(len(self.out(name)) > sizes[name] for name in sizes), "more output of both tasks")

    def close(self) -> None:
        for guest in self.guests:
            guest.close()


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[Job]:
    made = Job(programs, tmp_path)
    yield made
    made.close()


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
    with job.first.control() as channel, pytest.raises(ChannelRefusedError) as caught:
        holding.prepare(channel, 1, 0.2)
    assert (caught.value.errno, caught.value.why) == (errno.EBUSY, why)
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


def test_many_holds_lose_no_short_step(job: Job) -> None:
    """In two guests at once; a hold may find steps that start, run or end."""
    count = 150
    step = job.srun("echo short")
    run = job.start(f"i=0; while [ $i -lt {count} ]; do i=$((i+1)); {step}; echo code $?; done; echo end")
    while "end" not in job.out():
        job.hold()
        job.release()
        time.sleep(0.005 * (job.serial % 7))
    assert run.wait(WAIT_S) == 0
    assert Counter(job.both()) == {"short": 2 * count, "code 0": count, "end": 1}
