# SPDX-License-Identifier: Apache-2.0
"""The site's check of guests before their job starts (guests.check)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import Job, Lab
from injection import ask_again, ours, until
from variants import MINE

pytestmark = pytest.mark.lab

TOML = "/etc/vhpc/vhpc.toml"
GOOD = 'echo fine; test "$(id -u) $SLURMD_NODENAME" = "0 n2"'
BAD = "echo GPU 2: PASS; echo GPU 3: FAIL; exit 226"
SAID = "the check of guest n1 failed: exit code 226: GPU 2: PASS | GPU 3: FAIL"
SLOW = "echo diagnosing; exec sleep 1000"


@contextmanager
def checked(lab: Lab, *, timeout_s: int = 60, **scripts: str) -> Iterator[None]:
    """Nodes have a check: a shell script each."""
    try:
        for node, script in scripts.items():
            command = json.dumps(["/bin/sh", "-c", script])  # such strings are TOML too
            keys = f"check = {command}\ncheck_timeout_s = {timeout_s}\n"
            edit = (
                "import pathlib\n"
                f"file = pathlib.Path('{TOML}')\n"
                "pathlib.Path(f'{file}.before').write_text(text := file.read_text())\n"
                f"file.write_text(text.replace('\\n[guests]\\n', '\\n[guests]\\n' + {keys!r}))\n"
            )
            lab.run(node, "python3", "-", stdin=edit)
            assert lab.vhpc(node, "config")["guests"]["check"][2] == script
        yield
    finally:
        for node in scripts:
            lab.run(node, "mv", "-f", f"{TOML}.before", TOML, check=False)


@contextmanager
def drains_n1(lab: Lab, reason: str) -> Iterator[None]:
    """The node is drained in this block, and in service again afterwards."""
    try:
        yield
        state, said = lab.node_state("n1")
        assert "DRAIN" in state
        assert said.startswith(f"vhpc: {reason}"), said
        assert "DRAIN" not in lab.node_state("n2")[0]
    finally:
        until(lambda: lab.node_state("n1")[0] in ("IDLE", "IDLE+DRAIN"), "n1 to be free")
        lab.resume("n1", check=False)
        until(lambda: lab.node_state("n1")[0] == "IDLE", "n1 to be idle")


def stages(lab: Lab, job: Job, node: str) -> list[str]:
    """Details of the stage in `vhpc timeline`, of all runs of the job on a node."""
    runs = lab.vhpc("ctl", "timeline", str(job.id))["runs"]
    nodes = [one for run in runs for one in run["timelines"] if one["node"] == node]
    return [stage["detail"] for one in nodes for stage in one["stages"] if stage["name"] == "check"]


@pytest.mark.promise("check.before", "check.drain", "check.once")
def test_a_job_leaves_a_bad_node_and_runs_on_a_good_one(lab: Lab) -> None:
    with checked(lab, n1=BAD, n2=GOOD), drains_n1(lab, SAID):
        job = lab.submit("hostname", "-n1", "-N1")
        ask_again(lab, job)
        assert job.wait() == "COMPLETED"
        assert job.output().splitlines()[-1] == "n2"
        (failed,) = stages(lab, job, "n1")
        assert failed.startswith(f"failed: {SAID} (/bin/sh -c")
        assert stages(lab, job, "n2") == [f"/bin/sh -c {GOOD}"]
        job.leave_queue()


@pytest.mark.promise("check.drain", "check.fault")
def test_a_check_without_end_drains_the_node(lab: Lab) -> None:
    said = "the check of guest n1 failed: it did not end within 5 s: diagnosing"
    with checked(lab, timeout_s=5, n1=SLOW), drains_n1(lab, said):
        job = lab.finish("echo started", "-w", "n1", "--no-requeue")
        assert job.accounted("State") == ["FAILED"]
        (line,) = ours(job.output())
        assert said in line
        assert "the job may not be requeued: submit it again" in line
        assert "started" not in job.output()
        assert any(detail.startswith(f"failed: {said}") for detail in stages(lab, job, "n1"))
        job.leave_queue()


@pytest.mark.promise("check.own-image", "attack.check")
def test_a_users_image_drains_no_node(lab: Lab) -> None:
    lab.run("login", "sh", "-c", MINE, user="alice")
    try:
        with checked(lab, n1=BAD):
            job = lab.finish("echo started", "-w", "n1", image="own/mine")
            job.leave_queue()
    finally:
        lab.run("login", "rm", "-rf", "/scratch/alice", user="alice")
    (line,) = ours(job.output())
    assert SAID in line
    assert "depends on image own/mine:latest" in line
    assert "started" not in job.output()
    assert job.show()["Restarts"] == "0"
    lab.assert_nothing_left()
