# SPDX-License-Identifier: Apache-2.0
"""Leftovers of a crash are found, named, and removed; objects in use are not."""

from __future__ import annotations

import json

import pytest
from cluster import IMAGE, Lab
from injection import WAITING, let_go, ours, prints, runs, said, until

pytestmark = pytest.mark.lab

# Boots a guest as Prolog would and then simply ends: a generation that no controller knows.
ABANDON = f"""
from pathlib import Path
from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.config import load
from vhpc_slurm.model import *
from vhpc_slurm.node import plan as plans
from vhpc_slurm.node.boot.sequence import boot
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.guest import libvirtd, shares
from vhpc_slurm.node.host import accounts, inventory
from vhpc_slurm.node.store import timeline
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.usage import NOTHING

config = load()
layout = Layout(config)
ref = ImageRef.parse({IMAGE!r})
image = FolderCatalog(Path(config.images.catalog)).resolve(ref)
generation = Generation(4000000, 0, "0123abcd")
request = JobRequest(4000000, 0, 2001, 2001, "alice", "/home/alice", ref)
part = NodeAllocation("n1", (0,), 1024)
lease = Lease(generation, LeaseState.READY, request, Allocation((part,)), image)
journal = Journal(layout.journals, generation)
folder = layout.job(generation.job_id)
journal.acquire("rundir", "rundir", path=str(folder))
folder.mkdir(mode=0o711, parents=True)
host = inventory.read_inventory("n1", config)
account = accounts.account(2001)
folders, devices = shares.of_job(config, account, request), assignment.handed_out(layout)
plan = plans.make(layout, plans.of_lease(lease, host, folders, NOTHING, devices))  # whatever others hold
recorder = timeline.Recorder(layout.timeline(generation), generation, "n1")
with libvirtd.connect(config.guests.libvirt_uri, 60) as hypervisor:
    for _ in boot(Boot(layout, lease, image, plan, host, journal, recorder, account, hypervisor)):
        pass
"""


@pytest.mark.usefixtures("no_health_check")
def test_an_abandoned_generation_is_removed_a_running_one_not(lab: Lab) -> None:
    job = lab.submit(WAITING, "-n1", "-w", "n1")
    runs(lab, job)
    lab.run("n1", "/opt/vhpc/bin/python", "-", stdin=ABANDON)
    checked = lab.run("n1", "vhpc", "reconcile", "--check", "--json", check=False)
    assert checked.code == 1
    found = json.loads(checked.out)
    assert [(f["kind"], f["repaired"]) for f in found] == [("stale-generation", False)]
    assert "4000000.0.0123abcd" in found[0]["what"]
    assert "vhpc-4000000-0-0123abcd-g0" in lab.run("n1", "virsh", "-q", "list", "--name").out

    repaired = lab.vhpc("n1", "reconcile")
    assert [(f["kind"], f["repaired"]) for f in repaired] == [("stale-generation", True), ("outbox", True)]
    assert lab.vhpc("n1", "reconcile", "--check") == []
    assert "4000000" not in lab.run("n1", "virsh", "-q", "list", "--name").out

    let_go(lab, job)
    job.wait()
    assert job.output() == "up on n1\ndone\n"
    assert job.accounted() == ["COMPLETED", "0:0"]


def test_an_ending_job_keeps_its_guest_until_processes_end(lab: Lab) -> None:
    """Its lease has ended by then: no reason for a health check to take the guest from it."""
    last_words = "trap 'echo told; sleep 3; echo saved; exit 1' TERM; echo up; sleep 600 & wait"
    job = lab.submit(last_words, "-n1", "-w", "n1")
    runs(lab, job)
    lab.run("login", "scancel", str(job.id), user="alice")
    prints(job, "told")

    def gone() -> bool:
        lab.run("n1", "/usr/libexec/vhpc/healthcheck")
        return not lab.run("ctl", "squeue", "-h").out

    until(gone, "the end of the job")
    assert "saved" in said(lab, job)
    assert ours(said(lab, job)) == []


@pytest.mark.usefixtures("no_health_check")
def test_orphaned_files_and_processes_are_found_and_removed(lab: Lab) -> None:
    lab.run(
        "n1",
        "sh",
        "-c",
        "mkdir -p /run/vhpc/jobs/4000001/g0 /run/vhpc/uids;"
        " echo -n 4000001.0.0123abcd > /run/vhpc/uids/700900;"
        " VHPC_GENERATION=4000001.0.0123abcd setsid sleep 600 >/dev/null 2>&1 &"
        " setpriv --reuid=700901 --regid=65534 --clear-groups setsid sleep 601 >/dev/null 2>&1 &"
        " until [ $(pgrep -c -x -f 'sleep 60[01]') = 2 ]; do sleep 0.1; done",
    )
    found = json.loads(lab.run("n1", "vhpc", "reconcile", "--check", "--json", check=False).out)
    kinds = sorted(f["kind"] for f in found)
    assert kinds == ["orphan-folder", "orphan-process", "orphan-process", "orphan-uid"], found
    assert all(f["repaired"] for f in lab.vhpc("n1", "reconcile"))
    assert lab.vhpc("n1", "reconcile", "--check") == []
    left = lab.run("n1", "sh", "-c", "ps -eo args | grep -c '^sleep 60'", check=False).out
    assert left == "0\n"
