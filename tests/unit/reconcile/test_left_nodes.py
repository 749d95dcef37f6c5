# SPDX-License-Identifier: Apache-2.0
"""Nodes that Slurm takes from a running job: told from all that only look so, and what stays of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_lab import member_lease
from controller_lab import allocation
from follower_rig import member
from network_lab import (
    TEST,
    VNI,
    Host,
    Pair,
    build,
    first_node,
    injected,
    inside,
    lease_of,
    ours,
    real_cluster,
    real_pair,
    second_node,
    usable,
)

from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState, SegmentPart
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.network import segment, tools
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store import joblock, membership, outbox
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import audit, ended_jobs, left_nodes
from vhpc_slurm.slurm.scontrol import Scontrol

DATA = Path(__file__).parents[2] / "data/scontrol/24.11/single.txt"
GENERATION = Generation(1, 0, "0123abcd")  # of the job in that file, which runs on n1
SCONTROL = '#!/bin/sh\necho "$*" >> "$(dirname "$0")/calls"; cat "$(dirname "$0")/job"\n'

cluster = real_cluster
n1 = first_node
n2 = second_node
pair = real_pair
needs_network = pytest.mark.skipif(bool(usable()), reason=usable())


class Node:
    """A node with the journal of a job, and a slurmctld whose answer can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = {key: str(folder / key) for key in ("state", "run", "log")}
        self.layout = Layout(msgspec.convert({"paths": paths}, Config))
        (folder / "scontrol").write_text(SCONTROL)
        (folder / "scontrol").chmod(0o755)
        self.slurm = Scontrol(str(folder))
        self.show()
        self.journal = Journal(self.layout.journals, GENERATION)

    def show(self, old: str = "", new: str = "") -> None:
        text = DATA.read_text()
        assert old in text
        (self.folder / "job").write_text(text.replace(old, new) if old else text)

    def asked(self) -> int:
        path = self.folder / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def has_left(self, node: str) -> bool:
        return left_nodes.has_left(self.slurm, node, GENERATION)

    def stale(self, name: str, live: Generation | None = GENERATION) -> list[Any]:
        leases = {GENERATION.job_id: live} if live else {}
        found = audit.audit(self.layout, name, leases, left=lambda _: self.has_left(name))
        return [one for one in found if one.kind == "stale-generation"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.journal.close()


def test_nodes_of_a_job_are_asked_from_slurm(node: Node) -> None:
    assert not node.has_left("n1")
    assert node.has_left("n2")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("JobState=RUNNING", "JobState=COMPLETING"),
        ("JobState=RUNNING", "JobState=PENDING"),
        ("Restarts=0", "Restarts=1"),
        ("JobId=1 ", "JobId=2 "),
        ("UserId=", "NoUser="),
    ],
)
def test_a_job_that_does_not_run_is_left_to_its_epilog(node: Node, old: str, new: str) -> None:
    node.show(old, new)
    assert not node.has_left("n2")


