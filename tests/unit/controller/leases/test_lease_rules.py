# SPDX-License-Identifier: Apache-2.0
"""The rules of leases: what a job may have, and which states follow each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_lab import identity, request
from lease_records import LEASE

from vhpc_slurm.config import Config, Guests, Placement
from vhpc_slurm.config.disks import Disks
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.model import (
    Allocation,
    GresAllocation,
    LeaseRecord,
    LeaseState,
    NodeAllocation,
)


def test_a_lease_goes_only_forward() -> None:
    allowed = {
        (a, b)
        for a in LeaseState
        for b in LeaseState
        if _moves(LeaseRecord(replace(LEASE, state=a), 0, 0, ()), b)
    }
    assert allowed == {
        (LeaseState.RESERVED, LeaseState.READY),
        (LeaseState.RESERVED, LeaseState.REFUSED),
        (LeaseState.RESERVED, LeaseState.ENDING),
        (LeaseState.READY, LeaseState.ENDING),
        (LeaseState.REFUSED, LeaseState.ENDING),
        (LeaseState.ENDING, LeaseState.RELEASED),
    }


def _moves(record: LeaseRecord, to: LeaseState) -> bool:
    try:
        return rules.move(record, to, 1.0).lease.state is to
    except rules.TransitionError:
        return False


def large(memory_mib: int, *gres: GresAllocation) -> Allocation:
    return Allocation((NodeAllocation("n1", (0, 1), memory_mib, gres),))


@pytest.mark.parametrize(
    ("memory_mib", "reserve", "line"),
    [
        (768, None, ""),
        (767, None, "leaving 511 (ask for --mem=768M or more)"),
        (512, 0, ""),
        (1024, 600, "1024 MiB on n1, of which 600 MiB stay outside the guest, leaving 424"),
        (100, None, "leaving 0 (ask for --mem=768M or more)"),
        (0, None, "Slurm accounts no memory"),
    ],
)
def test_too_little_memory_is_refused_with_the_numbers(
    memory_mib: int, reserve: int | None, line: str
) -> None:
    job = request(mem_reserve_mib=reserve)
    found = rules.misfit(job, large(memory_mib), identity(512), Config())
    assert line in found
    assert bool(line) == bool(found)


def test_the_reserve_of_a_large_job_matches_its_nodes() -> None:
    # docs/memory.md: 128 + 2 shares * 8 + 2 vCPUs * 2 + (262144 - 256) * 4 / 512 = 2194
    config, job = Config(), request()
    most = 262144 - 2194
    assert rules.misfit(job, large(262144), identity(most), config) == ""
    found = rules.misfit(job, large(262144), identity(most + 1), config)
    assert "of which 2194 MiB stay outside the guest, leaving 259950" in found
    # the tables of the IOMMU: one viewer more
    gpu = GresAllocation("gpu", "", 1, (0,))
    assert "of which 2705 MiB" in rules.misfit(job, large(262144, gpu), identity(most), config)
    # huge pages need no tables to speak of
    huge = Config(placement=Placement(hugepages="1G"))
    assert rules.misfit(job, large(262144), identity(262144 - 256), huge) == ""
    # and a site that wants nothing outside gets that
    none = Config(guests=Guests(memory_reserve_mib=0))
    assert rules.misfit(job, large(262144), identity(262144), none) == ""


def test_a_user_reserve_that_is_too_small_is_refused_early() -> None:
    gpu = GresAllocation("gpu", "", 1, (0,))
    job = request(mem_reserve_mib=100)
    # 148 + (4096 - 100) * 5 / 512
    line = rules.misfit(job, large(4096, gpu), identity(512), Config())
    assert line.startswith("--vhpc-mem-reserve=100M is too small for a job with devices")
    assert "187 MiB" in line
    assert rules.misfit(job, large(4096), identity(512), Config()) == ""


@pytest.mark.promise("user.image")
def test_a_boot_may_not_take_longer_than_the_site_allows() -> None:
    gpus = GresAllocation("gpu", "h200", 4, (0, 1, 2, 3))
    site = Config(guests=Guests(boot_timeout_s=100, boot_timeout_max_s=200))
    long = replace(request(), timeout_s=201)
    line = rules.impatient(long, large(4096), site)
    assert line.startswith("--vhpc-timeout=201 is longer than a boot may take here: 200 s (ask for less")
    assert rules.impatient(replace(long, timeout_s=200), large(4096), site) == ""
    assert rules.impatient(request(), large(4096), site) == ""
    # the sizing of their BARs: docs/memory.md
    four = replace(long, timeout_s=440)
    assert rules.impatient(four, large(4096, gpus), site) == ""
    assert "320 s" in rules.impatient(replace(four, guests_per_node=2), large(4096, gpus), site)
    # whom the site gives more by itself may ask for as much
    slow = Config(guests=Guests(boot_timeout_s=300, boot_timeout_max_s=200))
    assert rules.impatient(replace(long, timeout_s=300), large(4096), slow) == ""


def test_each_of_several_guests_has_its_share() -> None:
    two = replace(request(), guests_per_node=2)
    # 2 * (128 + 16) + 2 * 2 + (4096 - 256) * 4 / 512 = 322
    assert rules.misfit(two, large(4096), identity((4096 - 322) // 2), Config()) == ""
    found = rules.misfit(two, large(4096), identity((4096 - 322) // 2 + 1), Config())
    assert "322 MiB stay outside its 2 guests, leaving 1887 for each (ask for --mem=4098M or more)" in found


def test_the_smallest_node_decides() -> None:
    nodes = Allocation(
        (NodeAllocation("n1", (0,), 4096), NodeAllocation("n2", (0,), 300), NodeAllocation("n3", (0,), 4096))
    )
    assert " on n2," in rules.misfit(request(), nodes, identity(256), Config())


def test_a_disk_has_at_most_the_size_that_the_site_permits() -> None:
    site = Config(disks=Disks(max_mib=20480))
    job = replace(request(), disk_mib=20481)
    line = rules.oversized(job, site)
    assert line.startswith("--vhpc-disk=20481M is larger than a guest's disk may be here: 20480 MiB (ask for")
    assert rules.oversized(replace(job, disk_mib=20480), site) == ""
    assert rules.oversized(request(), Config()) == ""
    none = rules.oversized(replace(job, disk_mib=64), Config())
    assert none.startswith("--vhpc-disk is not allowed here")


@pytest.mark.parametrize(
    ("mount", "folder"),
    [
        ("", ""),
        ("/local", ""),
        ("/software", "/software"),
        ("/software/x86", "/software"),
        ("/data", "/data/sets"),
        ("/data/other", ""),
        ("/soft", ""),
    ],
)
def test_a_disk_is_not_mounted_where_all_guests_have_a_folder(mount: str, folder: str) -> None:
    site = Config(shares=Shares(site=("/software/", "/data/sets")))
    line = rules.misplaced(request(disk_mib=64, disk_mount=mount), site)
    assert bool(line) is bool(folder)
    assert not folder or f"because guests have the shared folder {folder} (--vhpc-disk=" in line
    none = Config(shares=site.shares, policy=(Rule(name="a", shares=("home",)),))
    assert rules.misplaced(request(disk_mib=64, disk_mount=mount), none) == "", "they do not have it"


@pytest.mark.promise("mount.folder")
@pytest.mark.parametrize(
    ("mounts", "shares", "says"),
    [
        ("/home/a/x:/x", None, ""),
        ("/home/a/x:/x", "site", "/home/a/x is in no folder"),
        ("/home/a/x:/x", "none", "they have none"),
        ("/software/a:/x:ro", "site", ""),
        ("/softwares/a:/x:ro", "site", "(they have /software;"),
        ("/home/a/x:/x,/home/a/x:/software/x:ro", None, "/home/a/x:/software/x:ro: guests have the shared"),
        ("/home/a/x:/local/a", None, ""),
        ("/home/a/x:/local", None, "the disk is mounted at /local"),
    ],
)
def test_a_folder_that_guests_cannot_have_is_refused(mounts: str, shares: str | None, says: str) -> None:
    site = Config(shares=Shares(site=("/software",)))
    line = rules.misplaced(request(disk_mib=64, disk_mount="/local", mounts=mounts, shares=shares), site)
    assert says in line
    assert bool(says) is bool(line)
