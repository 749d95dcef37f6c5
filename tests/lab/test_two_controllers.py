# SPDX-License-Identifier: Apache-2.0
"""Two controllers with slurmctld and vhpcd: one fails, while jobs start, run and end.

Run by scripts/two-controllers, which prints seconds from a fault until a new job has its lease.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from cluster import ROOT, VLAB, Done, Job, Lab, vlab_status
from injection import start_soon, until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.two_controllers]

CONTROLLERS = ("ctl", "ctl2")
DATABASE = "db"
SLURMCTLD_TIMEOUT_S = 15
"""SlurmctldTimeout of this lab: the backup takes over after it."""
MORE_S = 15.0
"""How much longer than Slurm itself a job with guests may wait for its lease; 5 s on a quiet machine."""
OUTAGE_S = 60.0
DATA, OTHERS = "/var/lib/mysql", "/var/lib/mysql/of-others"
JOBS = 20
"""More leases than fit into the pages that the tables have already."""

CLUSTER = "--vhpc-cluster=pair"
RUNS = "touch go-$SLURM_JOB_ID; while [ ! -e end-$SLURM_JOB_ID ]; do sleep 0.5; done; echo whole"


class Pair(Lab):
    """A lab with two controllers; either may be off: a third host asks Slurm."""

    def run(self, host: str, *argv: str, **how: Any) -> Done:
        return super().run(DATABASE if host == "ctl" else host, *argv, **how)

    def on(self, controller: str, *argv: str) -> Done:
        """Run a command on a controller itself."""
        return super().run(controller, *argv)

    def rows(self, query: str) -> list[list[str]]:
        """Rows of vhpcd's database, which is not asked of vhpcd; none while the server is away."""
        done = self.run(DATABASE, "mariadb", "--batch", "-N", "vhpc", "-e", query, check=False)
        return [line.split("\t") for line in done.out.splitlines()] if done.code == 0 else []

    def active(self) -> str:
        """The host with the active vhpcd."""
        ((holder,),) = self.rows("SELECT holder FROM vhpc_writer")
        return holder.partition(":")[0]

    def state_of_lease(self, job: Job) -> str:
        rows = self.rows(f"SELECT state FROM lease WHERE job_id = {job.id} ORDER BY id DESC LIMIT 1")
        return rows[0][0] if rows else ""

    def hook_s(self, job: Job) -> float:
        """Seconds of the last PrologSlurmctld of a job, by the log of slurmctld; 0: none has ended."""
        seconds = 0.0
        for host in CONTROLLERS:
            log = super().run(host, "cat", "/var/log/slurm/slurmctld.log", check=False).out
            began = re.findall(rf"^\[(\S+)\] sched\S*: .*?JobId={job.id} ", log, re.M)
            ended = re.findall(rf"^\[(\S+)\] .*Configuration for JobId={job.id} is complete", log, re.M)
            if began and ended:
                times = [datetime.fromisoformat(one[-1]).timestamp() for one in (began, ended)]
                seconds = max(seconds, times[1] - times[0])
        return seconds

    def up(self) -> None:
        """Start what does not run."""
        done = subprocess.run([VLAB, "up"], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    def signal_vhpcd(self, host: str, name: str) -> None:
        status = [VLAB, "service", host, "status", "vhpcd"]
        said = subprocess.run(status, capture_output=True, text=True, check=True).stdout
        subprocess.run(["kill", f"-{name}", said.split()[-1]], check=True)

    def cut(self, one: str, other: str) -> None:
        """Nothing from one host reaches the other any more; what the other sends, it does."""
        self.on(one, "ip", "route", "add", "blackhole", f"{self.address(other)}/32")

    def join(self, one: str, other: str) -> None:
        self.on(one, "ip", "route", "del", "blackhole", f"{self.address(other)}/32")

    def has_fabric(self) -> bool:
        return "opensm" in vlab_status()["hosts"][DATABASE]["units"]

    def address(self, host: str) -> str:
        return str(vlab_status()["hosts"][host]["address"])


@pytest.fixture(scope="session")
def lab() -> Pair:
    status = subprocess.run([VLAB, "status", "--json"], capture_output=True, text=True, check=False)
    if status.returncode != 0 or "ctl2" not in json.loads(status.stdout)["hosts"]:
        pytest.fail(f"these tests need a lab of their own: {ROOT}/scripts/two-controllers")
    return Pair()


@dataclass
class Times:
    """Seconds from a fault until slurmctld has taken a job, the job has its lease, and slurmctld answers.

    ``hook`` is how long slurmctld then waited for PrologSlurmctld, by its own log: all that is vhpc's.
    Commands of this test take a second and more on a busy machine, and slurmctld has its own pauses.
    """

    taken: float = 0.0
    lease: float = 0.0
    slurm: float = 0.0
    hook: float = 0.0


@pytest.fixture
def ready(lab: Pair) -> Iterator[None]:
    """ctl has the active vhpcd and the slurmctld that works; afterwards all is up again."""
    lab.up()
    if lab.active() != "ctl":
        lab.service("ctl2", "stop", "vhpcd")
        until(lambda: lab.active() == "ctl", "ctl to be active", 60)
        lab.service("ctl2", "start", "vhpcd")
    until(
        lambda: "Slurmctld(primary) at ctl is UP" in lab.run("login", "scontrol", "ping", check=False).out,
        "the primary slurmctld",
        120,
    )
    lab.all_idle()
    yield
    lab.up()


def submitted(lab: Pair) -> Job:
    """A job of the cluster of the one that runs, as soon as a slurmctld takes it."""
    return lab.submit(RUNS, "--mem=600", CLUSTER, "-N2", "--ntasks-per-node=1")


def measured(lab: Pair, began: float) -> tuple[Job, Times]:
    """A job submitted now, when it has its lease; and how long that took since the fault."""
    times = Times()

    def ask_slurm() -> None:
        while lab.run("login", "squeue", check=False).code != 0:
            time.sleep(0.1)
        times.slurm = time.monotonic() - began

    asking = threading.Thread(target=ask_slurm)
    asking.start()
    job = submitted(lab)
    times.taken = time.monotonic() - began
    until(lambda: lab.state_of_lease(job) == "ready", f"a lease of job {job.id}", 240)
    times.lease = time.monotonic() - began
    asking.join(120)
    times.hook = until(lambda: lab.hook_s(job), f"the end of PrologSlurmctld of job {job.id}", 120)
    return job, times


def started(lab: Pair) -> tuple[Job, Job]:
    """A job that runs, and one that will end when the fault has happened; both in their guests."""
    jobs = (lab.submit(RUNS, "--mem=600", "-w", "n1", CLUSTER), lab.submit(RUNS, "--mem=600", "-w", "n2"))
    for job in jobs:
        begun(lab, job)
    saved(lab, jobs[0])
    return jobs[0], jobs[1]


def begun(lab: Pair, job: Job) -> None:
    """Wait until a job's script runs in its guest."""
    present = ("test", "-e", f"/home/alice/go-{job.id}")
    until(lambda: lab.run("login", *present, check=False).code == 0, f"job {job.id} to begin", 300)


def saved(lab: Pair, job: Job) -> None:
    """Wait until slurmctld has saved that the jobs have begun, which alone makes it save nothing.

    A slurmctld that reads an older state starts their scripts again and drains their nodes.
    """
    stat = ("stat", "--format=%.6Y", "/var/lib/slurm/slurmctld/job_state")
    before = lab.on("ctl", *stat).out
    lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "Comment=begun")
    until(lambda: lab.on("ctl", *stat).out > before, "slurmctld to save its state", 60)


