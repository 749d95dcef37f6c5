# SPDX-License-Identifier: Apache-2.0
"""The munge key of a site is replaced, host by host, while jobs run and end."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from cluster import VLAB, Job, Lab
from injection import WAITING, let_go, runs, said, settled, until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

KEY = "/etc/munge/munge.key"
APART_S = 75.0
"""So long the hosts have two keys: longer than the interval of the lab's health check."""


def hosts() -> list[str]:
    """All hosts of the lab: nodes, login, and last those of the database and of slurmctld."""
    status = subprocess.run([VLAB, "status", "--json"], capture_output=True, text=True, check=True)
    names = list(json.loads(status.stdout)["hosts"])
    return sorted(names, key=lambda name: (name.startswith("ctl"), name == "db", name == "login", name))


def replace_key(lab: Lab, host: str, key: str) -> None:
    """As an operator does it: the new file beside the old one, renamed, and munged restarted."""
    script = f"umask 077; base64 -d > {KEY}.new && chown munge: {KEY}.new && mv {KEY}.new {KEY}"
    lab.run(host, "sh", "-c", script, stdin=key)
    for act in ("stop", "start"):
        lab.service(host, act, "munged")


@pytest.fixture
def new_key(lab: Lab) -> Iterator[str]:
    """A new key; afterwards all hosts have the old one again."""
    before = lab.run("ctl", "base64", KEY).out
    yield base64.b64encode(os.urandom(128)).decode()
    for host in hosts():
        replace_key(lab, host, before)


def running(lab: Lab, node: str) -> Job:
    job = lab.submit(WAITING, "-n1", "-w", node)
    runs(lab, job)
    return job


def test_a_munge_key_is_replaced_while_jobs_run_and_end(lab: Lab, new_key: str) -> None:
    """One job goes on throughout, one ends while its node and the controller have different keys."""
    stays, ends = running(lab, "n2"), running(lab, "n1")
    first, *others = hosts()
    assert first == "n1"
    replace_key(lab, first, new_key)
    let_go(lab, ends)
    time.sleep(APART_S)
    assert "DRAIN" not in lab.node_state("n1")[0]
    for host in others:
        replace_key(lab, host, new_key)
    until(lambda: "NOT_RESPONDING" not in lab.node_state("n1")[0], "n1 to answer again", 300)
    assert ends.wait(timeout=300) == "COMPLETED", ends.told()
    assert said(lab, ends).endswith("done\n")
    assert stays.show()["JobState"] == "RUNNING"
    later = lab.finish("srun hostname", "-n1", "-w", "n1")
    assert later.accounted() == ["COMPLETED", "0:0"]
    assert later.output() == "n1\n"
    let_go(lab, stays)
    assert stays.wait() == "COMPLETED", stays.told()
    assert said(lab, stays).endswith("done\n")
    assert [job.show()["Restarts"] for job in (stays, ends)] == ["0", "0"]
    settled(lab, 300)
