# SPDX-License-Identifier: Apache-2.0
"""Prologs and Epilogs that are killed, late, doubled or simultaneous; jobs that end while they boot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from cluster import Job, Lab
from injection import WAITING, ask_again, boots, let_go, one_line, ours, prints, runs, said, settled, until
from lab_job import LabJob

from by_hand import KILLED

pytestmark = pytest.mark.lab


@pytest.fixture
def by_hand(lab: Lab) -> Iterator[list[LabJob]]:
    """Jobs by hand: make them with LabJob(lab); their leases are ended here."""
    made: list[LabJob] = []
    yield made
    for job in made:
        job.end()
    names = {job.generation for job in made}
    left = [lease for lease in lab.leases() if lease.split()[0] in names]
    assert left == [], "a node that holds nothing has said so"


def killed_at_every_write(lab: Lab, made: list[LabJob], torn: bool, known: bool = True) -> Iterator[LabJob]:
    """A Prolog killed at its first write, one at its second, and so on until one lives."""
    for number in itertools.count(1):
        # vhpcd may end a lease while the guest boots; the first Prologs are killed before that
        job = LabJob(lab, disk_mib=64, known=known and number > 9)
        made.append(job)
        code = job.drive(str(number), *(["torn"] if torn else []), check=False).code
        if code == 0:
            print(f"{number - 1} journal writes in a boot")
            assert number > 9
            job.hook("epilog")
            return
        assert code == KILLED
        yield job
        job.end()


@pytest.mark.promise("clean.prolog")
@pytest.mark.parametrize("torn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_epilog_clears_after_a_prolog_killed_at_any_write(
    lab: Lab, by_hand: list[LabJob], torn: bool
) -> None:
    for job in killed_at_every_write(lab, by_hand, torn):
        job.hook("epilog")
        job.clean()


@pytest.mark.promise("place.guests")
@pytest.mark.slow
def test_both_guests_are_cleared_after_a_killed_prolog(lab: Lab, by_hand: list[LabJob]) -> None:
    """By the Epilog and by the health check in turn."""
    for number in itertools.count(2, 3):
        job = LabJob(lab, guests=2, disk_mib=64)
        by_hand.append(job)
        code = job.drive(str(number), check=False).code
        domains = lab.run("n1", "virsh", "-q", "list", "--name").out.split()
        if number % 2 and code == KILLED:
            job.drive("end")
            job.hook("healthcheck")
        else:
            job.hook("epilog")
        job.clean()
        if code == 0:
            print(f"at most {number} journal writes in a boot")
            assert len(domains) == 2
            return
        assert code == KILLED


def holds_guests(lab: Lab, job: LabJob) -> bool:
    """Whether the job's Prolog has booted; it has not if vhpcd has ended the lease meanwhile."""
    return "status=ready" in lab.run("n1", "cat", f"/run/vhpc/jobs/{job.id}/state", check=False).out


def test_guests_of_a_job_that_slurm_has_forgotten_make_room(lab: Lab, by_hand: list[LabJob]) -> None:
    for _ in range(2):  # vhpcd asks Slurm once a minute, and a boot takes seconds
        other = LabJob(lab)
        by_hand.append(other)
        other.hook("prolog")
        if holds_guests(lab, other):
            break
        other.hook("epilog")
    assert holds_guests(lab, other)
    job = lab.submit("echo up", "-w", "n1", "--exclusive")
    assert job.wait() == "COMPLETED"
    assert job.output() == "up\n"
    assert job.show()["Restarts"] == "0"
    settled(lab)


def test_a_job_without_requeue_names_the_holder_of_its_cpus(lab: Lab) -> None:
    """Slurm gives the CPUs of a suspended job to others; its guest keeps them."""
    other = lab.submit(WAITING, "-w", "n1", "--exclusive")
    runs(lab, other)
    lab.run("ctl", "scontrol", "suspend", str(other.id))
    job = lab.submit("echo up", "-w", "n1", "--exclusive", "--no-requeue")
    assert job.wait() == "FAILED"
    one_line(job, rf"are held by guests of {other.id}\.0\..*the job may not be requeued")
    lab.run("ctl", "scontrol", "resume", str(other.id))
    let_go(lab, other)
    assert other.wait() == "COMPLETED"
    settled(lab)


@pytest.mark.promise("clean.no-epilog")
@pytest.mark.slow
def test_the_health_check_clears_after_a_killed_prolog(lab: Lab, by_hand: list[LabJob]) -> None:
    for job in killed_at_every_write(lab, by_hand, torn=True, known=False):
        job.hook("healthcheck")
        state = lab.run("n1", "ls", f"/var/lib/vhpc/journal/{job.generation}.jsonl", check=False)
        assert state.code == 0, "while the controller has the generation, it is left alone"
        job.drive("end")
        job.hook("healthcheck")
        job.clean()


@pytest.mark.slow
def test_a_second_prolog_boots_after_one_killed_at_any_write(lab: Lab, by_hand: list[LabJob]) -> None:
    for job in killed_at_every_write(lab, by_hand, torn=False):
        job.hook("prolog")
        assert holds_guests(lab, job)
        job.hook("epilog")
        job.clean()