def end(lab: Pair, job: Job) -> None:
    lab.run("login", "touch", f"end-{job.id}", user="alice")


def through(lab: Pair, fault: Callable[[], object], heal: Callable[[], object], name: str) -> Times:
    """A fault while a job runs, one ends and one starts; returns how long the start took."""
    runs, ends = started(lab)
    began = time.monotonic()
    fault()
    end(lab, ends)
    starts, times = measured(lab, began)
    print(
        f"\n{name}: Slurm {times.slurm:.1f} s, job {times.taken:.1f} s, lease {times.lease:.1f} s,"
        f" PrologSlurmctld {times.hook:.1f} s",
        flush=True,
    )
    begun(lab, starts)
    heal()
    for job in (runs, starts):
        end(lab, job)
    for job in (runs, ends, starts):
        assert job.wait(timeout=400) == "COMPLETED", job.told()
        assert job.output() == "whole\n", job.told()
    assert [job.show()["Restarts"] for job in (runs, ends)] == ["0", "0"]
    lab.quiet(300)
    until(
        lambda: {state for (state,) in lab.rows("SELECT state FROM lease")} == {"released"}, "releases", 120
    )
    numbers = lab.rows("SELECT vni, count(*) FROM segment GROUP BY vni HAVING count(*) > 1")
    assert numbers == []
    keys_gone(lab)
    return times


