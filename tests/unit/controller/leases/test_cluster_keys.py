# SPDX-License-Identifier: Apache-2.0
"""Members of a cluster share a key of the fabric, and each has ports of its own on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_site import ClusterSite
from controller_lab import allocation, identity
from het_site import component
from key_fabric import Fabric

from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import ExhaustedError
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import Lease

pytestmark = pytest.mark.promise("fabric.cluster")

POOL = KeyPool(0x1000, 0x1003)
QUARANTINE_S = 60.0


class KeyedSite(ClusterSite):
    """Jobs have a key each, or one with the others of their cluster."""

    quarantine_s = QUARANTINE_S

    def make_fabric(self) -> Fabric:
        self.keyed = Fabric(KeyPolicy(POOL, limit=4))
        return self.keyed

    @property
    def tables(self) -> dict[int, int]:
        """The key that each port on the fabric has, by GUID."""
        return self.keyed.tables


@pytest.fixture
def site(tmp_path: Path) -> KeyedSite:
    return KeyedSite(tmp_path / "db")


def key(lease: Lease) -> int:
    assert lease.network.pkey is not None
    return lease.network.pkey


def guid(pkey: int, rank: int) -> int:
    """The GUID of a port as docs/fabric.md describes it: 02cc, the key, the rail, the rank, the VF."""
    return 0x02CC << 48 | pkey << 32 | rank << 8


def end(site: KeyedSite, lease: Lease, *nodes: str) -> None:
    for node in nodes:
        site.service.take(lease.generation.job_id, lease.generation.restart, node)
    site.service.end(lease.generation.job_id, None)
    for node in nodes:
        site.acknowledge(lease, node)


def test_members_share_a_key_and_have_ports_of_their_own(site: KeyedSite) -> None:
    one, two = site.member(1, "n1"), site.member(2, "n1", "n2")
    other, alone = site.member(3, "n3", cluster="ray"), site.open(4, "n4", network="job")
    assert key(one) == key(two) == 0x1000
    assert [key(other), key(alone)] == [0x1001, 0x1002]
    assert site.tables == {
        guid(0x1000, 0): 0x1000,
        guid(0x1000, 1): 0x1000,
        guid(0x1000, 2): 0x1000,
        guid(0x1001, 0): 0x1001,
        guid(0x1002, 0): 0x1002,
    }


def test_a_member_that_ends_takes_only_its_ports_with_it(site: KeyedSite) -> None:
    one, two = site.member(1, "n1"), site.member(2, "n2")
    end(site, one, "n1")
    assert site.tables == {guid(0x1000, 1): 0x1000}
    # its GUID is not used again while it is in quarantine
    assert site.member(3, "n3").network.first_rank == 2
    site.now += QUARANTINE_S + 1
    assert site.member(4, "n4").network.first_rank == 0
    assert key(two) == 0x1000


def test_the_key_rests_when_the_last_member_has_ended(site: KeyedSite) -> None:
    one, two = site.member(1, "n1", cluster="dask:keep"), site.member(2, "n2")
    end(site, two, "n2")
    end(site, one, "n1")
    assert site.tables == {}
    assert {one.state.value for one in site.store.keys.snapshot().assignments} == {"quarantine"}
    assert key(site.member(3, "n3")) == 0x1001, "a key in quarantine is not used"


def test_all_components_of_a_heterogeneous_member_have_the_key(site: KeyedSite) -> None:
    other = site.member(1, "n5")
    parts = (
        Wanted(component(0, 2, cluster="dask"), allocation("n3"), identity(0)),
        Wanted(component(1, 2, cluster="dask"), allocation("n1", "n2"), identity(0)),
    )
    underlay = {f"n{place}": f"192.0.2.{place}" for place in range(1, 6)}
    head, rest = (record.lease for record in site.service.leases.opening.reserve_all(parts, underlay))
    assert key(head) == key(rest) == key(other)
    assert [lease.network.first_rank for lease in (other, head, rest)] == [0, 1, 2]


def test_a_member_without_room_on_the_key_waits(site: KeyedSite) -> None:
    site.member(1, "n1", "n2", "n3")
    with pytest.raises(ExhaustedError, match=r"0x1000 of the job's cluster takes no further guests.*3 of 4"):
        site.open(2, "n4", "n5", cluster="dask")
    assert [one.generation.job_id for one in site.store.clusters.members(1)] == [1]
