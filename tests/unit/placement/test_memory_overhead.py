# SPDX-License-Identifier: Apache-2.0
"""Memory outside of guests, and how long their start may take, as docs/memory.md has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from placement_rig import REQUEST, case_of, fitted, host

from vhpc_slurm.config import Config, Guests, Placement
from vhpc_slurm.config.network import Network
from vhpc_slurm.config.shares import Shares
from vhpc_slurm.device import HostDevice, NodeDevices, PassthroughDevice
from vhpc_slurm.errors import UserError
from vhpc_slurm.hardware import PciBar, PciFunction
from vhpc_slurm.model import GresAllocation, GuestPlan, HostInventory, JobRequest, NodeAllocation, NodePlan
from vhpc_slurm.placement import deadlines
from vhpc_slurm.placement.devices import Wanted
from vhpc_slurm.placement.overhead import outside_mib

DOCS = Path(__file__).parents[3] / "docs/memory.md"
GIB = 1 << 30


def gpu(number: int, bar: int = 128 * GIB) -> HostDevice:
    bars = (PciBar(1, bar, memory=True, wide=True, prefetchable=True),)
    place = PciFunction(
        f"0000:{number:02x}:00.0", 0x030200, 0x10DE, 0x2330, "vfio-pci", 0, (), f"pci0000:{number:02x}",
        iommu_group=number, reset_methods=("flr",), bars=bars,
    )  # fmt: skip
    return HostDevice(place.address, "gpu", place)


def test_the_example_of_the_manual_is_what_the_code_says() -> None:
    words = " ".join(DOCS.read_text().split())
    total, huge = re.search(r"= (\d+) MiB; in huge pages (\d+) MiB", words).groups()  # type: ignore[union-attr]
    wanted = Wanted(tuple(gpu(number) for number in range(1, 9)))
    for pages, expected in (("none", total), ("auto", total), ("2M", huge), ("1G", huge)):
        config = Config(placement=Placement(hugepages=pages))  # type: ignore[arg-type]
        assert outside_mib(512 * 1024, 64, wanted, REQUEST, config) == int(expected)


def test_passt_of_each_guest_counts_where_the_job_has_nat() -> None:
    config = Config(network=Network(allowed=("none", "nat"), default="nat"))
    without = replace(REQUEST, guests_per_node=2, network="none")
    # 2*16, and 1024 / 512
    for asked in (None, "nat", "job,nat"):
        more = outside_mib(1024, 2, Wanted(), replace(without, network=asked), config)
        assert more - outside_mib(1024, 2, Wanted(), without, config) == 34


@pytest.mark.parametrize(
    ("memory", "vcpus", "guests", "shares", "expected"),
    [
        # 128 + 2*8 + 2*2, and 1024 * 4 / 512
        (1024, 2, 1, Shares(), 156),
        # no share: 128 + 2*2, and 1024 * 2 / 512
        (1024, 2, 1, Shares(home=False, work_dir=False), 136),
        # two guests: 2*(128 + 3*8) + 2*4, and 4096 * 5 / 512
        (4096, 4, 2, Shares(site=("/scratch",)), 352),
    ],
)
def test_each_part_of_the_formula(
    memory: int, vcpus: int, guests: int, shares: Shares, expected: int
) -> None:
    request = replace(REQUEST, guests_per_node=guests)
    assert outside_mib(memory, vcpus, Wanted(), request, Config(shares=shares)) == expected


def test_the_largest_functions_of_a_pool_are_reckoned_with() -> None:
    pool = (gpu(1, 1 * GIB), gpu(2, 4 * GIB), gpu(3, 2 * GIB))
    config = Config(placement=Placement(hugepages="2M"), shares=Shares(home=False, work_dir=False))
    # 128, and 2 * (4 + 2) GiB / 512
    assert outside_mib(1024, 0, Wanted((), pool, 2), REQUEST, config) == 128 + 24


def planned(memory_mib: int, *, gpus: int = 0, request: JobRequest = REQUEST, reserve: int = 256) -> NodePlan:
    devices = tuple(gpu(number) for number in range(1, gpus + 1))
    there: HostInventory = replace(host(), pci=tuple(device.place for device in devices), address_bits=46)
    there = replace(there, cells=tuple(replace(cell, memory_mib=1 << 20) for cell in there.cells))
    gres = (GresAllocation("gpu", "", gpus, tuple(range(gpus))),) if gpus else ()
    allocation = NodeAllocation(there.node, (0, 1), memory_mib, gres)
    config = Config(guests=Guests(memory_reserve_mib=reserve))
    given = NodeDevices(tuple(device.key for device in devices))
    return fitted(case_of(allocation, there, request, devices=given), config)


def test_a_small_job_leaves_the_sites_reserve() -> None:
    assert planned(4096).reserve_mib == 256
    assert planned(4096).guests[0].memory_mib == 4096 - 256


def test_a_large_job_leaves_more_and_says_so() -> None:
    plan = planned(256 * 1024)
    # 128 + 2*8 + 2*2 and (262144 - 256) * 4 / 512
    assert plan.reserve_mib == 148 + 2046
    assert plan.guests[0].memory_mib == 256 * 1024 - 2194
    assert any("2194 MiB: this part of the job's memory stays outside" in note for note in plan.notes)
    assert planned(256 * 1024, reserve=0).reserve_mib == 0


@pytest.mark.promise("devices.memory")
def test_a_reserve_too_small_for_a_gpu_names_the_right_one() -> None:
    asked = replace(REQUEST, mem_reserve_mib=100)
    assert planned(4096, request=asked).reserve_mib == 100
    # 148, (4096 - 100) * 5 / 512, 2 * 128 GiB / 512
    needed = 148 + 39 + 512
    with pytest.raises(UserError, match=rf"--vhpc-mem-reserve=100M is too small .* {needed} MiB"):
        planned(4096, gpus=1, request=asked)
    enough = replace(REQUEST, mem_reserve_mib=needed)
    assert planned(4096, gpus=1, request=enough).reserve_mib == needed


def guest(memory_mib: int, *, page_kib: int = 0, gpus: int = 0) -> GuestPlan:
    one = planned(4096).guests[0]
    devices = tuple(PassthroughDevice(f"0000:0{n}:00.0", "gpu", 0, "") for n in range(gpus))
    return replace(one, memory_mib=memory_mib, hugepage_kib=page_kib, devices=devices)


def test_a_start_has_time_for_the_memory_that_is_touched_in_it() -> None:
    config = Guests(stage_timeout_s=60, boot_timeout_s=120)
    large = 360 * 1024
    assert deadlines.start_s(config, guest(large)) == 60
    assert deadlines.start_s(config, guest(large, page_kib=2048)) > 60 + 77  # the slowest published
    assert deadlines.start_s(config, guest(large, gpus=1)) > 60 + 125
    assert deadlines.boot_s(config, None, guest(4096)) == 120
    assert deadlines.boot_s(config, None, guest(4096, gpus=4)) == 360
    assert deadlines.boot_s(config, 30, guest(4096, gpus=4)) == 30
    assert deadlines.boot_s(config, 3600, guest(4096, gpus=4)) == 180 + 240
