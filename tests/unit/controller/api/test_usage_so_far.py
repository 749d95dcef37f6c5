# SPDX-License-Identifier: Apache-2.0
"""Usage of running jobs: nodes report it to vhpcd in each health check, and the final report replaces it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from controller_lab import HAVE_MUNGED, NOBODY, ChildError, Munged, allocation, as_uid, request, stop
from lease_records import record
from vhpcd_process import Vhpcd, make

from vhpc_slurm.cli import options
from vhpc_slurm.cli.jobs import ps, report, seff
from vhpc_slurm.controller.api import usage_messages
from vhpc_slurm.controller.api.sofar import UsageSoFar
from vhpc_slurm.model import (
    Figures,
    Generation,
    GuestUsage,
    LeaseState,
    NodeUsage,
    SharedIo,
    StepUsage,
    job_usage,
)

needs_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: run as root")
HOUR_US = 3600 * 1_000_000
GONE = GuestUsage(0, missing="the guest had ended")


def guest(cpu_us: int, **more: int) -> GuestUsage:
    step = StepUsage("0", Figures(cpu_us=cpu_us), 1)
    whole = Figures(cpu_us=cpu_us, peak_bytes=1 << 30)
    return GuestUsage(
        0, whole, (step,), 1 << 21, shared=SharedIo(more.get("read", 0), more.get("written", 0))
    )


# --- what vhpcd remembers ------------------------------------------------------------


def said(node: str, **used: GuestUsage) -> usage_messages.ReportUsageSoFar:
    generations = {"first": str(record(42).lease.generation), "second": str(record(43).lease.generation)}
    return usage_messages.ReportUsageSoFar(
        node=node,
        used=tuple(
            usage_messages.GenerationUsage(generation=generations[name], guests=(one,))
            for name, one in used.items()
        ),
    )


def shown(known: UsageSoFar, job_id: int = 42, **more: object) -> list[tuple[str, float, int | None]]:
    one = record(job_id)
    lease = replace(one.lease, allocation=allocation("n1", "n2", "n3"), **more)  # type: ignore[arg-type]
    found = known.of(replace(one, lease=lease, acknowledged=("n3",)))
    return [(row.node, row.age_s, row.guests[0].whole.cpu_us) for row in found]


def test_a_report_replaces_earlier_ones_of_its_node() -> None:
    now = [100.0]
    known = UsageSoFar(lambda: now[0])
    known.report(said("n2", first=guest(1), second=guest(2)))
    known.report(said("n9", first=guest(99)))  # no node of the job
    known.report(said("n3", first=guest(99)))  # it has released all that it had of it
    now[0] = 130.0
    known.report(said("n1", first=guest(10)))
    assert shown(known) == [("n1", 0.0, 10), ("n2", 30.0, 1)]
    assert shown(known, 43) == [("n2", 30.0, 2)]
    known.report(said("n2", first=guest(5)))
    assert shown(known) == [("n1", 0.0, 10), ("n2", 0.0, 5)]
    assert shown(known, 43) == []
    known.report(said("n2"))
    assert shown(known) == [("n1", 0.0, 10)]


def test_figures_of_a_silent_guest_stay_with_their_age() -> None:
    now = [100.0]
    known = UsageSoFar(lambda: now[0])
    known.report(said("n1", first=guest(7), second=GONE))
    now[0] = 160.0
    known.report(said("n1", first=GONE, second=guest(8)))
    assert shown(known) == [("n1", 60.0, 7)]
    assert shown(known, 43) == [("n1", 0.0, 8)]


def test_shared_folders_of_an_old_image_are_still_counted() -> None:
    """Its agent knows no figures, but the node counts what it moves."""
    known = UsageSoFar(lambda: 1.0)
    old = "the agent of the image is too old to measure: rebuild the image"
    for read in (1, 2):
        known.report(said("n1", first=GuestUsage(0, missing=old, shared=SharedIo(read, 0))))
    (row,) = known.of(record(42))
    assert row.guests[0].shared == SharedIo(2, 0)
    total = job_usage([NodeUsage(record(42).lease.generation, "n1", row.guests)])
    assert (total.whole, total.shared) == (Figures(), SharedIo(2, 0))


def test_a_figure_that_one_guest_lacks_is_unknown_for_all() -> None:
    generation = record(42).lease.generation

    def shared(*guests: GuestUsage) -> SharedIo | None:
        return job_usage([NodeUsage(generation, "n1", guests)]).shared

    first, second = guest(1, read=3, written=4), guest(1, read=10, written=20)
    assert shared(first, second) == SharedIo(13, 24)
    assert shared(first, replace(second, shared=None)) is None
    assert shared(first, GONE) == SharedIo(3, 4)
    assert shared(GONE) is None


def test_the_end_of_a_job_removes_its_earlier_reports() -> None:
    known = UsageSoFar(lambda: 1.0)
    known.report(said("n1", first=guest(7), second=guest(8)))
    known.ended(str(record(42).lease.generation), "n1")
    known.ended(str(record(42).lease.generation), "n2")
    assert shown(known) == []
    assert shown(known, 43) == [("n1", 0.0, 8)]
    assert shown(known, 43, state=LeaseState.RELEASED) == []


# --- vhpcd ---------------------------------------------------------------------------


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon).start()
    yield found
    if found.process is not None:
        stop(found.process)


def running(vhpcd: Vhpcd, job_id: int = 42, *nodes: str, **of: Any) -> Generation:
    """A job that its nodes have taken."""
    names = nodes or ("n1", "n2")
    lease = vhpcd.client.open_generation(request(job_id, **of), allocation(*names))
    for node in names[:2]:
        vhpcd.client.lease(job_id, 0, node, 5.0)
    return lease.generation


def of_nodes(vhpcd: Vhpcd, job_id: int = 42) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """CPU time by node: of the end, and so far."""
    page, ended = vhpcd.client.usage(job_id, so_far=True)
    return (
        {one.node: one.guests[0].whole.cpu_us for one in ended},
        {one.node: one.guests[0].whole.cpu_us for one in page.so_far},
    )


@pytest.mark.promise("usage.running")
@needs_munged
def test_the_final_report_of_a_node_replaces_its_earlier_ones(vhpcd: Vhpcd) -> None:
    client, generation = vhpcd.client, running(vhpcd)
    for node, cpu_us in (("n1", 1), ("n2", 10)):
        client.report_usage_so_far(node, [NodeUsage(generation, node, (guest(cpu_us),))])
    assert of_nodes(vhpcd) == ({}, {"n1": 1, "n2": 10})
    assert client.usage(42)[1] == (), "the last node's Epilog takes ends only"
    assert client.usage(42)[0].so_far == ()
    client.report_usage(NodeUsage(generation, "n1", (guest(5),)))
    assert of_nodes(vhpcd) == ({"n1": 5}, {"n2": 10})
    # a health check that began before the Epilog
    client.report_usage_so_far("n1", [NodeUsage(generation, "n1", (guest(2),))])
    assert of_nodes(vhpcd) == ({"n1": 5}, {"n2": 10})
    (used,) = client.history(live=True).used
    assert (used.cpu_us, used.so_far_s is not None) == (15, True)
    client.report_usage(NodeUsage(generation, "n2", (guest(20),)))
    assert of_nodes(vhpcd) == ({"n1": 5, "n2": 20}, {})
    (used,) = client.history().used
    assert (used.cpu_us, used.so_far_s) == (25, None)


@needs_munged
def test_nodes_of_both_kinds_are_read_in_pages(vhpcd: Vhpcd) -> None:
    names = [f"n{number:03}" for number in range(230)]
    generation = running(vhpcd, 42, *names)
    for number, name in enumerate(names):
        one = NodeUsage(generation, name, (guest(number),))
        if number % 3:
            vhpcd.client.report_usage_so_far(name, [one])
        else:
            vhpcd.client.report_usage(one)
    ended, so_far = of_nodes(vhpcd)
    assert ended == {name: number for number, name in enumerate(names) if number % 3 == 0}
    assert so_far == {name: number for number, name in enumerate(names) if number % 3}
    assert list(so_far) == sorted(so_far)


@needs_munged
def test_a_restarted_vhpcd_waits_for_the_next_health_check(vhpcd: Vhpcd) -> None:
    generation = running(vhpcd)
    one = NodeUsage(generation, "n1", (guest(1),))
    vhpcd.client.report_usage_so_far("n1", [one])
    vhpcd.kill()
    vhpcd.start()
    assert of_nodes(vhpcd) == ({}, {})
    vhpcd.client.report_usage_so_far("n1", [one])
    assert of_nodes(vhpcd) == ({}, {"n1": 1})


@needs_munged
def test_commands_say_that_a_job_still_runs(
    vhpcd: Vhpcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "config", lambda: vhpcd.config)
    generation = running(vhpcd)
    running(vhpcd, 43)
    for node, written in (("n1", 1 << 20), ("n2", 3 << 20)):
        used = NodeUsage(generation, node, (guest(HOUR_US, written=written),))
        vhpcd.client.report_usage_so_far(node, [used])

    assert ps.ps() == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert " 02:00:00.00  2.0 GiB  so far, " in first
    assert " ago" in first
    assert "so far" not in second
    assert ps.ps(as_json=True) == 0
    rows = {row["job"]: row["usage"] for row in json.loads(capsys.readouterr().out)}
    assert rows[43] is None
    assert rows[42]["cpu_us"] == 2 * HOUR_US
    assert rows[42]["so_far"]["age_s"] >= 0

    assert seff.seff(42) == 0
    text = capsys.readouterr().out
    assert "Figures              so far, " in text
    assert "02:00:00.00 (user -, system -)" in text
    assert "read 0 B, written 4.0 MiB" in " ".join(text.split())
    assert seff.seff(42, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["nodes_reported"], document["total"]["cpu_us"]) == (0, 2 * HOUR_US)
    assert document["so_far"]["age_s"] >= 0
    assert document["shared_folders"] == {"read_bytes": 0, "written_bytes": 4 << 20}
    by_node = {one["node"]: one["shared_folders"]["written_bytes"] for one in document["guests"]}
    assert by_node == {"n1": 1 << 20, "n2": 3 << 20}
    assert all(one["so_far"]["age_s"] >= 0 for one in document["guests"])

    assert report.report(42, as_json=True) == 0
    usage = json.loads(capsys.readouterr().out)["usage"]
    assert (usage["total"]["cpu_us"], usage["so_far"] is not None) == (2 * HOUR_US, True)


@root
@needs_munged
def test_users_see_their_own_running_jobs_only(vhpcd: Vhpcd) -> None:
    mine, other = running(vhpcd, 42, uid=NOBODY, user="nobody"), running(vhpcd, 43)
    both = [NodeUsage(one, "n1", (guest(5),)) for one in (mine, other)]
    vhpcd.client.report_usage_so_far("n1", both)

    def look() -> list[tuple[str, int | None]]:
        return [(one.generation, one.cpu_us) for one in vhpcd.client.history(live=True).used]

    assert sorted(look()) == [(str(mine), 5), (str(other), 5)]
    assert as_uid(NOBODY, look) == [(str(mine), 5)]
    page = as_uid(NOBODY, lambda: [one.node for one in vhpcd.client.usage(42, so_far=True)[0].so_far])
    assert page == ["n1"]
    with pytest.raises(ChildError, match="vhpcd has no job 43 of yours"):
        as_uid(NOBODY, partial(vhpcd.client.usage, 43, so_far=True))
    with pytest.raises(ChildError, match=f"refuses uid {NOBODY}"):
        as_uid(NOBODY, lambda: vhpcd.client.report_usage_so_far("n1", both))