def keys_gone(lab: Pair) -> None:
    """With a fabric: no key has two owners, OpenSM's file has none, and the active vhpcd wrote it."""
    if not lab.has_fabric():
        return
    assert lab.rows("SELECT generation FROM key_claim WHERE state != 'quarantine'") == []
    claims = lab.rows("SELECT DISTINCT pkey, owner FROM key_claim")
    assert len({pkey for pkey, _ in claims}) == len(claims), "a key that two jobs had"
    file = ("cat", "/etc/opensm/partitions.conf")
    until(lambda: "key_" not in lab.on(DATABASE, *file).out, "OpenSM's file without keys", 60)
    (epoch,) = lab.rows("SELECT epoch FROM vhpc_writer")
    assert f"-epoch-{epoch[0]}\n" in lab.on(DATABASE, "ls", "-A", "/etc/opensm").out


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_kill_9_of_the_active_vhpcd(lab: Pair) -> None:
    times = through(lab, lambda: lab.service("ctl", "kill", "vhpcd"), lab.up, "vhpcd killed")
    assert times.lease < SLURMCTLD_TIMEOUT_S + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_kill_9_of_slurmctld(lab: Pair) -> None:
    times = through(lab, lambda: lab.service("ctl", "kill", "slurmctld"), lab.up, "slurmctld killed")
    assert times.lease < times.slurm + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_kill_9_of_both(lab: Pair) -> None:
    def kill() -> None:
        lab.service("ctl", "kill", "slurmctld")
        lab.service("ctl", "kill", "vhpcd")

    times = through(lab, kill, lab.up, "both killed")
    assert times.lease < times.slurm + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_power_cut_of_the_controller(lab: Pair) -> None:
    def cut() -> None:
        subprocess.run([VLAB, "poweroff", "ctl"], check=True, capture_output=True, timeout=60)

    times = through(lab, cut, lab.up, "host power cut")
    assert times.lease < times.slurm + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_a_frozen_vhpcd_that_thaws(lab: Pair) -> None:
    def thaw() -> None:
        assert lab.active() == "ctl2"
        before = log(lab).count("listens as a standby")
        lab.signal_vhpcd("ctl", "CONT")
        until(lambda: log(lab).count("listens as a standby") == before + 1, "a standby", 60)
        assert lab.active() == "ctl2"

    times = through(lab, lambda: lab.signal_vhpcd("ctl", "STOP"), thaw, "vhpcd frozen and thawed")
    assert times.lease < SLURMCTLD_TIMEOUT_S + MORE_S


def log(lab: Pair) -> str:
    return lab.on("ctl", "cat", "/var/log/vlab/vhpcd.log").out


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_controllers_that_are_cut_from_each_other(lab: Pair) -> None:
    times = through(
        lab,
        lambda: lab.cut("ctl", "ctl2"),
        lambda: lab.join("ctl", "ctl2"),
        "controllers cut from each other",
    )
    assert lab.active() == "ctl"
    assert times.lease < SLURMCTLD_TIMEOUT_S + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_the_active_vhpcd_is_cut_from_the_database(lab: Pair) -> None:
    times = through(
        lab, lambda: lab.cut("db", "ctl"), lambda: lab.join("db", "ctl"), "active vhpcd cut from the database"
    )
    assert times.lease < SLURMCTLD_TIMEOUT_S + MORE_S


