# SPDX-License-Identifier: Apache-2.0
"""Daemons that end while one job runs and another boots: both end sensibly, nothing is left."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
from cluster import VLAB, Job, Lab
from injection import WAITING, ask_again, boots, let_go, ours, prints, requeued, runs, said, settled, until

from pace import limit

pytestmark = pytest.mark.lab


def saved(lab: Lab, job: Job) -> None:
    """Wait until slurmctld has saved what it knows of a job: a killed one forgets the rest."""
    lab.run("ctl", "touch", "/tmp/before")
    lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "Comment=saved")
    newer = ("find", "/var/lib/slurm/slurmctld/job_state", "-newer", "/tmp/before")
    until(lambda: lab.run("ctl", *newer).out, "slurmctld's state on disk", 60)


def pair(lab: Lab, booting: str = "n1") -> tuple[Job, Job]:
    """A job that runs on n1, and one whose guest has just been started there or on n2."""
    first = lab.submit(WAITING, "-n1", "-w", "n1")
    runs(lab, first)
    second = lab.submit(WAITING, "-n1", "-w", booting, user="bob")
    boots(lab, second, booting)
    return first, second


def bounce(lab: Lab, host: str, act: str, unit: str) -> None:
    lab.service(host, act, unit)
    lab.service(host, "start", unit)


def end_well(lab: Lab, *jobs: Job) -> None:
    for job in jobs:
        runs(lab, job)
        let_go(lab, job)
    for job in jobs:
        assert job.wait() == "COMPLETED"
        assert said(lab, job).endswith("done\n")
        assert ours(said(lab, job)) == []
    settled(lab)


@pytest.mark.promise("daemons.restart")
@pytest.mark.parametrize("act", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_jobs_do_not_notice_that_vhpcd_was_away(lab: Lab, act: str) -> None:
    jobs = pair(lab)
    bounce(lab, "ctl", act, "vhpcd")
    end_well(lab, *jobs)


# a health check drains a node that has no libvirtd at this moment
@pytest.mark.promise("daemons.restart")
@pytest.mark.usefixtures("no_health_check")
@pytest.mark.parametrize("act", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", ["slurmctld", "slurmd", "libvirtd"])
def test_running_jobs_do_not_notice_that_a_daemon_was_away(lab: Lab, unit: str, act: str) -> None:
    job = lab.submit(WAITING, "-n1", "-w", "n1")
    runs(lab, job)
    if unit == "slurmctld":
        saved(lab, job)
    bounce(lab, "ctl" if unit == "slurmctld" else "n1", act, unit)
    end_well(lab, job)


@pytest.mark.promise("clean.dead-daemons")
@pytest.mark.usefixtures("no_health_check")
def test_a_job_ends_cleanly_while_libvirtd_is_dead(lab: Lab) -> None:
    job = lab.submit(WAITING, "-n1", "-w", "n1")
    runs(lab, job)
    lab.service("n1", "kill", "libvirtd")
    try:
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
        until(lambda: not qemus(lab), "the end of the guest")
    finally:
        lab.service("n1", "start", "libvirtd")
    settled(lab)


def qemus(lab: Lab) -> str:
    return lab.run("n1", "pgrep", "-f", "^[^ ]*qemu-system", check=False).out


@pytest.mark.usefixtures("no_health_check")
def test_libvirtd_killed_in_a_boot_drains_and_requeues(lab: Lab) -> None:
    """Or the boot was past the point where it needs libvirtd, and continues."""
    _, second = jobs = pair(lab)
    bounce(lab, "n1", "kill", "libvirtd")
    until(lambda: "up" in said(lab, second) or "DRAIN" in lab.node_state("n1")[0], "an outcome")
    state, reason = lab.node_state("n1")
    if "DRAIN" in state:
        assert re.search(r"vhpc: .*(libvirt|guest)", reason), (state, reason)
        lab.resume("n1")
        until(lambda: requeued(second), "the requeue")
        lab.run("ctl", "scontrol", "release", str(second.id))
        ask_again(lab, second)
    end_well(lab, *jobs)


@pytest.mark.slow
@pytest.mark.parametrize("written", ["", "rundir", "uid", "domain"])
@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_slurmctld_lost_in_a_boot_leaves_nothing_behind(lab: Lab, act: str, written: str) -> None:
    """Slurm decides the end of the job; slurmctld ends when the Prolog has announced ``written``.

    It may run on, be forgotten, be aborted and started again under the same
    restart count, wait for BatchStartTimeout (the order to start the script
    was in slurmctld's memory only), or meet its own first start on the node,
    for which Slurm drains it ("Duplicate jobid").
    """
    job = lab.submit(WAITING, "-n1", "-w", "n1")
    until(lambda: job.show()["JobState"] == "RUNNING", "the start")
    if written:
        boots(lab, job, "n1", written)
    bounce(lab, "ctl", act, "slurmctld")

    def outcome() -> str:
        done = lab.run("ctl", "scontrol", "-o", "show", "job", str(job.id), check=False)
        found = re.search(r" JobState=(\S+) .* Restarts=(\d+)", done.out)
        if found is None:
            return "was forgotten"
        return "runs" if "up" in said(lab, job) else "was requeued" if int(found[2]) else ""

    became, end = "", time.monotonic() + limit(45)
    while not became and time.monotonic() < end:
        became = outcome()
    print(f"slurmctld {act} at {written or 'the start'}: the job {became or 'waits'}")
    if became == "runs":
        let_go(lab, job)
        assert job.wait() == "COMPLETED"
        assert ours(said(lab, job)) == []
    lab.run("ctl", "scancel", str(job.id), check=False)
    lab.quiet(180)
    if became == "was forgotten":
        # the next job gets its id, and slurmd believes that it has run that one's Prolog
        settled(lab, 300)
        reused = lab.finish("echo ran", "-w", "n1")
        assert reused.output() == "ran\n" or reused.accounted() == ["FAILED", "1:0"]
    state, reason = lab.node_state("n1")
    if "DRAIN" in state:
        assert reason == "Duplicate jobid"
        lab.resume("n1")
    settled(lab, 300)  # of a forgotten job vhpcd learns within 90 s, the health check 120 s later


@pytest.mark.promise("slurm.lost-start")
@pytest.mark.slow
@pytest.mark.parametrize("act", ["kill", "stop"])
def test_a_job_whose_slurmd_went_away_under_its_boot_is_requeued(lab: Lab, act: str) -> None:
    first, second = pair(lab)
    bounce(lab, "n1", act, "slurmd")
    end_well_later(lab, first, second)


def end_well_later(lab: Lab, first: Job, second: Job) -> None:
    """The second job runs on, or vhpcd sees within two minutes that it waits in vain."""

    def outcome() -> bool:
        return "up" in said(lab, second) or int(second.show()["Restarts"]) > 0

    until(outcome, "the second job to run, or to be requeued", 300)
    if "up" not in said(lab, second):
        ask_again(lab, second)
    end_well(lab, first, second)


@pytest.mark.promise("slurm.lost-start")
@pytest.mark.parametrize("requeue", [True, False])
def test_a_job_whose_slurmstepd_was_killed_frees_its_node(
    lab: Lab, no_health_check: str, requeue: bool
) -> None:
    """Slurm itself finds out only when BatchStartTimeout is over."""
    options = () if requeue else ("--no-requeue",)
    job = lab.submit(f"echo run ${{SLURM_RESTART_COUNT:-0}}; {WAITING}", "-n1", "-w", "n1", *options)
    runs(lab, job)
    lab.run("n1", no_health_check)
    assert job.show()["JobState"] == "RUNNING"
    lab.run("n1", "pkill", "-KILL", "-f", rf"^slurmstepd: \[{job.id}\.batch")
    # as if its guest had been ready for some time
    state = f"/run/vhpc/jobs/{job.id}/state"
    since = int(lab.run("n1", "sed", "-n", "s/^since=//p", state).out)
    lab.run("n1", "sed", "-i", f"s/^since=.*/since={since - 120}/", state)
    lab.run("n1", no_health_check)
    if requeue:
        ask_again(lab, job)
        prints(job, "run 1")
        end_well(lab, job)
    else:
        assert job.wait() == "CANCELLED"
        (_, comment) = job.accounted("State,AdminComment")
        assert comment.startswith("vhpc: its guests are ready but its batch script does not run on n1"), (
            comment
        )
        settled(lab)


@pytest.mark.promise("clean.dead-daemons")
@pytest.mark.slow
def test_jobs_whose_node_was_rebooted_run_again_on_a_clean_one(lab: Lab) -> None:
    first, second = pair(lab)
    subprocess.run([VLAB, "reboot", "n1"], check=True, capture_output=True, timeout=180)
    for job in (first, second):
        until(lambda job=job: int(job.show()["Restarts"]) == 1, f"the requeue of {job.id}")  # type: ignore[misc]
        ask_again(lab, job)
    end_well(lab, first, second)
