# SPDX-License-Identifier: Apache-2.0
"""Guests of a node on a fabric that vhpcd reports as unsafe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from controller_lab import allocation, identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.status_messages import FabricState
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState, NetworkIdentity
from vhpc_slurm.node.store import journal, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import fabric_isolation

KEY = NetworkIdentity("ib", pkey=0x1000, rails=1, vfs=1)
OPEN = FabricState(safe=False, open_since=1.0, what="port 0x1 has the keys 0xffff")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    paths = {key: str(tmp_path / key) for key in ("state", "run", "log")}
    return Layout(msgspec.convert({"paths": paths}, Config))


def a_record(job_id: int, network: NetworkIdentity = KEY) -> LeaseRecord:
    generation = Generation(job_id, 0, "0123abcd")
    record = rules.reserve(generation, request(job_id), allocation("n1"), identity(), network, 1.0)
    return replace(record, lease=replace(record.lease, state=LeaseState.READY))


def prepared(layout: Layout, record: LeaseRecord) -> None:
    """A run folder, and the uid that a guest runs as."""
    generation = record.lease.generation
    journal = Journal(layout.journals, generation)
    folder = layout.job(generation.job_id)
    journal.acquire("rundir", f"rundir:{folder}", path=str(folder))
    folder.mkdir(parents=True)
    journal.acquire("uid", "uid:712345", uid=712345)
    journal.close()


def held_kinds(layout: Layout, record: LeaseRecord) -> list[str]:
    return [entry.kind for entry in journal.read_entries(layout.journals, record.lease.generation)]


@pytest.mark.promise("fabric.open")
def test_guests_with_a_key_end_and_their_tasks_get_the_reason(layout: Layout) -> None:
    record = a_record(1)
    prepared(layout, record)
    (finding,) = fabric_isolation.findings(layout, "n1", [record], OPEN)
    assert (finding.kind, finding.what) == (
        "open-fabric",
        "job 1 has a key on a fabric that does not keep jobs apart",
    )
    assert held_kinds(layout, record) == ["rundir", "uid"], "looking changes nothing"
    finding.repair()
    assert held_kinds(layout, record) == ["rundir"], "the run folder is for the plugin and the Epilog"
    state = statefile.read_state(layout.state_file(1))
    assert (state["status"], state["kind"], state["generation"]) == ("failed", "fabric", "1.0.0123abcd")
    assert "port 0x1 has the keys 0xffff" in state["message"]
    assert list(fabric_isolation.findings(layout, "n1", [record], OPEN)) == [], "once"


@pytest.mark.promise("fabric.repair")
def test_only_guests_that_lost_their_key_for_good_end(layout: Layout) -> None:
    lost, other = a_record(1), a_record(2)
    for record in (lost, other):
        prepared(layout, record)
    state = FabricState(lost=((str(lost.lease.generation), "port 0x1 has the keys 0x7fff"),))
    (finding,) = fabric_isolation.findings(layout, "n1", [lost, other], state)
    assert (finding.kind, finding.what) == ("lost-key", "job 1 has lost its key on the fabric")
    finding.repair()
    assert held_kinds(layout, lost) == ["rundir"]
    assert held_kinds(layout, other) == ["rundir", "uid"]
    message = statefile.read_state(layout.state_file(1))["message"]
    assert message == (
        "the guests of job 1 were ended on n1: the job's partition key was removed from its port and cannot "
        "be restored: port 0x1 has the keys 0x7fff (submit the job again)"
    )


@pytest.mark.parametrize(
    ("network", "fabric"),
    [
        (NetworkIdentity(), OPEN),
        (KEY, FabricState()),
        (KEY, FabricState(open_since=1.0, what="for a moment")),
        (NetworkIdentity(), FabricState(lost=(("1.0.0123abcd", "port 0x1"),))),
        (KEY, FabricState(lost=(("1.0.ffffffff", "port 0x1"),))),
    ],
    ids=["no key", "safe", "open, and being cured", "lost by a job without one", "lost by an earlier start"],
)
def test_other_guests_are_not_ended(layout: Layout, network: NetworkIdentity, fabric: FabricState) -> None:
    record = a_record(1, network)
    prepared(layout, record)
    assert list(fabric_isolation.findings(layout, "n1", [record], fabric)) == []


def test_a_job_without_guests_on_this_node_is_ignored(layout: Layout) -> None:
    assert list(fabric_isolation.findings(layout, "n1", [a_record(1)], OPEN)) == []