@pytest.mark.promise("ha.jobs")
@pytest.mark.usefixtures("ready")
def test_the_database_is_away_for_a_minute(lab: Pair) -> None:
    """Jobs submitted meanwhile start later; running ones continue, ended ones are released afterwards."""
    runs, ends = started(lab)
    lab.service(DATABASE, "kill", "mariadbd")
    end(lab, ends)
    early = submitted(lab)
    time.sleep(OUTAGE_S)
    lab.service(DATABASE, "start", "mariadbd")
    began = time.monotonic()
    holders = until_active(lab)
    active_s = time.monotonic() - began
    late, times = measured(lab, began)
    for job in (runs, early, late):
        end(lab, job)
    start_soon(lab, early.id)
    for job in (runs, ends, early, late):
        assert job.wait(timeout=400) == "COMPLETED", job.told()
        assert job.output().endswith("whole\n"), job.told()
    until(
        lambda: {state for (state,) in lab.rows("SELECT state FROM lease")} == {"released"}, "releases", 120
    )
    print(f"\ndatabase away: active {active_s:.1f} s after its return ({holders}), lease {times.lease:.1f} s")


def until_active(lab: Pair) -> str:
    """Wait until a vhpcd has changed the database after its return."""
    first: list[list[list[str]]] = []

    def changed() -> bool:
        rows = lab.rows("SELECT epoch, serial, holder FROM vhpc_writer")
        if rows and not first:
            first.append(rows)
        return bool(rows) and rows != first[0]

    until(changed, "an active vhpcd", 60)
    return re.sub(r"\s+", " ", str(lab.rows("SELECT holder FROM vhpc_writer")))


@pytest.fixture
def small_disk(lab: Pair, ready: None) -> Iterator[None]:
    """MariaDB has its files on a small file system of their own."""

    def moved(script: str) -> None:
        for unit in ("slurmdbd", "mariadbd"):
            lab.service(DATABASE, "stop", unit)
        lab.run(DATABASE, "sh", "-ec", script)
        for unit in ("mariadbd", "slurmdbd"):
            lab.service(DATABASE, "start", unit)
        until_active(lab)

    copy = f"mkdir -p /run/small; mount -t tmpfs -o size=160m none /run/small; cp -a {DATA}/. /run/small"
    moved(f"{copy}; chown mysql: /run/small; mount --move /run/small {DATA}")
    yield
    back = f"mkdir -p /run/below; mount --bind /var/lib /run/below; rm -r /run/below/mysql/*; rm -f {OTHERS}"
    moved(f"{back}; cp -a {DATA}/. /run/below/mysql; umount {DATA}; umount /run/below")


@pytest.mark.promise("db.full")
@pytest.mark.usefixtures("small_disk")
def test_the_disk_of_the_database_is_full(lab: Pair) -> None:
    """Running jobs continue and end; jobs without room for their leases start when there is space."""
    runs, ends = started(lab)
    lab.run(DATABASE, "dd", "if=/dev/zero", f"of={OTHERS}", "bs=4k", check=False)
    end(lab, ends)
    later = [lab.submit("true", "--mem=600", "-n1") for _ in range(JOBS)]

    def told() -> bool:
        jobs = lab.run("ctl", "scontrol", "-o", "show", "job", check=False).out
        return "(make room on its disk)" in jobs or "cannot use the database" in jobs

    until(told, "the reason of a job that is requeued", 600)
    until(lambda: ends.show()["JobState"] in ("COMPLETING", "COMPLETED"), "the end of a job", 300)
    assert runs.show()["JobState"] == "RUNNING"
    lab.run(DATABASE, "rm", OTHERS)
    lab.up()  # MariaDB may have crashed for want of space (11.8 does at times); systemd would start it again
    end(lab, runs)
    for job in (runs, ends, *later):
        if job.show()["JobState"] == "PENDING":  # do not wait for Slurm's pause
            start_soon(lab, job.id)
        assert job.wait(timeout=600) == "COMPLETED", job.told()
    assert [(job.output(), job.show()["Restarts"]) for job in (runs, ends)] == [("whole\n", "0")] * 2
    lab.quiet(300)
    until(
        lambda: {state for (state,) in lab.rows("SELECT state FROM lease")} == {"released"}, "releases", 300
    )
    assert not any("DRAIN" in lab.node_state(node)[0] for node in lab.nodes)
