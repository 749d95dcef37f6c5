# SPDX-License-Identifier: Apache-2.0
"""Prolog starts a follower before the ready barrier in jobs of a cluster, and in no other job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boot_rig import GENERATION, boot_layout
from cluster_lab import member_lease
from prolog_rig import Node, prolog_node
from stepd import needs_root

from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.hooks import barrier
from vhpc_slurm.model import ClusterPlace
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource.process import Process, ProcessData
from vhpc_slurm.node.store import joblock, membership
from vhpc_slurm.node.store.journal import read_entries

layout, node = boot_layout, prolog_node
pytestmark = needs_root
SLEEPS = ("-c", "import time; time.sleep(60)")


@pytest.fixture
def member(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A job of a cluster, with a program that does nothing in the follower's place."""
    found = member_lease(42, 5042, "n1", first=4).segment
    node.lease = replace(node.lease, segment=found, cluster=ClusterPlace(7, "mesh"))
    monkeypatch.setattr(follower.FOLLOWER, "program", SLEEPS)
    monkeypatch.setattr(barrier, "wait", lambda *_: None)
    return node


def entries(node: Node) -> list[ProcessData]:
    held = read_entries(node.layout.journals, GENERATION)
    return [entry.read(ProcessData) for entry in held if entry.kind == Process.kind]


def test_a_member_has_a_follower_when_its_barrier_begins(
    member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ProcessData] = []
    monkeypatch.setattr(barrier, "wait", lambda *_: seen.extend(entries(member)))
    assert member.run() == 0
    assert member.state["status"] == "ready"
    (data,) = seen
    assert (data.role, entries(member)) == ("follower", [data])
    assert data.ref is not None
    assert process.alive(data.ref)
    known = membership.read(member.layout, 42)
    assert known is not None
    assert (known.name, known.own.segment, known.version) == ("mesh", member.lease.segment, 0)
    process.end(data.ref)


def test_other_jobs_have_no_follower(member: Node) -> None:
    member.lease = replace(member.lease, cluster=None)
    assert member.run() == 0
    assert entries(member) == []
    assert membership.read(member.layout, 42) is None


def test_a_start_that_fails_ends_the_follower(member: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProcessData] = []

    def fail(*_: object) -> None:
        seen.extend(entries(member))
        raise FabricError("node n2 has not taken the job into its network")

    monkeypatch.setattr(barrier, "wait", fail)
    assert member.run() == 0
    assert member.requeued == [42]
    ref = seen[0].ref
    assert ref is not None
    assert not process.alive(ref)


def test_a_node_that_cannot_start_a_follower_is_at_fault(
    member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NodeError("cannot start it", "no memory")

    monkeypatch.setattr(process, "spawn", refuse)
    with pytest.raises(NodeError, match="cannot start it"):
        member.run()
    assert member.drained == ["cannot start it: no memory"]
    assert member.held == []


def test_a_job_that_has_ended_gets_no_follower(member: Node) -> None:
    joblock.write_tombstone(member.layout, GENERATION)
    assert member.run() == 0
    assert entries(member) == []
