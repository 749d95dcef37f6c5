"""Jobs on a fabric: ibsim and Debian's OpenSM on ctl, two adapters of it for each node.

What adapters hold is asked of them by smpquery, along known paths.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster import NODES, VLAB, Job, Lab
from injection import WAITING, let_go, runs, said, until

pytestmark = pytest.mark.lab

# as /etc/vhpc/ports.map says: port GUIDs of each node's adapters
ADAPTERS = {
    "n1": (0x0002C90300000101, 0x0002C90300000111),
    "n2": (0x0002C90300000201, 0x0002C90300000211),
}
LIMITED, FULL = 0x7FFF, 0x8000
NOBODY = {guid: {LIMITED} for guids in ADAPTERS.values() for guid in guids}


@pytest.fixture(scope="module", autouse=True)
def _fabric(lab: Lab) -> Iterator[None]:
    """The lab with a fabric, which it has only for these tests unless somebody wanted it."""
    del lab
    status = subprocess.run([VLAB, "status", "--json"], capture_output=True, check=False, timeout=60)
    had = "opensm" in json.loads(status.stdout)["hosts"]["ctl"]["units"]
    subprocess.run([VLAB, "up", "--fabric"], check=True, capture_output=True, timeout=120)
    yield
    if not had:
        subprocess.run([VLAB, "up", "--no-fabric"], check=True, capture_output=True, timeout=120)


def tables(lab: Lab) -> dict[int, set[int]]:
    """What every adapter but the subnet manager's own holds, by the GUID that it says it has."""
    script = (
        "cd /run/opensm/readers; export SIM_HOST=SM"
        " LD_PRELOAD=/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so\n"
        "for at in 0,1,1 0,1,2 0,1,3 0,1,4; do\n"
        "  smpquery -D nodeinfo $at && smpquery -D pkeys $at 1 || exit\n"
        "done\n"
    )
    found: dict[int, set[int]] = {}
    for line in lab.run("ctl", "sh", "-c", script).out.splitlines():
        if guid := re.match(r"PortGuid:\.*(0x[0-9a-f]{16})$", line):
            mine = found.setdefault(int(guid[1], 16), set())
        if row := re.match(r" *\d+: ((?:0x[0-9a-f]{4} ?)+)$", line):
            mine |= {int(word, 16) for word in row[1].split()} - {0}
    return found


def keys_of(lab: Lab, job: Job) -> set[int]:
    """The key of a job, as vhpcd says."""
    claims = lab.vhpc("ctl", "fabric", "ls")["claims"]
    return {int(one["pkey"], 16) for one in claims if one["generation"].startswith(f"{job.id}.")}


def holding(*jobs: tuple[Job, int, tuple[str, ...]]) -> dict[int, set[int]]:
    """Tables where each job has the key on one adapter of each of its nodes."""
    meant = {guid: set(keys) for guid, keys in NOBODY.items()}
    for _, pkey, nodes in jobs:
        for node in nodes:
            meant[next(guid for guid in ADAPTERS[node] if meant[guid] == {LIMITED})].add(pkey | FULL)
    return meant


def by_node(found: dict[int, set[int]]) -> dict[str, list[list[int]]]:
    """The tables of each node, whichever of its adapters has which."""
    return {node: sorted(sorted(found[guid]) for guid in guids) for node, guids in ADAPTERS.items()}


def admin_comment(lab: Lab, job: Job) -> str:
    shown = lab.run("ctl", "scontrol", "show", "job", str(job.id)).out
    found = re.search(r"^ *AdminComment=(.*?)\s*$", shown, re.M)
    return found[1] if found else ""


def start_now(lab: Lab, job: Job) -> None:
    """Slurm lets a requeued job wait two minutes."""
    lab.run("ctl", "scontrol", "update", f"JobId={job.id}", "StartTime=now")


def nobody_has_a_key(lab: Lab) -> None:
    until(lambda: tables(lab) == NOBODY, "the keys to be taken off the fabric", 90)


