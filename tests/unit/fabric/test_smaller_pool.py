# SPDX-License-Identifier: Apache-2.0
"""A site takes a key out of the pool (fabric.pkey_reserved) while a job has it, and restarts vhpcd."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_site import Site as OpensmSite
from fabric_lab import DEFAULT, GUIDS, HAVE_SIMULATOR, NEEDED, SimulatedFabric, may_lose_packets, sets
from fake_ufm import FakeUfm
from key_fabric import an_assignment
from ufm_site import ALICE, MARK, Site, soon_again, ufm_server, ufm_site

from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.fabric.static_pool import StaticPool
from vhpc_slurm.model import LeaseState

_soon_again = soon_again
ufm = ufm_server
site = ufm_site

pytestmark = [pytest.mark.long, may_lose_packets]
needs_simulator = pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED)

FOREIGN = "0002c90300000001"
TAKEN_OUT = frozenset({0x1000})


# --- UFM ----------------------------------------------------------------------------------------


@pytest.mark.promise("fabric.pool")
def test_ufm_removes_a_key_that_left_the_pool_with_its_job(site: Site, ufm: FakeUfm, tmp_path: Path) -> None:
    assert site.open(1, "n1", "n2").lease.network.pkey == 0x1000
    again = Site(ufm, tmp_path, reserved=TAKEN_OUT)
    again.backend.validate(again.snapshot)
    assert ufm.members(0x1000) == ALICE, "the job runs on"
    again.service.end(1, 0)
    assert again.states() == {1: "quarantine"}
    assert set(ufm.keys) == {MARK}
    second = again.open(2, "n1").lease
    assert (second.state, second.network.pkey) == (LeaseState.READY, 0x1001)
    assert again.backend.audit(again.snapshot) == ()


def test_a_start_survives_a_key_that_left_the_pool(site: Site, ufm: FakeUfm, tmp_path: Path) -> None:
    site.open(1, "n1", "n2")
    again = Site(ufm, tmp_path, reserved=TAKEN_OUT, timeout_s=1.0)
    ufm.fail("DELETE", "accept", times=99)
    again.service.end(1, 0)
    assert again.states() == {1: "draining"}
    assert again.open(2, "n1").lease.state is LeaseState.READY
    assert [one.what for one in again.backend.audit(again.service.batches.told or again.snapshot)] == [
        "UFM: key 0x1000 has 2 too many"
    ]
    ufm.faults.clear()
    again.service.settle()
    assert again.states() == {1: "quarantine", 2: "active"}


@pytest.mark.promise("fabric.pool")
def test_a_site_that_reserves_its_own_key_gets_it(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path, timeout_s=1.0)
    site.open(1, "n1")
    ufm.keys[0x1000].ports[FOREIGN] = ("full", False)
    (finding,) = site.backend.audit(site.snapshot)
    assert finding.open
    assert finding.what.endswith("is on key 0x1000 of the pool")
    again = Site(ufm, tmp_path, reserved=TAKEN_OUT)  # as the hint of a start on that key has it
    (finding,) = again.backend.audit(again.snapshot)
    assert finding.open
    assert finding.what.endswith("is on key 0x1000 of a job")
    again.service.end(1, 0)
    assert again.states() == {1: "quarantine"}
    assert ufm.members(0x1000) == {int(FOREIGN, 16)}
    assert again.backend.audit(again.snapshot) == ()


def test_a_lost_port_of_a_job_returns_outside_the_pool(site: Site, ufm: FakeUfm, tmp_path: Path) -> None:
    site.open(1, "n1", "n2")
    again = Site(ufm, tmp_path, reserved=TAKEN_OUT)
    ufm.keys[0x1000].ports.pop("02cc100000000000")
    assert [one.what for one in again.backend.audit(again.snapshot)] == ["UFM: key 0x1000 lacks 1 ports"]
    again.backend.repair(again.snapshot)
    assert ufm.members(0x1000) == ALICE


# --- OpenSM, and a static pool --------------------------------------------------------------------


@pytest.mark.promise("fabric.pool")
@needs_simulator
def test_a_site_s_partition_waits_until_the_job_has_ended(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    fabric.replace(DEFAULT)
    fabric.sweep()
    OpensmSite(fabric, reader, tmp_path / "db").open(1, "n1")
    storage = IbPartition("storage", 0x1000, ((f"{GUIDS[5]:#018x}", True),))
    site = OpensmSite(fabric, reader, tmp_path / "db", site=(storage,), reserved=TAKEN_OUT)
    site.backend.validate(site.store.keys.snapshot())
    assert site.open(2, "n1").lease.network.pkey == 0x1001
    assert sets(fabric)[GUIDS[5]] == {0x7FFF}, "the site's port is not joined to the job"
    site.service.end(1, 0)
    assert site.states() == {1: "quarantine", 2: "active"}
    assert sets(fabric)[GUIDS[5]] == {0x7FFF, 0x9000}


@needs_simulator
def test_a_job_that_lost_a_key_of_a_static_pool_is_found(
    fabric: SimulatedFabric, reader: FabricReader
) -> None:
    """The site has had the smaller pool installed while the job ran."""
    pool = KeyPool(0x1001, 0x1002)
    declared = partitions.of_pool(pool, ranks=4, rails=1, vfs=1)
    fabric.replace(partitions.render(declared, 0))
    fabric.sweep()
    backend = StaticPool(KeyPolicy(pool), Readback(reader, 5.0), declared, (), fabric.partitions)
    job = an_assignment(1, ranks=1, state=KeyState.ACTIVE)
    (finding,) = backend.audit(KeySnapshot(1, (job,)))
    assert (finding.port_guid, finding.lost, finding.open) == (GUIDS[0], True, False)
    assert backend.audit(KeySnapshot(2)) == ()
