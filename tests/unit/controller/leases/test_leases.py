# SPDX-License-Identifier: Apache-2.0
"""The life of leases: rules, service, and any order of events."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from controller_lab import Alone, allocation, identity, manifest, request
from hypothesis import settings
from lease_machine import AnyOrder
from lease_records import LEASE

from pace import examples
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.wire_types import (
    LeaseWire,
    pack_allocation,
    unpack_allocation,
)
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.backend import KeyPolicy, NoNetwork, Proof, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import (
    Allocation,
    Generation,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
)

UNKNOWN = UserError("image nix:latest is unknown", "no such name", "see: vhpc image ls")


class BrokenNetwork(NoNetwork):
    """A fabric that can be told to fail; counts what it was asked."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise FabricError(f"{name} failed")

    plan = KeyPolicy(KeyPool(0x1000, 0x1FFF)).plan

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        self._call("apply")

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        self._call("verify")
        return {generation: Proof(snapshot.epoch) for generation in generations}

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        self._call("strip")
        return {generation: Proof(snapshot.epoch) for generation in generations}


@pytest.fixture
def network() -> BrokenNetwork:
    return BrokenNetwork()


@pytest.fixture
def service(network: BrokenNetwork) -> Alone:
    return Alone(SqliteStore(":memory:"), network, reserve_mib=256, clock=lambda: 1000.0)


def opened(service: Alone, **other: Any) -> LeaseRecord:
    return service.open(request(**other), allocation(), identity())


def state(service: Alone, record: LeaseRecord) -> LeaseState:
    found = service.store.get(record.lease.generation)
    assert found is not None
    return found.lease.state


def acknowledge(service: Alone, record: LeaseRecord, node: str, clean: bool = True, note: str = "") -> None:
    service.acknowledge(record.lease.generation, node, clean=clean, note=note, timeline=None)


# --- service ---------------------------------------------------------------------


def test_the_same_request_has_the_same_lease(service: Alone) -> None:
    first = opened(service)
    assert first.lease.state is LeaseState.READY
    assert opened(service).lease == first.lease
    assert opened(service, job_name="renamed").lease == first.lease


def test_the_image_is_resolved_once(service: Alone) -> None:
    first = opened(service)
    newer = replace(identity(), digest="sha256:" + "b" * 64)
    assert service.open(request(), allocation(), newer).lease.image == first.lease.image
    assert service.open(request(), allocation(), UNKNOWN).lease.image == first.lease.image


@pytest.mark.parametrize(
    ("job", "nodes"),
    [
        (request(), allocation("n1")),
        (request(), allocation(cpu_ids=(2, 3))),
        (request(restart=1), allocation()),
        (request(uid=2002, user="bob"), allocation()),
    ],
    ids=["nodes", "cores", "restart", "user"],
)
def test_anything_else_is_a_new_generation_and_ends_the_old(
    service: Alone, job: Any, nodes: Allocation
) -> None:
    first = opened(service)
    service.take(42, 0, "n1")
    second = service.open(job, nodes, identity())
    assert second.lease.generation.nonce != first.lease.generation.nonce
    assert state(service, first) is LeaseState.ENDING
    acknowledge(service, first, "n1")
    assert state(service, first) is LeaseState.RELEASED
    assert state(service, second) is LeaseState.READY


def test_a_cleared_lease_is_not_given_to_a_restarted_job(
    service: Alone,
) -> None:
    """A slurmctld that was killed forgets a start that it had not saved; the nodes have aborted it."""
    first = opened(service)
    service.take(42, 0, "n1")
    acknowledge(service, first, "n1")
    second = opened(service)
    assert second.lease.generation != first.lease.generation
    assert state(service, first) is LeaseState.RELEASED
    assert state(service, second) is LeaseState.READY


def test_a_late_request_of_an_earlier_generation_is_ignored(service: Alone) -> None:
    second = opened(service, restart=1)
    with pytest.raises(FabricError, match="restarted 1 times"):
        opened(service, restart=0)
    assert state(service, second) is LeaseState.READY


def test_a_reused_job_id_gets_a_lease(service: Alone) -> None:
    old = opened(service, restart=3)
    service.end(42, None)
    assert state(service, old) is LeaseState.RELEASED
    assert opened(service, restart=0).lease.state is LeaseState.READY


def test_an_error_of_the_user_is_a_refused_lease_with_its_line(
    service: Alone, network: BrokenNetwork
) -> None:
    record = service.open(request(), allocation(), UNKNOWN)
    assert record.lease.state is LeaseState.REFUSED
    assert record.lease.refusal == "image nix:latest is unknown: no such name (see: vhpc image ls)"
    assert service.open(request(), allocation(), identity()).lease == record.lease, "decided once"
    small = service.open(request(43), allocation(memory_mib=300), identity())
    assert small.lease.state is LeaseState.REFUSED
    assert "needs 256 MiB" in small.lease.refusal
    assert network.calls == [], "a refused lease holds nothing of the network"
    taken = service.take(42, 0, "n1")
    assert taken is not None
    assert taken.lease.refusal == record.lease.refusal


def test_a_failing_fabric_leaves_the_lease_reserved_for_retry(service: Alone, network: BrokenNetwork) -> None:
    for stage in ("apply", "verify"):
        network.fails = {stage}
        with pytest.raises(FabricError, match=f"{stage} failed"):
            opened(service)
        assert service.take(42, 0, "n1") is None, "nothing is handed out before READY"
    (reserved,) = service.store.live()
    network.fails = set()
    record = opened(service)
    assert record.lease.generation == reserved.lease.generation
    assert record.lease.state is LeaseState.READY


