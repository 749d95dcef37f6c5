# SPDX-License-Identifier: Apache-2.0
"""Jobs as users see them on the login host: ps, timeline, console and report, of their own jobs only."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import EXEC, IMAGE, Job, Lab
from injection import WAITING, kill_qemu, let_go, runs, settled, until

pytestmark = pytest.mark.lab

SHOUT = "sudo sh -c 'printf \"from \\033[1mthe guest\\033[0m %s\\n\" $(hostname) > /dev/console'"


def shown(lab: Lab, user: str, *argv: str) -> Any:
    return json.loads(lab.run("login", "vhpc", *argv, "--json", user=user).out)


def refused(lab: Lab, user: str, *argv: str) -> str:
    """The one line of a command that fails."""
    done = lab.run("login", "vhpc", *argv, user=user, check=False)
    assert done.code == 1, done
    assert done.err.count("\n") == 1, done.err
    return done.err


@pytest.fixture(scope="module")
def job(lab: Lab) -> Iterator[Job]:
    """A job of alice's on both nodes, which runs."""
    found = lab.submit(f"{SHOUT}\n{WAITING}", "-N2")
    runs(lab, found)
    yield found
    if found.show()["JobState"] == "RUNNING":
        let_go(lab, found)
        found.wait()
    settled(lab)


@pytest.mark.promise("vhpcd.user-view", "attack.user-view")
@pytest.mark.results
def test_another_user_sees_nothing_of_the_job(lab: Lab, job: Job) -> None:
    assert all(row["job"] != job.id for row in shown(lab, "bob", "ps", "--all"))
    for command in ("timeline", "report", "console"):
        assert f"vhpcd shows you no job {job.id}" in refused(lab, "bob", command, str(job.id))
    denied = lab.run("n1", "cat", f"/run/vhpc/jobs/{job.id}/g0/console.log", user="bob", check=False)
    assert denied.code != 0


@pytest.mark.results
def test_an_operator_sees_the_job(lab: Lab, job: Job) -> None:
    # vhpcd remembers for five minutes who bob was
    lab.run("ctl", "sacctmgr", "-i", "modify", "user", "bob", "set", "adminlevel=Operator")
    lab.service("ctl", "restart", "vhpcd")
    try:
        until(
            lambda: lab.run("login", "vhpc", "timeline", str(job.id), user="bob", check=False).code == 0,
            "vhpcd to be back and to show bob the job",
        )
        assert shown(lab, "bob", "report", str(job.id))["user"] == "alice"
    finally:
        lab.run("ctl", "sacctmgr", "-i", "modify", "user", "bob", "set", "adminlevel=None")
        lab.service("ctl", "restart", "vhpcd")
    until(lambda: lab.run("login", "vhpc", "ps", user="bob", check=False).code == 0, "vhpcd to be back")


@pytest.mark.promise("tools.console")
@pytest.mark.results
def test_a_console_is_followed_by_its_owner(lab: Lab, job: Job) -> None:
    text = lab.run("login", "vhpc", "console", str(job.id), user="alice").out
    assert "from the guest n1" in text.splitlines()
    assert "\x1b" not in text
    # the script runs in the guest of the first node only
    other = lab.run("login", "vhpc", "console", str(job.id), "n2", user="alice").out
    assert "from the guest" not in other
    follow = [*EXEC, "-u", "alice", "login", "--", "vhpc", "console", str(job.id), "--follow"]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "from the guest n1" not in process.stdout.readline():
            assert process.poll() is None
        lab.run("login", "scancel", str(job.id), user="alice")
        assert process.wait(120) == 0, "it ends with the job"
    assert job.wait() == "CANCELLED"
    assert f"job {job.id} has ended" in refused(lab, "alice", "console", str(job.id))


@pytest.fixture
def physics(lab: Lab) -> Iterator[str]:
    """A new account of alice's that bob coordinates; vhpcd remembers for five minutes who bob was."""
    name = f"physics{time.time_ns()}"
    for words in (f"account {name}", f"user alice account={name}", f"coordinator account={name} names=bob"):
        lab.run("ctl", "sacctmgr", "-i", "add", *words.split())
    lab.service("ctl", "restart", "vhpcd")
    try:
        yield name
    finally:
        for words in (f"user alice account={name}", f"account {name}"):
            lab.run("ctl", "sacctmgr", "-i", "delete", *words.split(), check=False)
        lab.service("ctl", "restart", "vhpcd")


@pytest.mark.promise("vhpcd.user-view")
def test_a_coordinator_sees_the_jobs_of_the_account_only(lab: Lab, physics: str) -> None:
    theirs = lab.finish("true", "-w", "n1", f"--account={physics}")
    other = lab.submit("true", "--account=users", image="no-such-image")
    assert (theirs.show()["JobState"], other.wait()) == ("COMPLETED", "FAILED"), theirs.told()
    settled(lab)
    until(lambda: lab.run("login", "vhpc", "ps", user="bob", check=False).code == 0, "vhpcd to be back")
    rows = {row["job"]: row["user"] for row in shown(lab, "bob", "ps", "--all")}
    assert {job for job, user in rows.items() if user != "bob"} == {theirs.id}
    assert shown(lab, "bob", "report", str(theirs.id))["account"] == physics
    for command in ("timeline", "report"):
        assert f"vhpcd shows you no job {other.id}" in refused(lab, "bob", command, str(other.id))
    assert {theirs.id, other.id} <= {row["job"] for row in shown(lab, "alice", "ps", "--all")}