@pytest.mark.promise("clean.twice")
def test_epilogs_twice_without_prolog_and_before_it(lab: Lab, by_hand: list[LabJob]) -> None:
    job = LabJob(lab, known=True)
    by_hand.append(job)
    for hook in ("prolog", "epilog", "epilog", "prolog", "epilog"):  # the second Prolog comes too late
        job.hook(hook)
        if hook == "epilog" or lab.leaks() == []:
            job.clean()
    never = LabJob(lab)
    by_hand.append(never)
    for hook in ("epilog", "epilog", "prolog"):
        never.hook(hook)
        never.clean()


def beside(lab: Lab, made: list[LabJob], lines: int) -> bool:
    """An Epilog that starts when the Prolog of the same job has written so many lines of its journal.

    False: the Prolog has ended with fewer.
    """
    job = LabJob(lab)
    made.append(job)
    journal = f"/var/lib/vhpc/journal/{job.generation}.jsonl"
    hooks = (
        "/usr/libexec/vhpc/prolog & prolog=$!\n"
        f"written() {{ [ {lines} = 0 ] || [ $(cat {journal} 2>/dev/null | wc -l) -ge {lines} ]; }}\n"
        "until written || ! kill -0 $prolog; do sleep 0.01; done\n"
        "written && echo reached\n"
        "/usr/libexec/vhpc/epilog; echo epilog $?; wait; exit 0"
    )
    done = lab.run("n1", *job.env, "PATH=/usr/bin", "sh", "-c", hooks)
    assert "epilog 0\n" in done.out, (lines, done)
    job.clean()
    return "reached\n" in done.out


@pytest.mark.promise("clean.twice")
def test_an_epilog_during_a_prolog_ends_it(lab: Lab, by_hand: list[LabJob]) -> None:
    for lines in (0, 1, 6, 10):
        assert beside(lab, by_hand, lines)


@pytest.mark.slow
def test_an_epilog_at_any_moment_of_a_prolog(lab: Lab, by_hand: list[LabJob]) -> None:
    for lines in itertools.count(0):
        if not beside(lab, by_hand, lines):
            print(f"{lines - 1} lines of the journal in a boot")
            assert lines > 10
            return


def cancelled(lab: Lab, written: str) -> None:
    """A job that is cancelled when its Prolog has announced a resource of that kind; empty: at its start."""
    job = lab.submit("echo up; sleep 60", "-w", "n1")
    if written:
        boots(lab, job, "n1", written)
    else:
        until(lambda: job.show()["JobState"] != "PENDING", "the start", 60)
    lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    settled(lab)
    assert ours(said(lab, job)) == [] or "up" in said(lab, job), (written, said(lab, job))


@pytest.mark.promise("boot.cancel")
def test_a_job_cancelled_while_it_boots(lab: Lab) -> None:
    for written in ("", "uid", "domain"):
        cancelled(lab, written)


@pytest.mark.slow
def test_a_job_cancelled_at_any_stage_of_its_boot(lab: Lab) -> None:
    for written in ("rundir", "claim", "image", "memory", "uid", "process", "domain"):
        cancelled(lab, written)


@pytest.mark.promise("array.guest")
def test_requeued_jobs_get_new_guests_and_complete(lab: Lab) -> None:
    script = f"echo of ${{SLURM_RESTART_COUNT:-0}} $VHPC_JOB_GENERATION; {WAITING}"
    first = lab.submit(script, "-n1", "-w", "n1")
    runs(lab, first)
    second = lab.submit(script, "-n1", "-w", "n2", user="bob")
    boots(lab, second, "n2")
    for job in (first, second):
        lab.run("ctl", "scontrol", "requeue", str(job.id))
    for job in (first, second):
        ask_again(lab, job)
    for job in (first, second):
        prints(job, f"of 1 {job.id}.1.")
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
        assert job.show()["Restarts"] == "1"
        assert said(lab, job).endswith("done\n")
        assert ours(said(lab, job)) == []
    settled(lab)


@pytest.mark.promise("array.guest")
def test_every_task_of_an_array_has_a_guest_of_its_own(lab: Lab) -> None:
    job = lab.submit(
        "echo $SLURM_ARRAY_TASK_ID $VHPC_JOB_GENERATION $(cat /proc/sys/kernel/random/boot_id)",
        "-n1",
        "--array=0-2",
        "-o",
        "array-%A-%a",
    )
    lab.quiet(180)
    rows = [job.output(f"array-{{id}}-{task}").split() for task in range(3)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert len({row[1] for row in rows}) == 3
    assert len({row[2] for row in rows}) == 3
    settled(lab)


def test_the_health_check_leaves_jobs_alone(lab: Lab) -> None:
    first = lab.submit(WAITING, "-n1", "-w", "n1")
    runs(lab, first)
    second = lab.submit(WAITING, "-n1", "-w", "n1", user="bob")
    for what in ("rundir", "image", "uid", "process", "domain"):
        boots(lab, second, "n1", what)
        lab.run("n1", "/usr/libexec/vhpc/healthcheck")
    runs(lab, second)
    lab.run("n1", "/usr/libexec/vhpc/healthcheck")
    assert lab.vhpc("n1", "reconcile", "--check") == []
    jobs: list[Job] = [first, second]
    for job in jobs:
        let_go(lab, job)
    for job in jobs:
        assert job.wait() == "COMPLETED"
        assert said(lab, job).endswith("done\n")
    settled(lab)
