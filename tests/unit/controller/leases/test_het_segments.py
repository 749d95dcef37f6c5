# SPDX-License-Identifier: Apache-2.0
"""One job network for all components of a heterogeneous job: its leases, its addresses, its VNI."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from controller_lab import allocation
from het_site import component, open_all, two
from segment_site import Site, replace_network, vni

from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.keys import ExhaustedError
from vhpc_slurm.hooks import statefields
from vhpc_slurm.model import LeaseState, NodePlan, SegmentPart
from vhpc_slurm.node.network import plan

# --- leases -----------------------------------------------------------------------------------------


def test_all_components_have_one_segment(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    first, second = open_all(site, *two())
    assert (first.state, second.state) == (LeaseState.READY, LeaseState.READY)
    assert first.segment == second.segment
    assert first.segment is not None
    assert first.segment.underlay == ("192.0.2.3", "192.0.2.1", "192.0.2.2")
    assert first.segment.parts == (
        SegmentPart(first.generation, ("n3",), (2,), 1),
        SegmentPart(second.generation, ("n1", "n2"), (2, 2), 2),
    )
    assert LeaseWire.pack(second).unpack() == second
    assert open_all(site, *two()) == (first, second), "a repeated request has the same leases"
    site.restart()
    assert open_all(site, *two()) == (first, second)


def test_components_may_have_different_restart_counts(tmp_path: Path) -> None:
    """Slurm takes back a start that fails for one component, and counts it for those that had started."""
    again, first = two(1)[0], two()[1]
    leases = open_all(Site(tmp_path / "db"), again, first)
    assert [lease.generation.restart for lease in leases] == [1, 0]
    assert {lease.state for lease in leases} == {LeaseState.READY}


def test_a_new_start_ends_the_leases_of_all_components(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    old = open_all(site, *two())
    new = open_all(site, *two(1))
    assert {vni(lease) for lease in new} == {5001}
    for lease in old:
        record = site.store.get(lease.generation)
        assert record is not None
        assert record.lease.state is LeaseState.RELEASED


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_component_is_refused_all_are(tmp_path: Path, which: int) -> None:
    site = Site(tmp_path / "db")
    parts = list(two())
    parts[which] = dataclasses.replace(parts[which], image=UserError("image x is unknown"))
    leases = open_all(site, *parts)
    line = f"component {which} of the heterogeneous job: image x is unknown"
    assert [(lease.state, lease.refusal) for lease in leases] == [(LeaseState.REFUSED, line)] * 2
    assert site.store.segments.held() == ()


def test_limits_count_the_guests_of_all_components(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(ipv4="10.200.0.0/29", multicast_guests=4))
    first, _ = open_all(site, *two())
    assert first.segment is not None
    site = Site(tmp_path / "small", replace_network(ipv4="10.200.0.0/30"))
    refused, _ = open_all(site, *two())
    assert "a job network here has room for 2 guests, the job has 5" in refused.refusal
    parts = list(two())
    parts[0] = dataclasses.replace(parts[0], request=component(0, 2, network="job,multicast"))
    site = Site(tmp_path / "multicast", replace_network(multicast_guests=4))
    assert "for at most 4 guests, the job has 5" in open_all(site, *parts)[1].refusal


def test_two_components_on_one_node_are_refused(tmp_path: Path) -> None:
    """Slurm never does this; two generations on one node could not have one VNI."""
    first, second = two()
    again = dataclasses.replace(second, allocation=allocation("n1", "n3"))
    leases = open_all(Site(tmp_path / "db"), first, again)
    assert {lease.state for lease in leases} == {LeaseState.REFUSED}
    assert "two components of the heterogeneous job are on node n3" in leases[0].refusal


@pytest.mark.promise("net.ip-versions")
def test_nodes_of_both_ip_versions_are_refused_once_and_for_all(tmp_path: Path) -> None:
    """Their Prologs would requeue the job without limit."""
    site = Site(tmp_path / "db")
    addresses = {"n1": "192.0.2.1", "n2": "192.0.2.2", "n3": "2001:db8::3"}
    leases = open_all(site, *two(), addresses=addresses)
    line = (
        "nodes n1 (IPv4, 192.0.2.1) and n3 (IPv6, 2001:db8::3) cannot be on one job network (choose other "
        "nodes, or --vhpc-network=none; operators: see network.underlay in vhpc.toml(5))"
    )
    assert [(lease.state, lease.refusal) for lease in leases] == [(LeaseState.REFUSED, line)] * 2
    assert site.store.segments.held() == ()
    of_one_version = {name: f"2001:db8::{name[1:]}" for name in addresses}
    again = open_all(site, *two(1), addresses=of_one_version)
    assert {lease.state for lease in again} == {LeaseState.READY}


@pytest.mark.promise("het.network")
def test_leases_of_all_components_are_made_or_none(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    first, second = two()
    lost = dataclasses.replace(second, allocation=allocation("n1", "n99"))
    with pytest.raises(FabricError, match="underlay address of 1 nodes"):
        open_all(site, first, lost)
    assert (site.store.of_job(10), site.store.of_job(11), site.store.segments.held()) == ((), (), ())


def test_an_exhausted_pool_refuses_all_components(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(vni_last=5000, exhausted="refuse"))
    site.open(1)
    leases = open_all(site, *two())
    assert {lease.state for lease in leases} == {LeaseState.REFUSED}
    assert "no VNI for a job network is free" in leases[1].refusal


# --- the VNI ----------------------------------------------------------------------------------------


@pytest.mark.promise("het.network")
def test_a_vni_is_held_until_no_component_holds_it(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(vni_last=5000))
    first, second = open_all(site, *two())
    site.service.take(10, 0, "n3")
    site.service.take(11, 0, "n1")
    for ended in (first, second):  # the first owns the number in the database
        with pytest.raises(ExhaustedError, match="1 are in use, 0 in quarantine"):
            site.open(2)
        site.service.end(ended.generation.job_id, 0)
        site.acknowledge(ended, ended.allocation.nodes[0].node)
        site.now += 1000
        site.restart()
    with pytest.raises(ExhaustedError, match="0 are in use, 1 in quarantine"):
        site.open(2)
    site.now += 1000
    assert vni(site.open(2)) == 5000
    assert site.store.segments.of(second.generation) is None


@pytest.mark.parametrize("unclean", [0, 1])
def test_an_unclean_component_holds_the_vni_again(tmp_path: Path, unclean: int) -> None:
    site = Site(tmp_path / "db", replace_network(vni_last=5000))
    leases = open_all(site, *two())
    for lease in leases:
        site.service.take(lease.generation.job_id, 0, lease.allocation.nodes[0].node)
        site.service.end(lease.generation.job_id, 0)
        site.acknowledge(lease, lease.allocation.nodes[0].node)
    late = leases[unclean]
    site.acknowledge(late, late.allocation.nodes[0].node, clean=False)
    site.now += 1000
    with pytest.raises(ExhaustedError, match="1 are in use"):
        site.open(2)
    site.service.prune(-1e12)
    assert site.store.get(late.generation) is not None, "it can still be acknowledged"
    site.acknowledge(late, late.allocation.nodes[0].node)
    site.now += 1000
    assert vni(site.open(2)) == 5000


# --- addresses and names ----------------------------------------------------------------------------


def test_ranks_go_over_all_components(tmp_path: Path) -> None:
    leases = open_all(Site(tmp_path / "db"), *two())
    names = ["n3", "n1-g0", "n1-g1", "n2-g0", "n2-g1"]
    addresses = [f"10.200.0.{number}" for number in range(1, 6)]
    for lease in leases:
        assert plan.names(lease)[:5] == tuple(zip(names, addresses, strict=True))
        assert [name for name, _ in plan.slots(lease)] == names
        assert [name for name, _ in plan.slots(lease, ("n1",))] == ["n3", "n2-g0", "n2-g1"]
        assert dict(plan.slots(lease)) == {"n3": 2} | dict.fromkeys(names[1:], 1)
    first, second = leases
    own = plan.interface(first, "n3", 0, 2)
    other = plan.interface(second, "n2", 1, 1)
    assert own is not None
    assert other is not None
    assert (own.ipv4, other.ipv4) == ("10.200.0.1/16", "10.200.0.5/16")
    assert (own.mac, other.mac) == (plan.mac(5000, 0), plan.mac(5000, 4))
    assert (own.tap, other.tap) == (plan.tap_name(5000, 0), plan.tap_name(5000, 1))


def test_each_node_reaches_the_guests_of_all_components(tmp_path: Path) -> None:
    first, second = open_all(Site(tmp_path / "db"), *two())
    assert plan.peers(first, "n3") == ("192.0.2.1", "192.0.2.2")
    assert plan.peers(second, "n2") == ("192.0.2.3", "192.0.2.1")
    assert plan.peers(second, "n2", ("n3",)) == ("192.0.2.1",)
    around = list(plan.neighbours(second, "n1"))
    assert [one.via for one in around] == ["192.0.2.3", "", "", "192.0.2.2", "192.0.2.2"]
    assert [one.tap for one in around] == ["", "vhpc5000g0", "vhpc5000g1", "", ""]
    segment = plan.node_segment(second, "n1")
    assert segment is not None
    assert segment.local == "192.0.2.1"


def test_the_tests_of_the_barrier_are_a_ring_over_all_components(tmp_path: Path) -> None:
    first, second = open_all(Site(tmp_path / "db"), *two())
    tested = [[peer.hostname for peer in plan.reach_targets(first, "n3", 0)]]
    for node in ("n1", "n2"):
        tested += [[peer.hostname for peer in plan.reach_targets(second, node, index)] for index in range(2)]
    assert tested == [["n1-g0"], ["n1-g1", "n3"], ["n2-g0", "n3"], ["n2-g1", "n3"], ["n3"]]


def test_tunnels_join_the_nodes_of_all_components(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(encryption="wireguard"))
    first, second = open_all(site, *two())
    assert plan.is_encrypted(first), "although its component has one node"
    assert plan.transport(first) == plan.transport(second)
    assert len(set(plan.transport(first))) == 3


def test_mpi_over_components_needs_equal_guests_and_no_ports(tmp_path: Path) -> None:
    """The number goes to the plugin, and from there to vhpc-run."""

    def said(each: int, *ports: int) -> int:
        parts = [
            dataclasses.replace(one, request=component(place, 2, guests_per_node=1 + place * (each - 1)))
            for place, one in enumerate(two())
        ]
        _, lease = open_all(Site(tmp_path / f"{each}-{len(ports)}"), *parts)
        plan_ = SimpleNamespace(guests=[SimpleNamespace(port_guids=ports)])
        return statefields.components(lease, cast(NodePlan, plan_))

    assert said(1) == 2
    assert said(2) == 0
    assert said(1, 7) == 0
    alone = Site(tmp_path / "alone").open(1)
    assert statefields.components(alone, cast(NodePlan, SimpleNamespace(guests=[]))) == 0


# --- the barrier ------------------------------------------------------------------------------------


def test_the_barrier_waits_for_the_nodes_of_all_components(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    first, second = open_all(site, *two())
    barrier = site.service.leases.readiness
    assert barrier.report(first.generation, "n3", "passed", "", "").jobs == (10, 11)
    barrier.report(second.generation, "n2", "waiting", "", "")
    for lease in (first, second):
        state = barrier.look(lease.generation, ("n1", "n2"), named=True)
        assert (state.over, state.missing, state.first_missing) == (False, 2, ("n1", "n2"))
        assert state.reported == ("n2",)
        assert not state.settled
    barrier.report(second.generation, "n1", "passed", "", "")
    barrier.report(second.generation, "n2", "passed", "", "")
    assert barrier.look(first.generation, (), named=False).missing == 0
    with pytest.raises(FabricError, match="no part on node n3"):
        barrier.report(second.generation, "n3", "passed", "", "")


def test_a_failure_in_one_component_settles_the_barrier_of_all(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    first, second = open_all(site, *two())
    barrier = site.service.leases.readiness
    barrier.report(second.generation, "n1", "failed", "fabric", "not reached")
    failure = barrier.look(first.generation, (), named=False).failure
    assert failure is not None
    assert (failure.node, failure.kind, failure.line) == ("n1", "fabric", "not reached")
    assert barrier.look(first.generation, (), named=False).failed_starts == 1
    barrier.report(first.generation, "n3", "failed", "user", "no such image")
    failure = barrier.look(second.generation, (), named=False).failure
    assert failure is not None
    assert failure.node == "n3", "what fails the job comes before what requeues it"


def test_a_component_that_ends_in_the_barrier_fails_the_others(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    first, second = open_all(site, *two())
    site.service.end(11, 0)
    barrier = site.service.leases.readiness
    state = barrier.look(first.generation, (), named=False)
    assert state.failure is not None
    assert (state.failure.node, state.failure.kind) == ("n1", "user")
    assert state.failure.line == "component 11 of the heterogeneous job has ended"
    assert barrier.look(second.generation, (), named=False).over
