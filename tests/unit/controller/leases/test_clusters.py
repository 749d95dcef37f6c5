# SPDX-License-Identifier: Apache-2.0
"""Clusters: members, addresses of their guests, and rosters that nodes get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_site import HOUR_S, ClusterSite, jobs
from controller_lab import allocation, identity
from het_site import UNDERLAY, component, open_all
from msgspec.structs import replace
from segment_site import vni
from store_backends import ENGINES, place

from vhpc_slurm.config import Config, Placement
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.controller.leases import cluster_rules, savable
from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Lease, LeaseState, Roster


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterSite:
    return ClusterSite(place(request.param, tmp_path))


def first(lease: Lease) -> int:
    assert lease.segment is not None
    return lease.segment.first


# --- members and their addresses ------------------------------------------------------------------


def test_members_have_segments_and_addresses_of_their_own(site: ClusterSite) -> None:
    one = site.member(1, "n1", "n2", guests_per_node=3)
    two = site.member(2, "n1")
    three = site.member(3, "n3", cluster="other")
    assert [lease.segment is not None for lease in (one, two, three)] == [True] * 3
    assert len({vni(one), vni(two), vni(three)}) == 3
    assert [first(one), first(two), first(three)] == [0, 6, 0]
    assert one.cluster is not None
    assert one.cluster == two.cluster != three.cluster
    assert one.cluster.name == "dask"


def test_clusters_of_two_users_are_two(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", uid=2002, user="bob")
    assert one.cluster is not None
    assert two.cluster is not None
    assert one.cluster.serial != two.cluster.serial
    assert first(one) == first(two) == 0
    assert jobs(site.ask(one, "n1")) == [1]
    assert jobs(site.ask(two, "n2")) == [2]


def test_an_address_is_not_used_again_for_an_hour(site: ClusterSite) -> None:
    site.member(1, "n1")
    site.member(2, "n2", "n3")
    site.service.end(2, None)
    assert first(site.member(3, "n4")) == 3
    site.now += HOUR_S - 1
    assert first(site.member(4, "n5")) == 4
    site.now += 2
    assert first(site.member(5, "n6", "n7")) == 1


def test_a_cluster_has_as_many_guests_as_addresses(tmp_path: Path) -> None:
    site = ClusterSite(tmp_path / "db", ipv4="10.200.0.0/29")
    site.member(1, "n1", guests_per_node=4)
    lease = site.open(2, "n2", "n3", "n4", cluster="dask")
    assert lease.state is LeaseState.REFUSED
    assert lease.refusal == (
        "cluster dask has no addresses for 3 guests: 4 of 6 are in use, or were until an hour ago "
        "(wait for the end of other jobs of the cluster, or ask for fewer guests)"
    )
    site.member(3, "n2", "n3")


def test_a_heterogeneous_job_is_one_member(site: ClusterSite) -> None:
    other = site.joined(1, "n5")
    parts = (
        Wanted(component(0, 2, cluster="dask"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster="dask", guests_per_node=2), allocation("n1", "n2"), identity(0)),
    )
    head, rest = open_all(site, *parts)
    assert head.segment == rest.segment
    assert (first(head), head.cluster) == (1, rest.cluster)
    site.passes(head)
    (member,) = (one for one in site.ask(other, "n5").members if one.generation.job_id == 10)
    assert member.segment_nodes == ("n3", "n1", "n2")
    site.ask(rest, "n2", gone=(3, 4))
    (member,) = site.ask(other, "n5", applied=2).members
    assert member.gone == (3, 4)
    with pytest.raises(FabricError, match=r"guest 0 of 11.* is not on node n2"):
        site.ask(rest, "n2", gone=(0,))
    with pytest.raises(FabricError, match="has no part on node n1"):
        site.ask(head, "n1")


def test_components_are_in_one_cluster(site: ClusterSite) -> None:
    parts = (
        Wanted(component(0, 2, cluster="dask"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster="ray"), allocation("n1"), identity(0)),
    )
    refused = open_all(site, *parts, addresses=UNDERLAY)
    assert {lease.state for lease in refused} == {LeaseState.REFUSED}
    assert "all components of a heterogeneous job" in refused[0].refusal


@pytest.mark.parametrize(
    ("network", "asked", "refusal"),
    [
        ({"allowed": ("none",)}, {}, "which this site does not have"),
        ({"allowed": ("none", "nat", "job")}, {"network": "nat"}, "--vhpc-network=nat has none"),
        ({}, {"network": "none"}, "--vhpc-network=none has none"),
        ({}, {"network": "job,multicast"}, "no multicast in a cluster"),
        ({"encryption": "wireguard"}, {}, "clusters cannot be encrypted"),
        ({}, {"checkpoint": "limit"}, "a job in a cluster cannot be saved"),
    ],
)
def test_what_a_cluster_cannot_be_with(
    tmp_path: Path, network: dict[str, Any], asked: dict[str, Any], refusal: str
) -> None:
    site = ClusterSite(tmp_path / "db", **network)
    lease = site.open(1, "n1", cluster="dask", **asked)
    assert lease.state is LeaseState.REFUSED
    assert lease.refusal.startswith("--vhpc-cluster=dask: ")
    assert refusal in lease.refusal
    assert site.store.clusters.page(0, None, 10) == ()


def test_the_option_adds_the_job_network_to_the_default(tmp_path: Path) -> None:
    site = ClusterSite(tmp_path / "db", allowed=("none", "job", "nat"), default="nat")
    lease = site.member(1, "n1")
    assert lease.nat
    assert lease.segment is not None
    by_rule = site.member(2, "n1", network="nat", defaults=(("network", "groups"),))
    assert by_rule.nat
    assert by_rule.segment is not None


def test_a_member_cannot_be_saved(site: ClusterSite) -> None:
    config = Config(checkpoint=Checkpoint(folder="/ck"), placement=Placement(gpu_gres="none"))
    assert savable.refusal(site.member(1, "n1"), config).startswith("it is in cluster dask")


def test_ranges_of_addresses() -> None:
    assert cluster_rules.choose([], 3, 3) == 0
    assert cluster_rules.choose([], 4, 3) is None
    assert cluster_rules.choose([(0, 2), (5, 1)], 3, 10) == 2
    assert cluster_rules.choose([(0, 2), (5, 1)], 4, 10) == 6
    assert cluster_rules.choose([(0, 2), (1, 8)], 1, 9) is None


# --- joining ----------------------------------------------------------------------------------------


def test_a_job_joins_when_all_its_nodes_have_passed(site: ClusterSite) -> None:
    one = site.joined(1, "n1")
    two = site.member(2, "n2", "n3")
    assert site.ask(one, "n1") == site.ask(one, "n1", 0)
    assert jobs(site.ask(one, "n1")) == [1]
    site.service.leases.readiness.report(two.generation, "n2", "passed", "", "")
    assert jobs(site.ask(one, "n1")) == [1]
    assert site.state(two).missing == 1
    site.service.leases.readiness.report(two.generation, "n3", "passed", "", "")
    assert site.ask(one, "n1", 1).version == 2
    assert jobs(site.ask(one, "n1", 1)) == [2]
    site.passes(two)
    assert site.ask(one, "n1", 2) == Roster(2)


def test_the_roster_has_the_keys_of_the_guests(site: ClusterSite) -> None:
    one = site.member(1, "n1")
    site.give_keys(one)
    site.passes(one)
    (member,) = site.ask(one, "n1").members
    assert (member.host_public, member.user_public) == ("host.pub 1", "user.pub 1")
    assert member.segment == one.segment
    assert member.parts == one.parts


def test_a_start_waits_until_all_nodes_know_of_it(site: ClusterSite) -> None:
    one = site.joined(1, "n1", "n2")
    assert site.state(one).first_unaware == ("n1 (job 1)", "n2 (job 1)")
    for node in ("n1", "n2"):
        site.ask(one, node, 1)
    assert site.state(one).settled
    two = site.joined(2, "n1")
    assert (site.state(two).unaware, site.state(two).settled) == (3, False)
    site.ask(one, "n1", 2)
    site.ask(two, "n1", 2)
    assert site.state(two).first_unaware == ("n2 (job 1)",)
    asked = site.clusters.ask(one.generation, "n2", 2, ())
    assert asked.aware == (2,)
    assert site.state(two).settled
    site.ask(one, "n2", 0)  # its follower was started again
    assert site.state(two).settled


def test_a_node_that_ends_meanwhile_is_not_waited_for(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    site.ask(two, "n2", 2)
    assert site.state(two).first_unaware == ("n1 (job 1)",)
    site.service.end(1, None)
    assert site.state(two).settled
    assert site.ask(one, "n1").over


def test_after_a_restart_nodes_are_waited_for_again(site: ClusterSite) -> None:
    one = site.joined(1, "n1")
    site.ask(one, "n1", 1)
    site.restart()
    assert site.state(one).unaware == 1
    site.ask(one, "n1", 1)
    assert site.state(one).unaware == 0


# --- leaving -----------------------------------------------------------------------------------------


def test_a_job_that_ends_leaves(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    assert site.ask(one, "n1", 2) == Roster(2)
    site.service.end(2, None)
    assert site.ask(one, "n1", 2) == Roster(3, left=(two.generation,))
    assert site.ask(one, "n1", 1) == Roster(3)  # it has never heard of it
    assert jobs(site.ask(one, "n1", 0)) == [1]
    assert site.ask(two, "n2", 2).over


def test_guests_that_are_gone_are_told_at_once(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", "n3", guests_per_node=2)
    site.ask(two, "n3", gone=(2,))
    (member,) = site.ask(one, "n1", 2).members
    assert (member.generation, member.gone) == (two.generation, (2,))
    site.ask(two, "n3", gone=(2, 3))
    assert not site.ask(two, "n2", gone=(0,)).over
    assert site.ask(two, "n2", gone=(0, 1)).over
    assert site.ask(one, "n1", 4).left == (two.generation,)
    assert site.ask(two, "n2").over


def test_only_nodes_of_the_job_speak_for_it(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", "n3")
    with pytest.raises(FabricError, match="has no part on node n1"):
        site.ask(two, "n1")
    with pytest.raises(FabricError, match=r"guest 1 of 2.* is not on node n2"):
        site.ask(two, "n2", gone=(1,))
    assert site.ask(one, "n1", 2) == Roster(2)


def test_the_last_job_ends_the_cluster(site: ClusterSite) -> None:
    site.joined(1, "n1")
    site.service.end(1, None)
    assert site.store.clusters.page(0, None, 10) == ()
    assert first(site.joined(2, "n1")) == 0


def test_a_kept_cluster_stays(site: ClusterSite) -> None:
    one = site.joined(1, "n1", cluster="dask:keep")
    site.service.end(1, None)
    (cluster,) = site.store.clusters.page(0, 2001, 10)
    assert (cluster.name, cluster.kept, cluster.version) == ("dask", True, 2)
    two = site.joined(2, "n1")
    assert two.cluster == one.cluster
    assert first(two) == 1


def test_a_job_that_is_requeued_is_another_member(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    again = site.joined(2, "n3", restart=1)
    roster = site.ask(one, "n1", 2)
    assert roster.left == (two.generation,)
    assert [member.generation for member in roster.members] == [again.generation]
    assert site.ask(two, "n2").over


def test_a_job_that_never_joined_is_not_told_of(site: ClusterSite) -> None:
    one, _ = site.joined(1, "n1"), site.member(2, "n2")
    site.service.end(2, None)
    assert site.ask(one, "n1", 1) == Roster(1)


def test_a_node_that_is_ahead_learns_the_version(site: ClusterSite) -> None:
    one = site.joined(1, "n1")
    assert site.ask(one, "n1", 7) == Roster(1)


# --- what is forgotten --------------------------------------------------------------------------------


def test_members_that_left_are_forgotten_after_an_hour(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    site.ask(one, "n1", 2)
    site.service.end(2, None)
    site.now += HOUR_S + 1
    site.clusters.prune()
    assert site.ask(one, "n1", 2).left == (two.generation,)  # the node did not know until now
    site.ask(one, "n1", 3)
    site.clusters.prune()
    assert site.store.clusters.member(two.generation) is None


def test_a_cluster_is_kept_as_long_as_asked(site: ClusterSite) -> None:
    site.clusters.keep(2001, "a", 60)
    site.clusters.keep(2001, "b", None)
    lease = site.joined(1, "n1", cluster="a")
    site.now += 61
    site.clusters.prune()
    assert [one.name for one in site.store.clusters.page(0, None, 10)] == ["a", "b"]
    site.service.end(1, None)
    assert [one.name for one in site.store.clusters.page(0, None, 10)] == ["b"]
    assert site.ask(lease, "n1").over


def test_nodes_that_do_not_reach_the_others_are_refused(site: ClusterSite) -> None:
    own = site.member(1, "n1").segment
    assert own is not None
    assert cluster_rules.apart(own, replace(own, vni=1 + own.vni, underlay=("192.0.2.9",))) == ""
    assert "IPv6" in cluster_rules.apart(own, replace(own, underlay=("2001:db8::1",)))
    for other in ({"port": 1}, {"ipv4": "10.9.0.0/16"}, {"ipv6": "fd00::/64"}):
        assert "has changed its job networks" in cluster_rules.apart(own, replace(own, **other))
