# SPDX-License-Identifier: Apache-2.0
"""Nodes of a cluster that are silent: their guests are gone for the others until the nodes ask again."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_site import ClusterSite, jobs
from controller_lab import allocation, identity
from het_site import component, open_all
from store_backends import ENGINES, place

from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.model import Generation, Lease, Roster

pytestmark = pytest.mark.promise("cluster.silent")


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterSite:
    return ClusterSite(place(request.param, tmp_path))


def gone(roster: Roster) -> list[tuple[int, tuple[int, ...]]]:
    return [(member.generation.job_id, member.gone) for member in roster.members]


def test_guests_of_a_silent_node_are_gone_until_it_asks(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", "n3", guests_per_node=2)
    site.ask(two, "n3", 2)
    site.clusters.lose(two.generation, "n3")
    assert gone(site.ask(one, "n1", 2)) == [(2, (2, 3))]
    site.clusters.lose(two.generation, "n3")
    assert site.ask(one, "n1", 3) == Roster(3)
    site.ask(two, "n2", 3)
    assert site.ask(one, "n1", 3) == Roster(3)
    site.ask(two, "n3", 2)
    assert gone(site.ask(one, "n1", 3)) == [(2, ())]


def test_a_member_stays_though_all_its_nodes_are_silent(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    site.clusters.lose(two.generation, "n2")
    assert gone(site.ask(one, "n1", 2)) == [(2, (0,))]
    roster = site.ask(two, "n2", 2)
    assert not roster.over
    assert gone(roster) == [(2, ())]
    assert gone(site.ask(one, "n1", 3)) == [(2, ())]


def test_a_silent_node_comes_back_after_a_restart(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2")
    site.clusters.lose(two.generation, "n2")
    site.restart()
    assert site.ask(one, "n1", 3) == Roster(3)
    assert gone(site.ask(two, "n2", 2)) == [(2, ())]
    assert gone(site.ask(one, "n1", 3)) == [(2, ())]


def test_guests_that_ended_meanwhile_stay_gone(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", "n3", guests_per_node=2)
    site.clusters.lose(two.generation, "n3")
    site.ask(two, "n3", gone=(3,))
    assert gone(site.ask(one, "n1", 3)) == [(2, (3,))]
    site.clusters.lose(two.generation, "n3")
    assert not site.ask(two, "n2", gone=(0, 1)).over, "the guests of n3 may run"
    assert gone(site.ask(one, "n1", 4)) == [(2, (0, 1, 2, 3))]
    assert site.ask(two, "n3", gone=(2, 3)).over
    assert site.ask(one, "n1", 6).left == (two.generation,)


def settled(site: ClusterSite, lease: Lease) -> bool:
    return site.state(lease).settled


def test_a_start_does_not_wait_for_a_silent_node(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1"), site.joined(2, "n2", "n3")
    for lease, node in ((one, "n1"), (two, "n2"), (two, "n3")):
        site.ask(lease, node, 2)
    site.clusters.lose(two.generation, "n3")
    three = site.joined(3, "n4")
    assert site.state(three).unaware == 3
    site.clusters.lose(one.generation, "n1")  # while the start waits
    assert site.state(three).first_unaware == ("n2 (job 2)", "n4 (job 3)")
    site.ask(two, "n2", 6)
    site.ask(three, "n4", 6)
    assert settled(site, three)
    assert jobs(site.ask(one, "n1", 2)) == [2, 3, 1], "it learns of all when it is back"
    site.restart()
    for lease, node in ((one, "n1"), (two, "n2"), (three, "n4")):
        assert not settled(site, three)
        site.ask(lease, node, 7)
    assert settled(site, three), "n3 was silent before the restart"


def test_a_component_is_silent_on_its_own_node(site: ClusterSite) -> None:
    parts = (
        Wanted(component(0, 2, cluster="dask"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster="dask", guests_per_node=2), allocation("n1", "n2"), identity(0)),
    )
    head, rest = open_all(site, *parts)
    site.passes(head)
    site.clusters.lose(rest.generation, "n2")
    (member,) = site.ask(head, "n3").members
    assert (member.gone, member.living_places, member.living_nodes) == ((3, 4), (0, 1), ("n3", "n1"))


def test_nodes_of_no_member_are_nothing(site: ClusterSite) -> None:
    one = site.joined(1, "n1")
    site.clusters.lose(one.generation, "n2")
    site.clusters.lose(Generation(9, 0, "0123abcd"), "n1")
    assert site.ask(one, "n1", 1) == Roster(1)
    site.service.end(1, None)
    site.clusters.lose(one.generation, "n1")
