# SPDX-License-Identifier: Apache-2.0
"""PrivateData=jobs: vhpcd's user sees all as an operator, and ends nothing when he is one no more.

slurmctld shows other users an empty list and says nothing of it.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

import pytest
from cluster import Lab
from injection import WAITING, configured, let_go, runs, settled, slurm_conf, until

pytestmark = pytest.mark.lab

LOG = "/var/log/vlab/vhpcd.log"
COMPLAINT = "hides jobs of other users from vhpc"
GRACE_S = 30  # so old is a lease that a missing job ends
LISTED = textwrap.dedent("""
    from vhpc_slurm.config import load
    from vhpc_slurm.errors import VhpcError
    from vhpc_slurm.slurm import connect

    try:
        print(*(job.job_id for job in connect(load()).jobs()))
    except VhpcError as err:
        print(err.line())
""")


def level(lab: Lab, wanted: str) -> None:
    """Make vhpcd's user an operator, or no more, and wait until slurmctld knows."""
    lab.run("ctl", "sacctmgr", "-i", "modify", "user", "vhpc", "set", f"adminlevel={wanted}")
    show = ("scontrol", "show", "assoc_mgr", "users=vhpc", "flags=users")
    until(lambda: f"AdminLevel={wanted}" in lab.run("ctl", *show).out, f"vhpc to be {wanted}")


@pytest.fixture
def private(lab: Lab) -> Iterator[None]:
    """A cluster that hides jobs, with a vhpcd that looks every two seconds."""
    often = configured(lab, "ctl", "controller", "reconcile_interval_s = 2")
    try:
        with slurm_conf(lab, "$a PrivateData=accounts,jobs,users"), often:
            lab.service("ctl", "restart", "vhpcd")
            hidden = ("sh", "-c", "scontrol show config | grep ^PrivateData")
            until(lambda: "jobs" in lab.run("ctl", *hidden).out, "PrivateData")
            yield
            level(lab, "Operator")
    finally:
        lab.service("ctl", "restart", "vhpcd")


def listed(lab: Lab, user: str) -> str:
    """All jobs as vhpc's port shows them to a user, or why it does not."""
    command = ("runuser", "-u", user, "--", "/opt/vhpc/bin/python", "-")
    return lab.run("ctl", *command, stdin=LISTED).out.strip()


def complaints(lab: Lab) -> int:
    """How often vhpcd has looked and was shown nothing."""
    return int(lab.run("ctl", "grep", "-c", COMPLAINT, LOG, check=False).out or 0)


@pytest.mark.promise("slurm.private-data")
@pytest.mark.usefixtures("private")
def test_an_operator_sees_hidden_jobs_and_others_end_no_lease(lab: Lab) -> None:
    job = lab.submit(WAITING, "-w", "n1")
    runs(lab, job)
    leased = time.monotonic()
    native = lab.run("ctl", "runuser", "-u", "bob", "--", "squeue", "-h", "-a")
    assert (native.code, native.out) == (0, "")  # what a port must not believe
    assert listed(lab, "vhpc") == str(job.id)
    assert "PrivateData in slurm.conf hides jobs of other users from bob" in listed(lab, "bob")

    level(lab, "None")
    assert COMPLAINT in listed(lab, "vhpc")
    until(lambda: time.monotonic() > leased + GRACE_S, "the lease to be old enough to be ended", 2 * GRACE_S)
    looks = complaints(lab) + 2  # the first of them may have begun before
    until(lambda: complaints(lab) >= looks, "vhpcd to look")
    assert lab.leases() == [f"{lease.split()[0]} ready" for lease in lab.leases()]
    assert lab.leases()
    let_go(lab, job)
    assert job.wait() == "COMPLETED"
    assert job.output() == "up on n1\ndone\n"
    settled(lab)