@pytest.mark.promise("vhpcd.user-view")
def test_an_owner_sees_the_job_before_and_after_its_end(lab: Lab) -> None:
    job = lab.submit(WAITING, "-N2")
    runs(lab, job)
    (row,) = [row for row in shown(lab, "alice", "ps") if row["job"] == job.id]
    assert (row["state"], row["nodes"]) == ("ready", ["n1", "n2"])
    running = shown(lab, "alice", "report", str(job.id))
    assert [node["ready_s"] > 0 for node in running["nodes"]] == [True, True]
    # the kernel's own account of where QEMU's threads may run
    pid = lab.run("n1", "pgrep", "-f", f"qemu-system.* guest=vhpc-{job.id}-").out.split()[0]
    script = f"grep -l 'CPU ' /proc/{pid}/task/*/comm | xargs -n1 dirname"
    tasks = lab.run("n1", "sh", "-c", script).out.split()
    allowed = {
        int(lab.run("n1", "sh", "-c", f"grep Cpus_allowed_list {task}/status").out.split()[1])
        for task in tasks
    }
    assert set(running["nodes"][0]["guests"][0]["os_cpus"]) == allowed
    assert running["image"]["digest"] in lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    settled(lab)
    until(
        lambda: shown(lab, "alice", "report", str(job.id))["state"] == "released", "the lease to be released"
    )
    ended = shown(lab, "alice", "report", str(job.id))
    assert [node["guests"] for node in ended["nodes"]] == [node["guests"] for node in running["nodes"]]
    assert any(stage["phase"] == "teardown" for stage in ended["nodes"][1]["stages"])
    lab.run("login", "vhpc", "report", str(job.id), "--html", "job.html", user="alice")
    page = lab.read("alice", "job.html")
    (script,) = [step for step in ended["usage"]["steps"] if step["step"] == "batch"]
    assert 0 < script["cpu_us"] < 60e6
    assert "Resources used" in page
    assert ended["image"]["digest"] in page
    stages = sum(len(node["stages"]) for node in ended["nodes"])
    assert page.count("<svg") == 1 + 2 + stages, "one placement, the scales of boot and teardown, a bar each"
    assert "n2: ready after" in lab.run("login", "vhpc", "timeline", str(job.id), user="alice").out


def test_a_boot_that_fails_is_in_the_report(lab: Lab) -> None:
    job = lab.finish("echo up", "-w", "n1", "--mem=100")
    (entry,) = [one for one in shown(lab, "alice", "report", str(job.id))["lines"] if "needs" in one["line"]]
    assert entry["line"] in job.output()


def on_a_terminal(lab: Lab, command: str) -> str:
    """The output of a command on alice's terminal."""
    return lab.run("login", "script", "-qec", command, "/dev/null", user="alice", timeout=300).out


@pytest.mark.promise("boot.progress")
def test_srun_on_a_terminal_shows_the_step_that_it_waits_for(lab: Lab) -> None:
    command = f"srun -N2 --mem=768 --vhpc-image={IMAGE} hostname"
    text = on_a_terminal(lab, command)
    lines = [one for one in text.splitlines() if one.startswith("vhpc: ")]
    # emulated guests boot for longer than two seconds
    assert lines, text
    for one in lines:
        assert re.fullmatch(r"vhpc: [01] of 2 guests ready(, n[12]: [a-z 0-9]+ for \d+ s)?", one), text
    assert sorted(set(text.split()) & {"n1", "n2"}) == ["n1", "n2"]
    assert "vhpc: " not in on_a_terminal(lab, f"VHPC_QUIET=1 {command}")
    assert "vhpc: " not in on_a_terminal(lab, command.replace("srun", "srun -Q"))
    piped = lab.run("login", *command.split(), user="alice", timeout=300)
    assert "vhpc: " not in piped.out + piped.err
    left = lab.run("login", "pgrep", "-fc", "[b]oot-watch", check=False)
    assert left.out.strip() == "0", "no watcher is left"
    settled(lab)


def test_salloc_on_a_terminal_shows_the_step_it_waits_for(lab: Lab) -> None:
    command = f"salloc -N2 --mem=768 --vhpc-image={IMAGE} echo the command runs"
    text = on_a_terminal(lab, command)
    before, _, after = text.partition("the command runs")
    lines = [one for one in before.splitlines() if one.startswith("vhpc: ")]
    assert lines, text
    for one in lines:
        assert re.fullmatch(r"vhpc: [01] of 2 guests ready(, n[12]: [a-z 0-9]+ for \d+ s)?", one), text
    assert "vhpc: " not in after, text
    assert "vhpc: " not in on_a_terminal(lab, f"VHPC_QUIET=1 {command}")
    left = lab.run("login", "pgrep", "-fc", "[b]oot-watch", check=False)
    assert left.out.strip() == "0", "no watcher is left"
    settled(lab)


def test_ps_says_how_far_a_boot_is(lab: Lab) -> None:
    job = lab.submit("echo up", "-w", "n1")
    # a boot may take less than the 2 s after which a node first says what it does: hold one that has begun
    find = f"pid=$(pgrep -f '^[^ ]*qemu-system.* guest=vhpc-{job.id}-')"
    hold = f"until {find} && [ $(ps -o cputimes= -p $pid) -ge 1 ]; do sleep 0.1; done; kill -STOP $pid"
    lab.run("n1", "sh", "-c", hold, timeout=180)

    def booting() -> bool:
        rows = [row for row in shown(lab, "alice", "ps") if row["job"] == job.id]
        return bool(rows and rows[0]["booting"] and rows[0]["booting"]["doing"])

    try:
        until(booting, "vhpc ps to show a stage of the boot", 60)
    finally:
        kill_qemu(lab, job, "n1", "CONT")
    assert job.wait() == "COMPLETED"
