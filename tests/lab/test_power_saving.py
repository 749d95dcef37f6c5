# SPDX-License-Identifier: Apache-2.0
"""Nodes that Slurm powers down, and powers up for a job: the job waits for them and runs in its guests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
from cluster import NODES, VLAB, Lab
from injection import settled, slurm_conf, until

from pace import limit

pytestmark = pytest.mark.lab

FOLDER, ASKED, SLEEPER = "/scratch/power", "/scratch/power/asked", "n2"
VHPCD_ASKS_S = 60
# slurmctld runs them; the test switches the node off and on
PROGRAMS = {name: f'#!/bin/sh\necho "{name} $1" >>{ASKED}\n' for name in ("suspend", "resume")}
SETTINGS = f"""
$a SuspendProgram={FOLDER}/suspend
$a ResumeProgram={FOLDER}/resume
$a SuspendTime=86400
$a SuspendTimeout=5
$a ResumeTimeout=600
"""


@pytest.fixture(scope="module")
def power(lab: Lab) -> Iterator[None]:
    """A Slurm with power saving; nodes are powered down by command only."""
    write = "".join(f"cat >{FOLDER}/{name} <<'END'\n{text}END\n" for name, text in PROGRAMS.items())
    script = f"mkdir {FOLDER}; {write}chmod 755 {FOLDER}/*; touch {ASKED}; chmod 666 {ASKED}"
    lab.run("ctl", "sh", "-e", stdin=script)
    with slurm_conf(lab, SETTINGS, restart=True):
        yield
    lab.run("ctl", "rm", "-r", FOLDER)


def asked(lab: Lab) -> list[str]:
    """Calls of the programs so far."""
    return lab.run("ctl", "cat", ASKED).out.splitlines()


@pytest.mark.promise("site.power")
def test_a_job_waits_until_its_node_is_powered_up(lab: Lab, power: None) -> None:
    lab.run("ctl", "scontrol", "update", f"NodeName={SLEEPER}", "State=POWER_DOWN")
    until(lambda: f"suspend {SLEEPER}" in asked(lab), "SuspendProgram")
    lab.service(SLEEPER, "stop", "slurmd")
    until(lambda: "POWERED_DOWN" in lab.node_state(SLEEPER)[0], "a node without power")

    job = lab.submit("srun hostname; srun cat /proc/sys/kernel/random/boot_id", "-N2", "--mem=600")
    until(lambda: f"resume {SLEEPER}" in asked(lab), "ResumeProgram")
    assert job.show()["JobState"] == "CONFIGURING"
    # vhpcd asks Slurm once a minute which jobs with leases are over
    time.sleep(VHPCD_ASKS_S + 5)
    assert [line for line in lab.leases() if line.startswith(f"{job.id}.")] != []
    subprocess.run([VLAB, "reboot", SLEEPER], check=True, capture_output=True, timeout=limit(150))
    assert job.wait() == "COMPLETED"
    first, second, *boots = sorted(job.output().splitlines(), key=len)
    assert sorted([first, second]) == list(NODES)
    assert len(set(boots)) == 2
    settled(lab)
