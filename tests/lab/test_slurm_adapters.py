# SPDX-License-Identifier: Apache-2.0
"""What pyslurm says of jobs is what scontrol says, also of odd ones; a slurmctld that hangs stops nobody.

Needs a lab on a tree whose /opt/vhpc has the pyslurm of the tree's Slurm, which the lab's own
trees have not: pyslurm exists for some releases of Slurm only (25.05 or newer, and none of
Debian 12, 13 or sid). docs/contributing.md, "Another Slurm", says how to make such a tree.
Elsewhere the tests are skipped. They use two nodes, CPUs for three jobs of one task and
50 MiB, operators' rights in Slurm (root on ctl), and change slurm.conf for a moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Lab
from injection import settled, until

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("adapter_twins.py").read_text(encoding="utf-8")
HET = "#!/bin/sh\n#SBATCH -n1 --mem=50\n#SBATCH hetjob\n#SBATCH -n1 --mem=60\nsleep 300"


def ask(lab: Lab, *words: str, user: str = "root") -> Any:
    """What the program prints on the host of slurmctld, as text or from JSON."""
    command = ("runuser", "-u", user, "--", "/opt/vhpc/bin/python", "-", *words)
    done = lab.run("ctl", *command, stdin=PROGRAM, check=False)
    if done.code == 3:
        pytest.skip(f"{done.out.strip()}; use a tree with pyslurm of Slurm's release (lab/vlab up --tree)")
    return json.loads(done.out) if done.code == 0 else done.out


def sbatch(lab: Lab, script: str, *options: str) -> int:
    done = lab.run("login", "sbatch", "--parsable", "-o/dev/null", *options, user="alice", stdin=script)
    return int(done.out)


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Iterator[list[int]]:
    """Jobs without guests: on two nodes, named in Latin-1, suspended, array, components, waiting."""
    ask(lab, "list")
    waits = "#!/bin/sh\nsleep 300"
    small = ("-n1", "--mem=50")
    latin = "printf '%s' | sbatch --parsable -n1 --mem=50 -o/dev/null -J \"$(printf 'caf\\351')\""
    running = [
        sbatch(lab, waits, "-N2", "--ntasks-per-node=1", "--mem=50"),
        asleep := sbatch(lab, waits, *small),
        int(lab.run("login", "sh", "-c", latin.replace("%s", waits), user="alice").out),
    ]
    # whether these run depends on the number of CPUs of this machine
    others = [
        sbatch(lab, waits, *small, "--comment=UserId=root(0)"),
        sbatch(lab, waits, *small, "--array=0-2"),
        sbatch(lab, HET),
    ]
    listing = ("squeue", "-h", "--array", "-o", "%A %T")

    def states() -> dict[int, str]:
        rows = (line.split() for line in lab.run("ctl", *listing).out.splitlines())
        return {int(number): state for number, state in rows}

    until(lambda: all(states().get(job) == "RUNNING" for job in running), "the first jobs to run")
    lab.run("ctl", "scontrol", "suspend", str(asleep))
    waiting = sbatch(lab, waits, *small, "--hold", "--array=5-7")
    yield sorted(states())
    lab.run("ctl", "scancel", *map(str, (*running, *others, waiting)))
    settled(lab)


@pytest.mark.results
def test_pyslurm_and_scontrol_say_the_same(lab: Lab, jobs: list[int]) -> None:
    found = ask(lab, "same", *map(str, (*jobs, 99999)))
    assert found["differences"] == []
    assert len(found["read"]) >= 4, found  # the others share their record or are components


@pytest.mark.results
def test_a_slurmctld_that_hangs_stops_no_thread(lab: Lab, jobs: list[int]) -> None:
    found = ask(lab, "hang", str(jobs[0]))
    assert "no answer within 5 s" in found["error"]
    assert found["took"] < 15
    assert found["still"] < 2  # other threads go on: with pyslurm in the same process they stood still
    assert found["after"] == jobs[0]


@pytest.mark.results
def test_jobs_that_are_hidden_are_an_error(lab: Lab, jobs: list[int]) -> None:
    conf = lab.slurm_conf
    lab.run(
        "ctl", "sh", "-c", f"cp {conf} {conf}.kept; echo PrivateData=jobs >> {conf}; scontrol reconfigure"
    )
    try:
        assert set(ask(lab, "list")) == set(jobs)
        assert "PrivateData in slurm.conf hides jobs of other users from bob" in ask(lab, "list", user="bob")
    finally:
        lab.run("ctl", "sh", "-c", f"mv {conf}.kept {conf}; scontrol reconfigure")
