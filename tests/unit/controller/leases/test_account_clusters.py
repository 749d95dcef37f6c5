# SPDX-License-Identifier: Apache-2.0
"""Clusters of an account: members of several users, what they learn of each other, and the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_site import ClusterSite, jobs
from controller_lab import allocation, identity
from het_site import component, open_all
from store_backends import ENGINES, place

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.model import LeaseState

ALICE: dict[str, Any] = {"account": "physics"}
BOB: dict[str, Any] = {"account": "physics", "uid": 2002, "user": "bob"}
DASK = "physics/dask"
DAY_S = 86400.0
RULES = (
    Rule(name="gone", users=("carol",)),
    Rule(name="students", users=("bob",), account_clusters="join", max_cluster_guests=4),
    Rule(name="physics", accounts=("physics",), account_clusters="create", max_cluster_kept_days=7),
)


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterSite:
    return ClusterSite(place(request.param, tmp_path), RULES)


@pytest.mark.promise("cluster.account")
def test_jobs_of_two_users_are_in_one_cluster(site: ClusterSite) -> None:
    own = site.joined(1, "n1", cluster="dask", **ALICE)
    one = site.member(2, "n1", cluster=DASK, **ALICE)
    two = site.member(3, "n2", cluster=DASK, **BOB)
    assert own.cluster is not None
    assert one.cluster is not None
    assert one.cluster == two.cluster != own.cluster
    assert one.cluster.name == DASK
    assert [lease.segment and lease.segment.first for lease in (own, one, two)] == [0, 0, 1]
    site.passes(one)
    site.passes(two)
    assert jobs(site.ask(one, "n1")) == jobs(site.ask(two, "n2")) == [2, 3]
    assert jobs(site.ask(own, "n1")) == [1]


@pytest.mark.promise("cluster.account")
def test_a_user_gets_no_keys_of_other_users(site: ClusterSite) -> None:
    members = [
        site.member(number, f"n{number}", cluster=DASK, **user)
        for number, user in enumerate((ALICE, BOB, ALICE), 1)
    ]
    for member in members:
        site.give_keys(member)
        site.passes(member)
    for member, users in zip(members, ({1, 3}, {2}, {1, 3}), strict=True):
        found = site.ask(member, member.parts[0].nodes[0]).members
        assert [one.host_public for one in found] == ["host.pub 1", "host.pub 2", "host.pub 3"]
        assert {one.generation.job_id for one in found if one.user_public} == users
        assert all(one.user_public in ("", f"user.pub {one.generation.job_id}") for one in found)


def test_a_job_of_another_account_is_refused(site: ClusterSite) -> None:
    site.member(1, "n1", cluster=DASK, **ALICE)
    said = "--vhpc-cluster=physics/dask: only jobs of account physics can be in this cluster, and the job "
    assert site.refused(2, "n2", cluster=DASK, account="bio") == (
        said + "is one of account bio (submit it with -A physics)"
    )
    assert site.refused(3, "n2", cluster=DASK) == said + "has no account (submit it with -A physics)"
    parts = (
        Wanted(component(0, 2, cluster=DASK, account="physics"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster=DASK, account="bio"), allocation("n4"), identity(0)),
    )
    refused = open_all(site, *parts)
    assert {lease.state for lease in refused} == {LeaseState.REFUSED}
    assert "only jobs of account physics" in refused[0].refusal


def test_without_a_rule_accounts_have_no_clusters(tmp_path: Path) -> None:
    site = ClusterSite(tmp_path / "db")
    said = site.refused(1, "n1", cluster=DASK, **ALICE)
    assert said == "no policy rule permits cluster physics/dask (use a cluster of yours: --vhpc-cluster=dask)"
    assert site.store.clusters.page(0, None, 10) == ()
    site.member(2, "n1", **ALICE)


def test_a_rule_may_permit_to_join_only(site: ClusterSite) -> None:
    assert site.refused(1, "n1", cluster=DASK, **BOB).startswith(
        "policy rule 'students' refuses the job: it does not permit to create clusters of accounts, and "
        "there is no cluster physics/dask"
    )
    site.member(2, "n1", cluster=DASK, **ALICE)
    site.member(3, "n1", cluster=DASK, **BOB)
    assert "permits no clusters of accounts" in site.refused(
        4, "n1", cluster=DASK, account="physics", user="carol", uid=2003
    )


def test_rules_of_all_components_count(site: ClusterSite) -> None:
    site.member(1, "n1", cluster=DASK, guests_per_node=2, **ALICE)
    parts = (
        Wanted(component(0, 2, cluster=DASK, account="physics"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster=DASK, account="physics", qos="low"), allocation("n4"), identity(0)),
    )
    site.policy = (Rule(name="low", qos=("low",), account_clusters="create", max_cluster_guests=3), *RULES)
    site.restart()
    refused = open_all(site, *parts)
    assert [lease.state for lease in refused] == [LeaseState.REFUSED] * 2
    assert "rule 'low' refuses the job: it permits 3 guests in a cluster" in refused[0].refusal


def test_a_rule_limits_the_guests_of_a_cluster(site: ClusterSite) -> None:
    site.member(1, "n1", cluster=DASK, guests_per_node=2, **ALICE)
    site.member(2, "n2", cluster=DASK, **BOB)
    assert site.refused(3, "n3", cluster=DASK, guests_per_node=2, **BOB) == (
        "policy rule 'students' refuses the job: it permits 4 guests in a cluster, and physics/dask would "
        "have 5 (wait for the end of other jobs of the cluster, or ask for fewer guests)"
    )
    site.member(4, "n3", cluster=DASK, **BOB)
    site.member(5, "n3", cluster=DASK, guests_per_node=2, **ALICE)  # her rule has no limit
    assert "permits 4 guests" in site.refused(6, "n3", cluster="own", guests_per_node=5, **BOB)


def test_a_rule_limits_how_long_a_cluster_is_kept(site: ClusterSite) -> None:
    site.joined(1, "n1", cluster=f"{DASK}:keep", **ALICE)
    site.service.end(1, None)
    site.now += 6 * DAY_S
    site.joined(2, "n1", cluster=f"{DASK}:keep", **ALICE)  # seven days from now
    site.service.end(2, None)
    site.now += 6 * DAY_S
    site.clusters.prune()
    (kept,) = site.store.clusters.page(0, 0, 10, accounts=("bio", "physics"))
    assert (kept.name, kept.account, kept.uid) == (DASK, "physics", 2001)
    site.now += DAY_S + 1
    site.clusters.prune()
    assert site.store.clusters.page(0, None, 10) == ()


def test_an_account_keeps_a_limited_number_of_names(site: ClusterSite) -> None:
    for number in range(64):
        site.clusters.keep(2001, f"physics/c{number}", None)
    assert site.refused(1, "n1", cluster=f"{DASK}:keep", **ALICE) == (
        "cluster physics/dask is not kept: account physics keeps 64 clusters already "
        "(remove one: vhpc cluster rm)"
    )
    site.member(2, "n1", cluster="dask:keep", **ALICE)


def test_the_last_job_of_any_user_ends_the_cluster(site: ClusterSite) -> None:
    one, two = site.joined(1, "n1", cluster=DASK, **ALICE), site.joined(2, "n2", cluster=DASK, **BOB)
    site.service.end(1, None)
    assert site.ask(two, "n2", 2).left == (one.generation,)
    assert [one.name for one in site.store.clusters.page(0, None, 10)] == [DASK]
    site.service.end(2, None)
    assert site.store.clusters.page(0, None, 10) == ()
