# SPDX-License-Identifier: Apache-2.0
"""pyslurm shows jobs as scontrol does, also odd ones; a slurmctld that hangs stops no other thread.

Needs a lab on a tree whose /opt/vhpc has the pyslurm of the tree's Slurm, which the lab's own
trees have not: pyslurm exists for some releases of Slurm only (25.05 or newer, and none of
Debian 12, 13 or sid). docs/contributing.md, "Another Slurm", says how to make such a tree.
Elsewhere the tests are skipped. They use two nodes, CPUs for three jobs of one task and
50 MiB, operators' rights in Slurm (root on ctl), and change slurm.conf and vhpc.toml for a moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Lab
from injection import configured, settled, slurm_conf, until

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("adapter_twins.py").read_text(encoding="utf-8")
WAITS = "#!/bin/sh\nsleep 300"
SMALL = ("-n1", "--mem=50")
# any two device files: Slurm counts them, and no guest gets them
DEVICES = """AutoDetect=off
Name=gpu Type=h200 File=/dev/zero
Name=gpu Type=h200 File=/dev/full
Name=ibvf Count=4 Flags=CountOnly
"""
UNITS = "Gres=gpu:h200:2,ibvf:4"
NODE = f"Sockets=1 CoresPerSocket=4 ThreadsPerCore=2 {UNITS}"
VHPCD_LOG = "/var/log/vlab/vhpcd.log"
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


@pytest.fixture
def devices(lab: Lab) -> Iterator[None]:
    """Nodes with GPUs, virtual functions and two threads per core, as slurm.conf and gres.conf have it."""
    ask(lab, "list")
    conf, hosts = lab.slurm_conf, ("ctl", "login", *lab.nodes)
    gres = f"{conf.rpartition('/')[0]}/gres.conf"
    edit = f"s/^(NodeName=.*) CPUs=.* RealMemory=/\\1 {NODE} RealMemory=/\n$a GresTypes=gpu,ibvf"
    for host in hosts:
        lab.run(host, "sh", "-c", f"cat > {gres}", stdin=DEVICES)
    with slurm_conf(lab, edit, restart=True):
        try:
            for host in hosts:
                lab.run(host, "grep", "-q", UNITS, conf)
            yield
        finally:
            lab.run("ctl", "scancel", "--user=alice")
            lab.quiet()
            for host in hosts:
                lab.run(host, "rm", gres)


@pytest.mark.usefixtures("devices")
def test_devices_and_threads_are_read_as_by_scontrol(lab: Lab) -> None:
    jobs = [
        sbatch(lab, WAITS, "-N2", "--ntasks-per-node=1", "--mem=50", "--gres=gpu:h200:1,ibvf:2"),
        sbatch(lab, WAITS, *SMALL, "--gres=gpu:1"),
        sbatch(lab, WAITS, "-n3", "--mem=50", "--gres=ibvf:1"),
    ]
    show = ("scontrol", "-o", "-d", "show", "job")
    until(lambda: all("=RUNNING" in lab.run("ctl", *show, str(job)).out for job in jobs), "the jobs to run")
    # what is compared has devices, and more CPUs than tasks
    assert " CPU_IDs=0-1 Mem=50 GRES=gpu:h200:1(IDX:0),ibvf(CNT:2)" in lab.run("ctl", *show, str(jobs[0])).out
    found = ask(lab, "same", *map(str, jobs))
    assert found["differences"] == []
    assert found["read"] == jobs


@pytest.fixture
def auto(lab: Lab) -> Iterator[None]:
    """A vhpcd that chooses."""
    ask(lab, "list")
    try:
        with configured(lab, "ctl", "controller", 'slurm_adapter = "auto"'):
            lab.service("ctl", "restart", "vhpcd")
            yield
    finally:
        lab.service("ctl", "restart", "vhpcd")


@pytest.mark.usefixtures("auto")
def test_auto_is_pyslurm_and_doctor_shows_it(lab: Lab) -> None:
    job = lab.finish("hostname", "-w", "n1")
    assert job.output() == "n1\n"
    asked = re.findall("Slurm is asked by (.*)", lab.run("ctl", "cat", VHPCD_LOG).out)
    assert re.fullmatch(r"pyslurm 2\S+ \(built with Slurm 2\S+\)", asked[-1])
    found = {one["check"]: one for one in lab.vhpc("ctl", "doctor", check=False)}
    said = found["slurm.adapter"]
    assert (said["level"], said["what"]) == ("ok", f"vhpcd asks by {asked[-1]} (slurm_adapter = auto)")


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Iterator[list[int]]:
    """Jobs without guests: on two nodes, named in Latin-1, suspended, array, components, waiting."""
    ask(lab, "list")
    latin = "printf '%s' | sbatch --parsable -n1 --mem=50 -o/dev/null -J \"$(printf 'caf\\351')\""
    running = [
        sbatch(lab, WAITS, "-N2", "--ntasks-per-node=1", "--mem=50"),
        asleep := sbatch(lab, WAITS, *SMALL),
        int(lab.run("login", "sh", "-c", latin.replace("%s", WAITS), user="alice").out),
    ]
    # whether these run depends on the number of CPUs of this machine
    others = [
        sbatch(lab, WAITS, *SMALL, "--comment=UserId=root(0)"),
        sbatch(lab, WAITS, *SMALL, "--array=0-2"),
        sbatch(lab, HET),
    ]
    listing = ("squeue", "-h", "--array", "-o", "%A %T")

    def states() -> dict[int, str]:
        rows = (line.split() for line in lab.run("ctl", *listing).out.splitlines())
        return {int(number): state for number, state in rows}

    until(lambda: all(states().get(job) == "RUNNING" for job in running), "the first jobs to run")
    lab.run("ctl", "scontrol", "suspend", str(asleep))
    waiting = sbatch(lab, WAITS, *SMALL, "--hold", "--array=5-7")
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
    assert found["still"] < 2  # other threads continue: with pyslurm in the same process they stood still
    assert found["after"] == jobs[0]


@pytest.mark.results
def test_jobs_that_are_hidden_are_an_error(lab: Lab, jobs: list[int]) -> None:
    with slurm_conf(lab, "$a PrivateData=jobs"):
        assert set(ask(lab, "list")) == set(jobs)
        assert "PrivateData in slurm.conf hides jobs of other users from bob" in ask(lab, "list", user="bob")
