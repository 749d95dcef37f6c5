# SPDX-License-Identifier: Apache-2.0
"""Job networks in the controller: which jobs have one, and that a VNI has one owner at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from address_rig import hosts
from controller_lab import Alone, allocation, identity, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from segment_site import JOB, Site, replace_network, vni
from store_backends import Place, open_at

from pace import examples
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api.addresses import underlay_address
from vhpc_slurm.controller.api.authority import Authority
from vhpc_slurm.controller.leases import segments
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.segments import HeldSegment
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import ExhaustedError
from vhpc_slurm.fabric.numbers import VLANS, KeyPool
from vhpc_slurm.fabric.segment_pool import SegmentPool
from vhpc_slurm.model import Generation, Lease, LeaseState, Segment

pytestmark = pytest.mark.promise("net.vni")

# --- who has a network ------------------------------------------------------------------------------


def test_a_site_without_the_table_gives_no_job_a_network(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", Network())
    assert site.open(1).segment is None
    assert site.open(2, network="none").segment is None
    refused = site.open(3, network="job")
    assert (refused.state, refused.segment) == (LeaseState.REFUSED, None)
    assert refused.refusal == "--vhpc-network=job is not allowed here (this site allows: none)"


def test_a_lease_carries_all_that_a_node_needs(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(default="none", mtu=1400, port=7000))
    assert site.open(1).segment is None
    lease = site.open(2, "n1", "n2", network="job")
    assert lease.state is LeaseState.READY
    assert lease.segment == Segment(
        5000, "10.200.0.0/16", "fd76:6870:6300::/64", 7000, 1400, ("192.0.2.10", "192.0.2.11")
    )
    assert LeaseWire.pack(lease).unpack() == lease
    site.restart()
    found = site.store.get(lease.generation)
    assert found is not None
    assert found.lease == lease


def test_a_job_that_is_larger_than_the_network_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(ipv4="10.200.0.0/30"))
    assert site.open(1, "n1", "n2").segment is not None
    refused = site.open(2, "n1", "n2", guests_per_node=2)
    assert refused.refusal.startswith("a job network here has room for 2 guests, the job has 4")


@pytest.mark.promise("net.multicast")
def test_multicast_is_for_jobs_up_to_the_sites_limit(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", replace_network(multicast_guests=2))
    allowed = site.open(1, "n1", "n2", network="job,multicast").segment
    assert allowed is not None
    assert allowed.flood
    plain = site.open(2, "n1", "n2", network="job").segment
    assert plain is not None
    assert not plain.flood
    refused = site.open(3, "n1", "n2", guests_per_node=2, network="job,multicast")
    assert refused.refusal == (
        "multicast on a job network is allowed here for at most 2 guests, the job has 4 "
        "(ask for --vhpc-network=job)"
    )
    never = Site(tmp_path / "none", replace_network(multicast_guests=0)).open(1, network="job,multicast")
    assert "multicast on a job network is allowed here for no job" in never.refusal
    with_default = replace_network(default="job,multicast")
    found = Site(tmp_path / "default", with_default).open(1).segment
    assert found is not None
    assert found.flood


def test_a_node_without_an_address_keeps_no_vni(tmp_path: Path) -> None:
    site = Site(tmp_path / "db")
    with pytest.raises(FabricError, match=r"underlay address of 1 nodes.*the first is n2"):
        site.service.reserve(request(1), allocation("n1", "n2"), identity(0), {"n1": "192.0.2.1"})
    assert site.store.segments.held() == ()
    assert site.store.of_job(1) == ()


def test_a_job_can_have_a_key_and_a_segment(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    fabric = SegmentPool(KeyPolicy(KeyPool(100, 102, space=VLANS)))
    service = Alone(store, fabric, reserve_mib=0, job_network=JOB)
    lease = service.open(request(1), allocation(), identity(0)).lease
    assert (lease.state, lease.network.vlan, vni(lease)) == (LeaseState.READY, 100, 5000)
    service.end(1, 0)
    assert [one.left_s for one in store.segments.held()] == [30.0]


# --- one owner at a time ----------------------------------------------------------------------------


def test_a_vni_is_free_after_acknowledgements_and_quarantine(leases_at: Place) -> None:
    site = Site(leases_at, replace_network(vni_last=5000))
    first = site.open(1, "n1", "n2")
    for node in ("n1", "n2"):
        site.service.take(1, 0, node)
    site.service.end(1, 0)
    site.acknowledge(first, "n1")
    site.now += 1000
    with pytest.raises(ExhaustedError, match="1 are in use, 0 in quarantine"):
        site.open(2)
    site.acknowledge(first, "n2")
    site.now += 29
    site.restart()
    with pytest.raises(ExhaustedError, match=r"0 are in use, 1 in quarantine \(the next for"):
        site.open(2)
    site.now += 30
    assert vni(site.open(2)) == 5000


def test_an_unclean_node_holds_the_vni_after_its_release(leases_at: Place) -> None:
    site = Site(leases_at, replace_network(vni_last=5000))
    first = site.open(1, "n1")
    site.service.take(1, 0, "n1")
    site.service.end(1, 0)
    site.acknowledge(first, "n1")
    site.acknowledge(first, "n1", clean=False)  # such as a node that was fenced and came back
    site.now += 1000
    with pytest.raises(ExhaustedError):
        site.open(2)
    site.service.prune(-1e12)  # everything that is released is old enough
    assert site.store.get(first.generation) is not None
    site.acknowledge(first, "n1")
    site.now += 30
    assert vni(site.open(2)) == 5000
    site.service.prune(-1e12)
    assert site.store.get(first.generation) is None


def test_an_exhausted_pool_can_refuse_instead(leases_at: Place) -> None:
    site = Site(leases_at, replace_network(vni_last=5000, exhausted="refuse"))
    site.open(1)
    refused = site.open(2)
    assert refused.state is LeaseState.REFUSED
    assert "no VNI for a job network is free: 1 are in use" in refused.refusal


def test_the_database_itself_refuses_a_second_owner(leases_at: Place) -> None:
    store = open_at(leases_at)
    one, two = Generation(1, 0, "0" * 8), Generation(2, 0, "0" * 8)
    with store.transaction():
        store.segments.add(5000, one)
    for number, generation in ((5000, two), (5001, one)):
        with pytest.raises(FabricError, match="cannot have VNI"), store.transaction():
            store.segments.add(number, generation)
    with store.transaction():
        store.segments.rest(one, 9.0)
    with pytest.raises(FabricError, match="another generation has it"), store.transaction():
        store.segments.add(5000, two)
    with store.transaction():
        store.segments.age(9.0)
        store.segments.add(5000, two)
    assert store.segments.held() == (HeldSegment(5000, two),)


@given(
    st.sets(st.integers(10, 30)),
    st.sets(st.integers(10, 30)),
    st.dictionaries(st.integers(10, 30), st.integers(1)),
)
def test_unused_vnis_come_first_then_the_longest_free(
    held: set[int], reserved: set[int], freed: dict[int, int]
) -> None:
    network = replace_network(vni_first=12, vni_last=28, vni_reserved=tuple(reserved - {28}))
    taken = [HeldSegment(number, Generation(number, 0, "0" * 8)) for number in sorted(held)]
    freed = {number: when for number, when in freed.items() if number not in held}
    free = set(range(12, 29)) - held - (reserved - {28})
    if not free:
        with pytest.raises(ExhaustedError):
            segments.choose(network, taken, freed)
        return
    chosen = segments.choose(network, taken, freed)
    assert chosen in free
    assert all(freed.get(chosen, 0) <= freed.get(other, 0) for other in free)


class AnyOrder(RuleBasedStateMachine):
    """Starts, ends, acknowledgements, time and restarts of vhpcd in any order."""

    QUARANTINE_S = 30

    @initialize()
    def begin(self) -> None:
        self.site = Site(":memory:")
        self.serial = 0
        self.leases: dict[int, Lease] = {}
        self.held: dict[str, int] = {}
        self.rests: dict[int, float] = {}

    @rule(nodes=st.integers(1, 3))
    def start(self, nodes: int) -> None:
        self.serial += 1
        try:
            lease = self.site.open(self.serial, *(f"n{number}" for number in range(nodes)))
        except ExhaustedError:
            return
        found = vni(lease)
        assert found not in self.held.values(), "another job has it"
        assert self.site.now >= self.rests.get(found, 0.0), "it is in quarantine"
        self.leases[self.serial], self.held[str(lease.generation)] = lease, found
        for number in range(nodes):
            self.site.service.take(self.serial, 0, f"n{number}")

    @rule(data=st.data(), clean=st.booleans())
    def acknowledge(self, data: st.DataObject, clean: bool) -> None:
        if self.leases:
            lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
            part = data.draw(st.sampled_from(lease.allocation.nodes))
            self.site.acknowledge(lease, part.node, clean=clean)
            self.look()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.leases:
            self.site.service.end(data.draw(st.sampled_from(sorted(self.leases))), 0)
            self.look()

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.site.now += seconds
        self.site.service.settle()

    def look(self) -> None:
        """Compare the VNIs with the nodes' reports, independently of the table of VNIs."""
        for lease in self.leases.values():
            record = self.site.store.get(lease.generation)
            name, number = str(lease.generation), vni(lease)
            assert record is not None
            over = record.lease.state is LeaseState.RELEASED and not record.unclean
            if over and name in self.held:
                del self.held[name]
                self.rests[number] = self.site.now + self.QUARANTINE_S
            elif not over and name not in self.held and self.rests.get(number, 0.0) > self.site.now:
                owner = [other for other, taken in self.held.items() if taken == number]
                if not owner and self.newest(number) is lease:
                    self.held[name] = number
                    del self.rests[number]

    def newest(self, number: int) -> Lease:
        return max(
            (one for one in self.leases.values() if vni(one) == number), key=lambda one: one.generation
        )

    @invariant()
    def live_leases_share_no_vni(self) -> None:
        numbers = [one.lease.segment.vni for one in self.site.store.live() if one.lease.segment is not None]
        assert len(numbers) == len(set(numbers))