def no_node_is_drained(lab: Lab) -> None:
    assert not [node for node in NODES if "DRAIN" in lab.node_state(node)[0]]


def test_while_two_users_jobs_run_their_adapters_hold_exactly_their_own_keys(lab: Lab) -> None:
    assert tables(lab) == NOBODY
    alices = lab.submit(WAITING, "-N2")
    bobs = lab.submit(WAITING, "-N2", user="bob")
    runs(lab, alices)
    runs(lab, bobs)
    (first,), (second,) = keys_of(lab, alices), keys_of(lab, bobs)
    assert first != second
    both = tables(lab)
    assert by_node(both) == by_node(holding((alices, first, NODES), (bobs, second, NODES)))
    assert lab.vhpc("ctl", "fabric", "audit")["findings"] == []
    let_go(lab, bobs)
    assert bobs.wait() == "COMPLETED"
    # alice's adapters are as they were
    until(
        lambda: (
            tables(lab) == {guid: keys if first | FULL in keys else {LIMITED} for guid, keys in both.items()}
        ),
        "bob's key to be taken off the fabric",
        30,
    )
    let_go(lab, alices)
    assert alices.wait() == "COMPLETED"
    nobody_has_a_key(lab)


def test_a_job_whose_key_cannot_be_applied_is_requeued_with_one_line_and_starts_later(lab: Lab) -> None:
    lab.service("ctl", "stop", "opensm")
    try:
        job = lab.submit("echo up", "-N2")
        until(lambda: int(job.show()["Restarts"]) == 1, "the job to be requeued", 60)
        assert job.show()["JobState"] == "PENDING"
        line = admin_comment(lab, job)
        assert line.startswith("vhpc: OpenSM does not run: "), line
        assert tables(lab) == NOBODY
        no_node_is_drained(lab)
    finally:
        lab.service("ctl", "start", "opensm")
    start_now(lab, job)
    assert job.wait() == "COMPLETED"
    assert said(lab, job) == "up\n"
    nobody_has_a_key(lab)


@contextmanager
def opensm_hangs(lab: Lab) -> Iterator[None]:
    """OpenSM does not answer for a while, which a start of a job waits for."""
    lab.run("ctl", "pkill", "-STOP", "-x", "opensm")
    try:
        yield
    finally:
        lab.run("ctl", "pkill", "-CONT", "-x", "opensm")


def applying(lab: Lab, job: Job) -> None:
    """Wait until the job's key is in the file, and OpenSM has yet to read it."""
    until(lambda: f"{job.id}." in str(lab.leases()), f"a lease of job {job.id}", 30)
    (key,) = keys_of(lab, job)
    file = ("grep", "-q", f"key_{key:04x}", "/etc/opensm/partitions.conf")
    until(lambda: lab.run("ctl", *file, check=False).code == 0, "the key to be in the file", 20)


@pytest.mark.slow
def test_a_job_starts_though_vhpcd_is_killed_while_its_key_is_applied(lab: Lab) -> None:
    with opensm_hangs(lab):
        job = lab.submit("echo up", "-N2")
        applying(lab, job)
        lab.service("ctl", "kill", "vhpcd")
        assert tables(lab) == NOBODY
    lab.service("ctl", "start", "vhpcd")
    until(lambda: job.show()["JobState"] != "CONFIGURING", "PrologSlurmctld to end", 60)
    if job.show()["JobState"] == "PENDING":
        start_now(lab, job)
    assert job.wait() == "COMPLETED"
    assert said(lab, job) == "up\n"
    nobody_has_a_key(lab)
    no_node_is_drained(lab)


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_its_key_is_applied_leaves_none(lab: Lab) -> None:
    with opensm_hangs(lab):
        job = lab.submit("echo up", "-N2")
        applying(lab, job)
        lab.run("login", "scancel", str(job.id), user="alice")
    assert job.wait() == "CANCELLED"
    nobody_has_a_key(lab)
    until(lambda: not lab.leases(), "the lease to be released", 120)
    no_node_is_drained(lab)
