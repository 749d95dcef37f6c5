# SPDX-License-Identifier: Apache-2.0
"""Guests and folders that break under a running job: one line for the user, no other job affected."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from cluster import ENDED, IMAGE, Job, Lab
from injection import WAITING, in_boot, kill_qemu, let_go, one_line, paused, qemu_killer, runs, said, settled

pytestmark = pytest.mark.lab

GONE = r"^vhpc: the guest of job \d+ on n[12] is gone"


@pytest.mark.promise("guest.qemu-killed")
def test_a_killed_qemu_ends_the_job_within_five_seconds(lab: Lab) -> None:
    usual, job = (lab.submit(WAITING, "-n1", "-w", "n1") for _ in range(2))
    runs(lab, usual)
    runs(lab, job)
    # what an end takes on a machine that other tests load too
    reference = seconds_to_end(usual, lambda: let_go(lab, usual))
    took = seconds_to_end(job, lambda: kill_qemu(lab, job, "n1"))
    print(
        f"from the kill to the end of the job: {took:.2f} s; of a job that ends by itself: {reference:.2f} s"
    )
    assert took < 5.0 + reference
    assert usual.wait() == "COMPLETED"
    assert job.wait() == "FAILED"
    one_line(job, GONE)
    settled(lab)


def seconds_to_end(job: Job, act: Callable[[], object]) -> float:
    """How long after an act slurmctld knows that the job's script has ended."""
    began = time.monotonic()
    act()
    job.wait("COMPLETING", *ENDED)
    return time.monotonic() - began


@pytest.mark.promise("guest.qemu-killed")
def test_a_killed_shim_ends_its_job(lab: Lab) -> None:
    """QEMU runs on; the Epilog ends it."""
    job = lab.submit(WAITING, "-w", "n1")
    runs(lab, job)
    lab.run("n1", "pkill", "-9", "-x", "vhpc-shim")
    assert job.wait(timeout=60) == "FAILED"
    one_line(job, GONE + r" \(channel closed\)$")
    settled(lab)


@pytest.mark.promise("boot.process-killed")
def test_a_qemu_killed_in_a_boot_fails_the_job_only(lab: Lab) -> None:
    job = lab.submit("echo up", "-w", "n1")
    in_boot(lab, job, "n1", qemu_killer(job))
    assert job.wait() == "FAILED"
    one_line(job, "^vhpc: the guest ended on n1 while image .* booted: QEMU crashed or was killed")
    settled(lab)


@pytest.mark.promise("boot.process-killed")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("virtiofsd", r"the daemon of shared folder \w+"),
        ("vhpc-locks", "the lock daemon of the shared folders"),
        ("vhpc-shim", "vhpc-shim"),
    ],
)
def test_a_helper_killed_in_a_boot_is_named_as_the_cause(lab: Lab, program: str, said: str) -> None:
    job = lab.submit("echo up", "-w", "n1")
    in_boot(lab, job, "n1", f"pkill -9 -n -x {program}")
    assert job.wait() == "FAILED"
    one_line(job, rf"^vhpc: {said}, which the guest needs, was ended by a signal on n1 while .*: SIGKILL")
    settled(lab)


@pytest.mark.slow
def test_a_time_limit_that_ends_a_boot_is_explained(lab: Lab) -> None:
    job = lab.submit("echo never", "-n1", "-w", "n1", "-t1", "--vhpc-timeout=180")
    paused(lab, job, "n1")
    assert job.wait(timeout=400) == "TIMEOUT"
    settled(lab)
    words = r"the time limit ended the job in the boot of its guests on n1: it took \d+ s, \d+ s .* agent"
    (comment,) = job.accounted("AdminComment")
    assert re.search(rf"image \S+; {words} .*--time", comment), comment
    (told,) = [row["told"] for row in lab.vhpc("ctl", "ps", "--all") if row["job"] == job.id]
    assert re.match(words, told["n1"]), told
    assert re.search(rf"n1: {words}", lab.run("login", "vhpc", "report", str(job.id), user="alice").out)


# gives the agent something to do, on which a broken one breaks
NOISE = "for i in $(seq 500); do echo $i; sleep 0.2; done"


@pytest.mark.parametrize("program", ["virtiofsd", "vhpc-locks"])
def test_a_killed_daemon_of_a_shared_folder_ends_the_job(lab: Lab, program: str) -> None:
    """The guest itself would wait for the folder, or a lock, without end."""
    job = lab.submit(f"echo up; touch ~/x; {NOISE}", "-w", "n1")
    runs(lab, job)
    lab.run("n1", "pkill", "-9", "-x", "-n", program)
    assert job.wait(timeout=60) == "FAILED"
    one_line(job, GONE + r" \(the daemon of a shared folder has ended\)$")
    settled(lab)