AnyOrder.TestCase.settings = settings(
    max_examples=examples(40),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase


# --- where nodes are --------------------------------------------------------------------------------


def test_a_nodes_address_does_not_depend_on_the_resolvers_order() -> None:
    found = ["fe80::1", "127.0.1.1", "fd00::5", "10.0.0.9", "10.0.0.5", "224.0.0.1", "x"]
    assert {underlay_address(order) for order in (found, found[::-1])} == {"10.0.0.5"}
    assert underlay_address(["fd00::5", "::1"]) == "fd00::5"
    assert underlay_address(["127.0.0.1", "0.0.0.0"]) == ""


def test_underlay_addresses_are_resolved_and_survive_a_restart(tmp_path: Path) -> None:
    found = hosts(tmp_path)
    found.learn()
    assert found.known.underlay == {"n1": "10.77.0.11", "n2": "10.78.0.12"}
    assert hosts(tmp_path).known.underlay == found.known.underlay
    other = hosts(tmp_path, underlay="{node}-ib")
    other.learn()
    assert other.known.underlay == {"n1": "10.79.0.11"}  # n2-ib does not resolve


def test_an_unknown_node_is_asked_for_once(tmp_path: Path) -> None:
    async def ask() -> dict[str, str]:
        authority = Authority(hosts(tmp_path))
        try:
            return dict(await authority.underlay(["n1", "n9"]))
        finally:
            authority.close()

    assert asyncio.run(ask()) == {"n1": "10.77.0.11"}
