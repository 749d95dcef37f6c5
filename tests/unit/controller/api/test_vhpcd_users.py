# SPDX-License-Identifier: Apache-2.0
"""vhpcd's answers to ordinary users: their own jobs; coordinators and operators see those of others."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, ChildError, Munged, allocation, as_uid, request, stop
from vhpcd_process import Vhpcd, make

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import useraccess
from vhpc_slurm.controller.api.status_messages import DeviceWire
from vhpc_slurm.model import (
    GuestPlacement,
    HostCell,
    HostCpu,
    HostInventory,
    Lease,
    LeaseRecord,
    NodeReport,
    Stage,
    Timeline,
)

pytestmark = pytest.mark.skipif(
    not HAVE_MUNGED or os.geteuid() != 0, reason="needs munged (apt install munge), and root to become users"
)
OWNER = pwd.getpwnam("games").pw_uid
"""The user of jobs here; NOBODY is another user."""


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    tmp_path.chmod(0o755)
    found = make(tmp_path, daemon)
    says(found, "")
    yield found.start()
    if found.process is not None:
        stop(found.process)


def says(vhpcd: Vhpcd, row: str, code: int = 0) -> None:
    """Set the output of sacctmgr, which also counts how often it runs."""
    path = vhpcd.folder / "bin/sacctmgr"
    path.write_text(f"#!/bin/sh\necho \"$*\" >> {vhpcd.folder}/asked\nprintf '%s\\n' '{row}'\nexit {code}\n")
    path.chmod(0o755)


def asked(vhpcd: Vhpcd) -> list[str]:
    path = vhpcd.folder / "asked"
    return path.read_text().splitlines() if path.is_file() else []


def opened(vhpcd: Vhpcd, job_id: int, uid: int = OWNER, account: str = "physics") -> Lease:
    job = request(job_id, uid=uid, user=pwd.getpwuid(uid).pw_name, account=account)
    return vhpcd.client.open_generation(job, allocation())


def told(vhpcd: Vhpcd, lease: Lease) -> NodeReport:
    """A timeline and a report of node n1."""
    host = HostInventory("n1", "", (HostCpu(0, 0, 0, 0),), (HostCell(0, 1024, (0,), ()),), (), False, "")
    report = NodeReport(
        lease.generation, "n1", host, (GuestPlacement(0, "n1", (0,), ((0, 512),)),), ("a warning",)
    )
    vhpcd.client.report_timeline(Timeline(lease.generation, "n1", (Stage("lease", 1.0, 2.0),)), report)
    return report


def seen(vhpcd: Vhpcd, uid: int, job_id: int | None = None) -> list[int]:
    """The jobs that vhpcd lists to a user."""
    client = vhpcd.client
    found: list[LeaseRecord] = as_uid(uid, lambda: client.leases(job_id=job_id, timelines=False))
    return [record.lease.generation.job_id for record in found]


def test_a_user_sees_lease_timeline_and_report_of_a_job(vhpcd: Vhpcd) -> None:
    lease, client = opened(vhpcd, 42), vhpcd.client
    report = told(vhpcd, lease)
    (record,) = as_uid(OWNER, lambda: client.leases(job_id=42))
    assert record.lease.generation == lease.generation
    assert [line.node for line in record.timelines] == ["n1"]
    assert as_uid(OWNER, lambda: client.reports(42)) == [report]
    assert asked(vhpcd) == [], "slurmdbd need not be asked about one's own job"


@pytest.mark.promise("attack.user-view")
def test_another_user_sees_nothing_of_a_job(vhpcd: Vhpcd) -> None:
    lease, client = opened(vhpcd, 42), vhpcd.client
    told(vhpcd, lease)
    assert as_uid(NOBODY, lambda: client.leases(job_id=42)) == []
    assert as_uid(NOBODY, lambda: client.reports(42)) == []
    assert seen(vhpcd, NOBODY) == []
    timelines = wire.ListTimelines(job_id=42)
    page = as_uid(NOBODY, lambda: client._ask(timelines, wire.TimelinePage))
    assert page.timelines == ()
    assert len(asked(vhpcd)) == 1, "what slurmdbd says is remembered"


def test_a_list_has_the_users_own_jobs(vhpcd: Vhpcd) -> None:
    for job_id, uid in ((42, OWNER), (43, NOBODY), (44, OWNER)):
        opened(vhpcd, job_id, uid)
    assert seen(vhpcd, OWNER) == [42, 44]
    assert seen(vhpcd, NOBODY) == [43]
    assert seen(vhpcd, 0) == [42, 43, 44]


@pytest.mark.promise("vhpcd.user-view", "attack.user-view")
@pytest.mark.parametrize(
    ("row", "jobs"),
    [
        ("nobody|Operator|", [42, 43, 44]),
        ("nobody|Administrator|", [42, 43, 44]),
        ("nobody|None|physics,optics", [42, 44]),
        ("nobody|None|", [44]),
        ("games|Administrator|", [44]),
    ],
)
def test_operators_and_coordinators_see_more(vhpcd: Vhpcd, row: str, jobs: list[int]) -> None:
    says(vhpcd, row)
    opened(vhpcd, 42, account="physics")
    opened(vhpcd, 43, account="history")
    opened(vhpcd, 44, NOBODY, account="")
    assert seen(vhpcd, NOBODY) == jobs
    assert seen(vhpcd, NOBODY, 43) == [job for job in jobs if job == 43]


def test_without_slurmdbd_a_user_sees_the_own_jobs(vhpcd: Vhpcd) -> None:
    says(vhpcd, "nobody|Administrator|", code=1)
    opened(vhpcd, 42)
    opened(vhpcd, 43, NOBODY)
    assert seen(vhpcd, NOBODY) == [43]
    assert f"slurmdbd does not tell the rights of uid {NOBODY}" in vhpcd.log


NOT_OF_USERS: tuple[wire.Request, ...] = (
    wire.AskStatus(),
    wire.GetLease(job_id=42, restart=None, node="n1", wait_s=0.0),
    wire.GetLease(job_id=42, restart=None, node="n1", wait_s=1.0),
    wire.Ending(job_id=42, restart=None),
    wire.WithoutGuests(leader=42, offset=1),
    wire.Fence(node="n1"),
    wire.ClearKey(generations=()),
    wire.TellFabric(),
)


@pytest.mark.promise("attack.user-view")
def test_users_send_no_other_request(vhpcd: Vhpcd) -> None:
    opened(vhpcd, 42)
    client = vhpcd.client
    for body in NOT_OF_USERS:
        with pytest.raises(ChildError, match=f"refuses uid {OWNER}"):
            as_uid(OWNER, partial(client._ask, body, wire.Done))
    assert vhpcd.client.lease(42, None, "n1", 0.0).state == "ready"


@pytest.mark.promise("attack.user-view")
@pytest.mark.parametrize(
    ("row", "sees"),
    [
        ("nobody|Operator|", True),
        ("nobody|Administrator|", True),
        ("nobody|None|physics", False),
        ("games|Administrator|", False),
        ("", False),
    ],
)
def test_only_operators_see_alarms_quarantine_and_fabric(vhpcd: Vhpcd, row: str, sees: bool) -> None:
    device = DeviceWire(address="0000:3b:00.0", role="gpu", reason="stuck", since=1.0)
    vhpcd.client.report_quarantine("n1", [device])
    says(vhpcd, row)
    client = vhpcd.client
    if sees:
        found = as_uid(NOBODY, client.trouble)
        assert [one.devices for one in found.quarantine] == [(device,)]
        assert (found.fabric.safe, found.alarms) == (True, ())
    else:
        with pytest.raises(ChildError, match="only operators and administrators of Slurm"):
            as_uid(NOBODY, client.trouble)
    assert client.trouble().quarantine == client.status().quarantine, "root sees it"


def test_a_user_cannot_report_for_a_node(vhpcd: Vhpcd) -> None:
    lease, client = opened(vhpcd, 42), vhpcd.client
    line = Timeline(lease.generation, "n1", (Stage("lease", 1.0, 2.0),))
    sends: list[Callable[[], Any]] = [
        lambda: client.report_timeline(line),
        lambda: client.ready(lease.generation, "n1", "passed"),
        lambda: client.open_generation(request(43, uid=OWNER), allocation()),
    ]
    for send in sends:
        with pytest.raises(ChildError, match=f"refuses uid {OWNER}"):
            as_uid(OWNER, send)
    assert client.leases()[0].timelines == ()


@pytest.mark.promise("attack.user-view")
def test_a_user_who_asks_too_often_gets_a_reason(vhpcd: Vhpcd) -> None:
    opened(vhpcd, 42)
    client = vhpcd.client

    def flood() -> str:
        for _ in range(int(useraccess.BURST) * 3):
            try:
                client.leases(job_id=42, timelines=False)
            except Exception as err:
                return str(err)
        return ""

    assert f"uid {OWNER} asks vhpcd too often" in as_uid(OWNER, flood)
    assert seen(vhpcd, NOBODY) == [], "others are answered"
    assert seen(vhpcd, 0) == [42]


def test_long_lists_are_read_in_pages(vhpcd: Vhpcd) -> None:
    jobs = list(range(100, 131))
    for job_id in jobs:
        opened(vhpcd, job_id)
        opened(vhpcd, job_id + 1000, NOBODY)
    assert seen(vhpcd, OWNER) == jobs


def test_a_report_that_is_too_long_is_not_stored(vhpcd: Vhpcd) -> None:
    lease, client = opened(vhpcd, 42), vhpcd.client
    line = Timeline(lease.generation, "n1", (Stage("lease", 1.0, 2.0),))
    client.report_timeline(line, NodeReport(lease.generation, "n1", None, (), ("x" * (300 << 10),)))
    assert client.reports(42) == []
    assert len(client.leases(job_id=42)[0].timelines) == 1


def test_reports_of_many_nodes_are_bounded(vhpcd: Vhpcd) -> None:
    nodes = [f"n{number}" for number in range(70)]
    lease = vhpcd.client.open_generation(request(42, uid=OWNER), allocation(*nodes))
    for node in [*nodes, "n0"]:
        line = Timeline(lease.generation, node, (Stage("lease", 1.0, 2.0),))
        vhpcd.client.report_timeline(line, NodeReport(lease.generation, node, None, (), (node,)))
    found = vhpcd.client.reports(42)
    assert [report.node for report in found] == nodes[:64]