def test_a_fabric_that_keeps_the_keys_keeps_the_lease(service: Alone, network: BrokenNetwork) -> None:
    record = opened(service)
    network.fails = {"strip"}
    service.end(42, 0)
    assert state(service, record) is LeaseState.ENDING
    network.fails = set()
    service.settle()
    assert state(service, record) is LeaseState.RELEASED


def test_only_nodes_that_took_the_lease_hold_it_back(service: Alone) -> None:
    record = opened(service)
    assert service.take(42, 0, "n2") is not None
    service.look(42, 0)
    service.end(42, 0)
    assert state(service, record) is LeaseState.ENDING
    acknowledge(service, record, "n1")
    assert state(service, record) is LeaseState.ENDING
    acknowledge(service, record, "n2", clean=False, note="domain will not die")
    found = service.store.get(record.lease.generation)
    assert found is not None
    assert found.unclean == (("n2", "domain will not die"),)
    assert state(service, record) is LeaseState.ENDING
    acknowledge(service, record, "n2")
    assert state(service, record) is LeaseState.RELEASED


def test_acknowledgements_before_the_end_count_at_the_end(service: Alone) -> None:
    record = opened(service)
    for node in ("n1", "n2"):
        service.take(42, None, node)
        acknowledge(service, record, node)
    assert state(service, record) is LeaseState.READY
    service.end(42, 0)
    assert state(service, record) is LeaseState.RELEASED


def test_an_alarm_is_kept_for_a_week_once_and_outlives_vhpcd(
    service: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    record = opened(service)
    for _ in range(2):  # the node's outbox may send it twice
        acknowledge(service, record, "n1", note="alarm: odd XML")
    acknowledge(service, record, "n2", note="cleared by Prolog")
    (alarm,) = service.alarms()
    assert (alarm.job_id, alarm.node, alarm.time, alarm.what) == (42, "n1", 1000.0, "odd XML")
    assert [entry.levelname for entry in caplog.records if "odd XML" in entry.message] == ["ERROR", "ERROR"]
    later = Alone(service.store, BrokenNetwork(), reserve_mib=256, clock=lambda: 1000.0 + 6 * 86400)
    assert later.alarms() == (alarm,)
    week = Alone(service.store, BrokenNetwork(), reserve_mib=256, clock=lambda: 1000.0 + 7 * 86400)
    assert week.alarms() == ()


def test_a_node_that_takes_a_lease_again_acknowledges_again(service: Alone) -> None:
    record = opened(service)
    service.take(42, 0, "n1")
    acknowledge(service, record, "n1")
    service.take(42, 0, "n1")
    service.end(42, 0)
    assert state(service, record) is LeaseState.ENDING


def test_a_lease_that_is_over_is_not_handed_out(service: Alone) -> None:
    opened(service)
    service.end(42, 0)
    with pytest.raises(FabricError, match="has ended"):
        service.take(42, 0, "n1")
    assert service.take(42, 1, "n1") is None, "the next incarnation is waited for"
    opened(service, restart=1)
    with pytest.raises(FabricError, match="was restarted"):
        service.take(42, 0, "n1")


def test_a_node_without_a_part_gets_nothing(service: Alone) -> None:
    opened(service)
    with pytest.raises(FabricError, match="no part on node n9"):
        service.take(42, 0, "n9")


def test_requests_for_unknown_jobs_succeed_if_a_node_cannot_help(service: Alone) -> None:
    service.end(999, None)
    service.acknowledge(Generation(999, 0, "0" * 8), "n1", clean=True, note="", timeline=None)
    assert service.look(999, None) is None


def test_the_end_of_one_incarnation_leaves_a_later_one_alone(service: Alone) -> None:
    record = opened(service, restart=2)
    service.end(42, 1)
    assert state(service, record) is LeaseState.READY


@pytest.mark.parametrize(
    ("job", "nodes", "why"),
    [
        (request(0), allocation(), "job id"),
        (request(), Allocation(()), "no nodes"),
        (request(), allocation("n1", "n1"), "twice"),
        (request(), allocation("n1/../x"), "node name is invalid"),
        (request(), allocation(cpu_ids=()), "without CPUs"),
    ],
)
def test_nonsense_gets_no_lease(service: Alone, job: Any, nodes: Allocation, why: str) -> None:
    with pytest.raises(FabricError, match=why):
        service.open(job, nodes, identity())
    assert service.store.live() == ()


AnyOrder.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


# --- wire ------------------------------------------------------------------------


def test_a_thousand_equal_nodes_are_sent_as_one_layout() -> None:
    names = tuple(f"n{number}" for number in range(1000, 0, -1))
    nodes = allocation(*names, cpu_ids=tuple(range(128)))
    packed = pack_allocation(nodes)
    assert [group.cpu_ids for group in packed] == ["0-127"]
    assert unpack_allocation(packed) == nodes


def test_a_lease_survives_the_wire() -> None:
    import msgspec

    lease = replace(
        LEASE, refusal="nö", network=NetworkIdentity("ib", pkey=5, addresses=(("n1", "10.0.0.1"),))
    )
    raw = msgspec.json.encode(LeaseWire.pack(lease))
    assert msgspec.json.decode(raw, type=LeaseWire).unpack() == lease
    assert lease.image is not None
    assert lease.image.manifest == manifest()