WAYS = {
    "powered off": "echo o > /proc/sysrq-trigger",
    "rebooted": "echo b > /proc/sysrq-trigger",
    "crashed": "echo c > /proc/sysrq-trigger",
    # signals do not end PID 1, a broken program does
    "without agent": "kill -9 1; at=$(grep -m1 r-xp /proc/1/maps | cut -d- -f1); "
    "dd if=/dev/zero of=/proc/1/mem bs=4096 seek=$((0x$at)) oflag=seek_bytes conv=notrunc count=16",
}


@pytest.mark.promise("guest.end", "attack.drain")
def test_a_guest_that_ends_itself_ends_its_job_with_one_line(lab: Lab) -> None:
    jobs = {
        name: lab.submit(f"echo up; sudo sh -c '{act}' 2>/dev/null; {NOISE}; echo survived", "-n1")
        for name, act in WAYS.items()
    }
    for name, job in jobs.items():
        assert job.wait() == "FAILED", name
        assert "survived" not in job.output()
        one_line(job, GONE)
    settled(lab)


@pytest.mark.promise("attack.outlive")
@pytest.mark.slow  # libvirt gives a stopped QEMU a quarter of a minute
def test_a_guest_that_does_not_answer_can_be_cancelled(lab: Lab) -> None:
    job = lab.submit(WAITING, "-w", "n2")
    runs(lab, job)
    kill_qemu(lab, job, "n2", "STOP")
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    settled(lab)


def test_one_dead_guest_of_two_ends_the_step_that_uses_both(lab: Lab) -> None:
    job = lab.submit("srun -N2 -n2 --kill-on-bad-exit=1 sh -c 'echo up; sleep 999'; echo step said $?", "-N2")
    runs(lab, job, times=2)
    kill_qemu(lab, job, "n2")
    job.wait()
    assert "step said 0" not in said(lab, job)
    one_line(job, GONE)
    settled(lab)


def test_a_working_directory_removed_before_the_job_starts(lab: Lab) -> None:
    """As without a guest: Slurm reports it and starts the script in /tmp."""
    lab.run("login", "mkdir", "-p", "/home/alice/lost", user="alice")
    options = ("--hold", "-n1", "--chdir=/home/alice/lost", "-o", "/home/alice/lost-%j")
    jobs = [lab.submit("pwd; echo ran", *options, image=image) for image in (IMAGE, None)]
    lab.run("login", "rmdir", "/home/alice/lost", user="alice")
    for job in jobs:
        lab.run("ctl", "scontrol", "release", str(job.id))
    for job in jobs:
        job.wait()
        assert job.accounted() == ["COMPLETED", "0:0"]
        out = job.output("lost-{id}")
        assert out.endswith("/tmp\nran\n"), out
        assert "/home/alice/lost" in out
    settled(lab)


def test_a_working_directory_that_goes_during_the_job(lab: Lab) -> None:
    """The script continues, and its actions there fail, as without a guest."""
    lab.run("login", "mkdir", "-p", "/home/alice/goes", user="alice")
    script = f"{WAITING}; touch x; echo said $?; cd /; srun -n1 pwd"
    options = ("-n1", "--chdir=/home/alice/goes", "-o", "/home/alice/slurm-%j.out")
    jobs = [lab.submit(script, *options, image=image) for image in (IMAGE, None)]
    for job in jobs:
        runs(lab, job)
    lab.run("login", "rm", "-rf", "/home/alice/goes", user="alice")
    for job in jobs:
        let_go(lab, job)
    for job in jobs:
        job.wait()
        assert job.accounted() == ["COMPLETED", "0:0"]
        # two streams of one file: their order is no promise
        lines = {"up on n1", "done", "touch: cannot touch 'x': No such file or directory", "said 1", "/"}
        assert lines == set(job.output().replace("on n2", "on n1").splitlines())
    settled(lab)


def test_a_home_that_is_not_there(lab: Lab) -> None:
    """Booting with a home that the user's rights do not reach costs the share, not the node."""
    lab.run("login", "mv", "/home/bob", "/home/bob.away")
    try:
        job = lab.submit(
            "pwd; echo ran", "-w", "n1", "--chdir=/scratch", "-o", "/scratch/away-%j", user="bob"
        )
        job.wait()
        assert "ran\n" in lab.run("login", "cat", f"/scratch/away-{job.id}").out
    finally:
        lab.run("login", "mv", "/home/bob.away", "/home/bob")
    settled(lab)