def test_without_slurmctld_nothing_has_left(node: Node) -> None:
    (node.folder / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert not node.has_left("n2")


@pytest.mark.promise("resize.killed")
def test_a_node_that_left_is_cleared_and_acknowledged(node: Node) -> None:
    assert node.stale("n1") == []
    (finding,) = node.stale("n2")
    assert "which has left the job" in finding.what
    finding.repair()
    assert not node.journal.path.exists()
    assert [path.stem for path in outbox.pending(node.layout.outbox)] == [str(GENERATION)]


@pytest.mark.promise("resize.killed")
def test_an_epilog_that_was_killed_is_known_by_its_tombstone(node: Node) -> None:
    joblock.write_tombstone(node.layout, GENERATION)
    with joblock.held(node.layout, GENERATION.job_id, timeout_s=1.0):
        assert node.stale("n1") == [], "it still runs"
    assert len(node.stale("n1")) == 1
    assert node.asked() == 0


@pytest.mark.promise("resize.killed")
def test_the_next_job_waits_for_the_epilog_and_clears_the_rest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = [type("Reservation", (), {"generation": str(GENERATION)})]
    monkeypatch.setattr(reservations, "live", lambda *_, **__: reserved)
    monkeypatch.setattr(ended_jobs, "has_ended", lambda *_: False)
    other = Generation(2, 0, "0123abcd")
    assert not ended_jobs.clear(node.layout, node.slurm, "n1", other), "the job has this node"
    assert node.journal.path.exists()
    joblock.write_tombstone(node.layout, GENERATION)
    busy = iter([True, True])

    def epilog(*_: object) -> bool:
        if next(busy, False):
            return True
        node.journal.remove()
        return False

    monkeypatch.setattr(joblock, "busy", epilog)
    assert ended_jobs.clear(node.layout, node.slurm, "n2", other), "its Epilog has made room"
    assert node.asked() == 1


def test_the_next_job_clears_a_node_without_an_epilog(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = [type("Reservation", (), {"generation": str(GENERATION)})]
    monkeypatch.setattr(reservations, "live", lambda *_, **__: reserved)
    monkeypatch.setattr(ended_jobs, "has_ended", lambda *_: False)
    assert ended_jobs.clear(node.layout, node.slurm, "n2", Generation(2, 0, "0123abcd"))
    assert not node.journal.path.exists()


def test_only_running_jobs_with_networks_have_left_nodes(node: Node) -> None:
    lease = replace(lease_of(1, VNI, "n1", "n2", "n3"), generation=GENERATION)
    found = LeaseRecord(lease, 0.0, 0.0, ("n2",))

    def told(record: LeaseRecord, name: str = "n1") -> list[str]:
        return [one.what for one in left_nodes.findings(node.layout, name, [record], [record])]

    assert told(found) == [], "no network was made here"
    node.journal.acquire(
        "network", f"network:{VNI}", vni=VNI, port=1, local="192.0.2.1", peers=["192.0.2.2", "192.0.2.3"]
    )
    assert told(found) == ["the network of job 1 contains n2, which Slurm has taken from the job"]
    assert told(replace(found, acknowledged=())) == []
    assert told(replace(found, acknowledged=("n1",))) == []
    assert told(replace(found, lease=replace(lease, state=LeaseState.ENDING))) == []
    assert told(replace(found, lease=replace(lease, segment=None))) == []
    node.journal.update(f"network:{VNI}", left=["n2"])
    assert told(found) == []
    assert len(told(replace(found, acknowledged=("n2", "n3")))) == 1


def test_a_component_that_ends_leaves_the_common_network(node: Node) -> None:
    lease = replace(lease_of(1, VNI, "n1"), generation=GENERATION)
    other = replace(lease, generation=Generation(2, 0, "fedcba98"), allocation=allocation("n2", "n3"))
    parts = tuple(SegmentPart.of(one.generation, one.allocation, 1) for one in (lease, other))
    assert lease.segment is not None
    segment_ = replace(lease.segment, underlay=("192.0.2.1", "192.0.2.2", "192.0.2.3"), parts=parts)
    own, two = (LeaseRecord(replace(one, segment=segment_), 0.0, 0.0, ()) for one in (lease, other))
    node.journal.acquire(
        "network", f"network:{VNI}", vni=VNI, port=1, local="192.0.2.1", peers=["192.0.2.2", "192.0.2.3"]
    )

    def left(*known: LeaseRecord) -> list[str]:
        found = left_nodes.findings(node.layout, "n1", [own], known)
        return [one.what.removeprefix("the network of job 1 contains ").split(", which")[0] for one in found]

    assert left(own, two) == []
    assert left(own, replace(two, acknowledged=("n3",))) == ["n3"]
    assert left(own) == ["n2, n3"], "it is released"


# --- the segment, between real network namespaces -------------------------------------------------


@needs_network
def test_the_remaining_node_forgets_the_one_that_left(pair: Pair, n1: Host, n2: Host) -> None:
    pair.one.send(pair.two.mac, TEST, b"a frame of the test" + b"." * 40)
    assert pair.two.heard(ours)
    n2.send(backwards(pair), VNI, n1.address)
    assert pair.one.heard(ours), "root of a node of the job can send"
    for _ in range(2):
        with inside(n1.namespace):
            segment.forget(pair.lease, "n1", ("n2",))
    vxlan = f"vhpcx{VNI}"
    assert pair.two.mac.hex(":") not in n1.run("bridge", "fdb", "show", "dev", vxlan)
    assert n1.run("ip", "neighbour", "show", "dev", f"vhpcb{VNI}") == ""
    n2.send(backwards(pair), VNI, n1.address)
    assert pair.one.heard(ours, 0.4) == []


@pytest.mark.promise("resize.clean")
@needs_network
def test_guests_of_other_nodes_keep_their_entries(n1: Host) -> None:
    lease = lease_of(1, VNI, "n1", "n2", "n3", each=2)
    build(n1, lease)
    with inside(n1.namespace):
        segment.forget(lease, "n1", ("n2",))
    entries = n1.run("bridge", "fdb", "show", "dev", f"vhpcx{VNI}")
    assert (entries.count("dst 192.0.2.2"), entries.count("dst 192.0.2.3")) == (0, 2)
    assert len(n1.run("ip", "neighbour", "show", "dev", f"vhpcb{VNI}").splitlines()) == 4
    rules = n1.run("nft", "list", "ruleset")
    assert rules.count("elements = { 192.0.2.3 }") == 2, "the table and its copy"
    assert "192.0.2.2" not in rules


@pytest.mark.promise("attack.vxlan-left")
@needs_network
def test_users_of_a_node_that_left_cannot_inject_frames(pair: Pair, n1: Host, n2: Host) -> None:
    """The other node accepts the address until it has learnt that the node left."""
    pair.two.close()
    with inside(n2.namespace):
        segment.release(pair.lease.generation, VNI)
    n2.send(backwards(pair), VNI, n1.address, uid=65534)
    assert pair.one.heard(ours, 0.4) == []
    n2.run("nft", "delete", "table", "inet", "vhpc-port")
    n2.send(backwards(pair), VNI, n1.address, uid=65534)
    assert pair.one.heard(ours), "without the node's own table it arrives"
    pair.two.fd = os.open("/dev/null", os.O_RDONLY)


def backwards(pair: Pair) -> bytes:
    """A frame for the first guest that looks as if the second had sent it."""
    frame = injected(pair)
    return frame[6:12] + frame[:6] + frame[12:]


def test_a_silent_guest_gets_the_change_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is written last."""
    lease = replace(lease_of(1, VNI, "n1", "n2"), generation=GENERATION)
    node.journal.acquire("network", f"network:{VNI}", vni=VNI, port=1, local="192.0.2.1", peers=["192.0.2.2"])
    name = f"vhpc-1-0-{GENERATION.nonce}-g0"
    node.journal.acquire("domain", f"domain:{name}", name=name, uid=1)
    forgotten: list[object] = []
    monkeypatch.setattr(segment, "forget", lambda *words: forgotten.append(words[1:]))
    monkeypatch.setattr(tools, "query", lambda *_: [{"mtu": 1450}])
    monkeypatch.setattr(left_nodes, "CONNECT_S", 0.1)
    record = LeaseRecord(lease, 0.0, 0.0, ("n2",))
    for _ in range(2):
        (finding,) = left_nodes.findings(node.layout, "n1", [record], [record])
        with pytest.raises(NodeError, match="vhpc-shim"):
            finding.repair()
    assert forgotten == [("n1", ("n2",), ())] * 2


def test_other_members_of_the_cluster_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = replace(member_lease(1, VNI, "n1", "n2", first=0), generation=GENERATION)
    node.journal.acquire("network", f"network:{VNI}", vni=VNI, port=1, local="192.0.2.1", peers=["192.0.2.2"])
    node.layout.job(1).mkdir(parents=True)
    others = (member(7, "n1", first=2), member(8, "n2", "n3", first=3))
    membership.write(node.layout, 1, replace(follower.of(lease), version=5, others=others))
    forgotten: list[object] = []
    monkeypatch.setattr(segment, "forget", lambda *words: forgotten.append(words[1:]))
    record = LeaseRecord(lease, 0.0, 0.0, ("n2",))
    (finding,) = left_nodes.findings(node.layout, "n1", [record], [record])
    finding.repair()
    assert forgotten == [("n1", ("n2",), ("192.0.2.2", "192.0.2.3"))]
