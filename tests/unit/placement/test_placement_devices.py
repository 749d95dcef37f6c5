# SPDX-License-Identifier: Apache-2.0
"""GPUs and virtual functions: which, for which guest, and where the guest sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gpu_plans import ALL, CONFIG, GPUS, SOCKET_0, SOCKET_1, attempt, devices, gpu_host, gres, planned
from placement_rig import case_of, fitted

from vhpc_slurm.architecture import AARCH64, X86_64
from vhpc_slurm.config import Config, Devices, Placement
from vhpc_slurm.device import HostDevice, NodeDevices
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.hardware import PciBar, PciFunction, Reservation
from vhpc_slurm.model import GresAllocation, GuestPlan, HostInventory, NodeAllocation
from vhpc_slurm.placement import pci
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import fold

host = gpu_host
STRICT = Config(placement=Placement(devices="strict"))


def refused(host: HostInventory, cpu_ids: range, wanted: tuple[GresAllocation, ...], **how: Any) -> Refusal:
    result = attempt(host, cpu_ids, wanted, **how)
    assert isinstance(result, Refusal)
    return result


def addresses(guest: GuestPlan, role: str) -> list[str]:
    return [device.key for device in guest.devices if device.device_class == role]


FIRST_VF = {base: f"0000:{base + 5:02x}:00.1" for base in (0x08, 0x44, 0x80, 0xBC)}


# --- which -------------------------------------------------------------------


def test_gpus_are_the_very_ones_that_slurm_gave(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((0, 3))).guests
    assert addresses(guest, "gpu") == [GPUS[0], GPUS[3]]


@pytest.mark.parametrize(("gpu", "base"), [(0, 0x08), (1, 0x08), (2, 0x44), (3, 0x44)])
def test_a_vf_is_of_the_hca_at_the_gpus_own_switch(host: HostInventory, gpu: int, base: int) -> None:
    (guest,) = planned(host, SOCKET_0, gres((gpu,), 1)).guests
    assert addresses(guest, "vf") == [FIRST_VF[base]]


def test_each_gpu_gets_a_vf_near_it(host: HostInventory) -> None:
    (guest,) = planned(host, ALL, gres((0, 2, 4, 6), 4)).guests
    assert sorted(addresses(guest, "vf")) == sorted(FIRST_VF.values())


def test_vfs_spread_over_root_complexes(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((0, 1, 2), 2)).guests
    assert sorted(addresses(guest, "vf")) == [FIRST_VF[0x08], FIRST_VF[0x44]]
    (guest,) = planned(host, SOCKET_0, gres((0, 1), 2)).guests
    assert addresses(guest, "vf") == [FIRST_VF[0x08], "0000:0d:00.2"]


def test_without_gpus_a_vf_is_of_an_hca_at_the_jobs_cell(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_1, gres((), 2)).guests
    # two of them are of two HCAs, so that each has a port of its own
    assert addresses(guest, "vf") == [FIRST_VF[0x80], FIRST_VF[0xBC]]


def test_vfs_of_other_jobs_are_passed_over(host: HostInventory) -> None:
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, (FIRST_VF[0x08],))])
    (guest,) = planned(host, SOCKET_0, gres((0,), 1), usage=usage).guests
    assert addresses(guest, "vf") == ["0000:0d:00.2"]


def test_when_the_nearest_hca_is_used_up_the_cells_next_serves(host: HostInventory) -> None:
    taken = tuple(f"0000:0d:00.{n}" for n in range(1, 5))
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, taken)])
    (guest,) = planned(host, SOCKET_0, gres((0,), 1), usage=usage).guests
    assert addresses(guest, "vf") == [FIRST_VF[0x44]]


def test_quarantined_and_reserved_vfs_are_never_chosen(host: HostInventory) -> None:
    given = devices(host, quarantined=("0000:0d:00.1", "0000:0d:00.3"))
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, ("0000:0d:00.2",))])
    (guest,) = planned(host, SOCKET_0, gres((0,), 1), given=given, usage=usage).guests
    assert addresses(guest, "vf") == ["0000:0d:00.4"]


def test_a_site_without_devices_ignores_gres(host: HostInventory) -> None:
    allocation = NodeAllocation("n1", tuple(SOCKET_0), 4096, gres((99,), 99))
    (guest,) = fitted(case_of(allocation, host), CONFIG).guests
    assert (guest.devices, guest.controllers, guest.address_bits) == ((), (), 0)


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "given", "kind", "says"),
    [
        ((8,), {}, NodeError, "GPU 8 on n1: the GPU map has 8 entries"),
        ((0,), {"gpus": ("0000:ee:00.0",)}, NodeError, "0000:ee:00.0: it is not a PCI function"),
        ((0,), {"gpus": ("0000:0d:00.0",)}, NodeError, "of class 020700, not a GPU"),
        ((0, 1), {"gpus": (GPUS[0], GPUS[0])}, NodeError, "allocated twice"),
        ((0,), {"quarantined": (GPUS[0],)}, NodeError, "is quarantined"),
    ],
)
def test_a_gpu_that_cannot_be_given_is_the_nodes_fault(
    host: HostInventory, wanted: tuple[int, ...], given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    error = refused(host, SOCKET_0, gres(wanted), given=devices(host, **given)).error()
    assert isinstance(error, kind)
    assert says in error.line()


def test_what_the_site_names_may_be_of_any_class(host: HostInventory) -> None:
    (hca,) = (function for function in host.pci if function.address == "0000:0d:00.0")
    config = Config(devices=Devices(allow=(f"{hca.vendor:04x}:{hca.device:04x}",)))
    given = devices(host, gpus=(hca.address,))
    (guest,) = planned(host, SOCKET_0, gres((0,)), given=given, config=config).guests
    assert addresses(guest, "gpu") == [hca.address]


def test_gpus_without_indexes_are_the_sites_fault(host: HostInventory) -> None:
    error = refused(host, SOCKET_0, (GresAllocation("gpu", "", 2),)).error()
    assert isinstance(error, NodeError)
    assert "set File= for each GPU in gres.conf" in error.line()


def test_a_device_that_another_job_holds_is_not_given_twice(host: HostInventory) -> None:
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, (GPUS[0],))])
    error = refused(host, SOCKET_0, gres((0,)), usage=usage).error()
    assert isinstance(error, FabricError)
    assert "held by a guest of 7.0.0123abcd" in error.line()


def test_without_an_iommu_nothing_is_passed_through(host: HostInventory) -> None:
    off = replace(host, pci=tuple(replace(function, iommu_group=None) for function in host.pci))
    error = refused(off, SOCKET_0, gres((0,), 1)).error()
    assert isinstance(error, NodeError)
    assert "intel_iommu=on" in error.line()
    assert "1 virtual functions on n1, 0 are free" in error.line()


def test_more_vfs_than_a_node_has_is_the_users_mistake(host: HostInventory) -> None:
    error = refused(host, SOCKET_0, (), vfs=17).error()
    assert isinstance(error, UserError)
    assert "--vhpc-vfs=17 is more than a node has: n1 has 16 in all" in error.line()


def test_more_vfs_than_free_is_a_node_error(host: HostInventory) -> None:
    held = tuple(f.address for f in host.pci if f.physfn)[:15]
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, held)])
    error = refused(host, SOCKET_0, gres((), 2), usage=usage).error()
    assert isinstance(error, NodeError)
    assert "needs 2 virtual functions on n1, 1 are free: of 16, 15 are held" in error.line()


def test_vfs_not_counted_by_slurm_cost_no_node(host: HostInventory) -> None:
    all_vfs = tuple(f.address for f in host.pci if f.physfn)
    usage = fold([Reservation("7.0.0123abcd", 0, (), (), 0, all_vfs[:15])])
    error = refused(host, SOCKET_0, (), vfs=2, usage=usage).error()
    assert isinstance(error, FabricError)
    assert "of 16, 15 are held by other jobs, 0 cannot be used" in error.line()
    good_one = NodeDevices((), all_vfs[1:])
    error = refused(host, SOCKET_0, (), vfs=2, given=good_one).error()
    assert isinstance(error, UserError)
    assert "of 16, 0 are held by other jobs, 15 cannot be used" in error.line()


@pytest.mark.parametrize(("asked", "says"), [(3, "more than Slurm allocated: 2"), (-1, "is negative")])
def test_a_number_of_vfs_that_cannot_be_is_the_users_mistake(
    host: HostInventory, asked: int, says: str
) -> None:
    error = refused(host, SOCKET_0, gres((), 2), vfs=asked).error()
    assert isinstance(error, UserError)
    assert says in error.line()


def test_fewer_vfs_than_allocated_may_be_asked_for(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((), 2), vfs=1).guests
    assert len(guest.devices) == 1


def test_a_device_of_another_cell_is_noted_or_refused(host: HostInventory) -> None:
    line = "device 0000:83:00.0 is at NUMA cell 1, guest 0 of n1 runs in 0"
    assert line in planned(host, SOCKET_0, gres((4,))).notes
    error = refused(host, SOCKET_0, gres((4,)), config=STRICT).error()
    assert isinstance(error, UserError)
    assert line in error.line()
    assert "enforce-binding" in error.line()


def test_all_reasons_are_told_together(host: HostInventory) -> None:
    off = replace(host, pci=tuple(replace(function, iommu_group=None) for function in host.pci))
    result = refused(off, range(32, 34), gres((0, 9)), memory_mib=0)
    lines = " ".join(reason.line() for reason in result.reasons)
    for part in ("CPU ids 32-33", "no memory for the job", "GPU map has 8", "no IOMMU group"):
        assert part in lines


# --- where the guest sees them -----------------------------------------------


def models(guest: GuestPlan) -> list[tuple[int, str, int, int]]:
    return [(c.index, c.model, c.parent, c.slot) for c in guest.controllers]


def test_gpu_and_hca_that_share_a_switch_share_one_in_the_guest(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((0,), 1)).guests
    assert models(guest) == [
        (1, "pcie-expander-bus", 0, 0),
        (2, "pcie-root-port", 1, 0),
        (3, "pcie-switch-upstream-port", 2, 0),
        (4, "pcie-switch-downstream-port", 3, 0),
        (5, "pcie-switch-downstream-port", 3, 1),
    ]
    assert [(d.key, d.device_class, d.port) for d in guest.devices] == [
        (GPUS[0], "gpu", 4),
        (FIRST_VF[0x08], "vf", 5),
    ]


def test_a_device_alone_sits_in_a_root_port(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((0,))).guests
    assert models(guest) == [(1, "pcie-expander-bus", 0, 0), (2, "pcie-root-port", 1, 0)]
    assert guest.devices[0].port == 2


def test_each_root_complex_has_an_expander_bus_at_its_guest_cell(host: HostInventory) -> None:
    (guest,) = planned(host, ALL, gres((0, 2, 4, 6))).guests
    expanders = [c for c in guest.controllers if c.model == "pcie-expander-bus"]
    assert [expander.cell for expander in expanders] == [0, 0, 1, 1]
    # each needs its own bus and one for its port; the last buses are theirs
    assert [expander.bus_nr for expander in expanders] == [248, 250, 252, 254]


def test_a_device_of_an_absent_cell_is_shown_at_the_nearest(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_1, gres((0,))).guests
    assert [cell.host_cell for cell in guest.cells] == [1]
    assert guest.controllers[0].cell == 0


def test_the_guest_counts_devices_in_the_order_of_the_plan(host: HostInventory) -> None:
    """PCI buses are numbered depth first (PCI Firmware Specification); so by bus of each device's port."""
    (guest,) = planned(host, ALL, gres(tuple(range(8)), 4)).guests
    children: dict[int, list[int]] = {}
    for controller in guest.controllers:
        children.setdefault(controller.parent, []).append(controller.index)
    order: list[int] = []

    def walk(index: int) -> None:
        order.append(index)
        for child in sorted(children.get(index, []), key=lambda c: guest.controllers[c - 1].slot):
            walk(child)

    for expander in sorted((c for c in guest.controllers if not c.parent), key=lambda c: c.bus_nr):
        walk(expander.index)
    ports = [device.port for device in guest.devices]
    assert ports == sorted(ports, key=order.index)


def function(
    address: str, bridges: tuple[str, ...] = (), root: str = "pci0000:00", bar: int = 0
) -> PciFunction:
    bars = (PciBar(0, bar, memory=True, wide=True, prefetchable=True),) if bar else ()
    return PciFunction(address, 0x030200, 1, 1, "", 0, (), root, bridges, bars=bars)


def of_class(name: str, functions: Sequence[PciFunction]) -> list[HostDevice]:
    return [HostDevice(one.address, name, one) for one in functions]


def lay_out(*functions: PciFunction) -> pci.PciLayout:
    errors: list[VhpcError] = []
    layout = pci.lay_out(of_class("gpu", functions), lambda cell: cell, errors)
    assert layout is not None, errors
    return layout


def test_nested_switches_are_mirrored_where_they_part_devices() -> None:
    outer = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0")
    one = function("0000:0a:00.0", (*outer, "0000:04:00.0", "0000:05:00.0"))
    two = function("0000:0b:00.0", (*outer, "0000:04:00.0", "0000:05:01.0"))
    three = function("0000:0c:00.0", (*outer[:2], "0000:03:01.0"))
    layout = lay_out(one, two, three)
    ups = [c for c in layout.controllers if c.model == "pcie-switch-upstream-port"]
    assert len(ups) == 2
    inner = next(up for up in ups if layout.controllers[up.parent - 1].model == "pcie-switch-downstream-port")
    below = {c.index for c in layout.controllers if c.parent == inner.index}
    assert {d.key for d in layout.devices if d.port in below} == {one.address, two.address}


def test_a_switch_above_another_that_parts_nothing_is_left_out() -> None:
    outer = ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0")
    layout = lay_out(
        function("0000:0a:00.0", (*outer, "0000:05:00.0")), function("0000:0b:00.0", (*outer, "0000:05:01.0"))
    )
    assert sum(c.model == "pcie-switch-upstream-port" for c in layout.controllers) == 1


def test_more_devices_than_a_bus_has_slots_are_refused() -> None:
    many = [function(f"0000:{bus:02x}:00.0") for bus in range(33)]
    errors: list[VhpcError] = []
    layout = pci.lay_out(of_class("vf", many), lambda _: 0, errors)
    assert layout is None
    assert "do not fit" in errors[0].line()
    errors.clear()
    assert pci.lay_out(of_class("vf", many[:32]), lambda _: 0, errors) is not None
    assert errors == []


# --- address space -----------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("bars", "hole"),
    [
        ([], 0),
        ([16 * GIB], 0),
        ([32 * GIB], 0),
        ([64 * GIB], 64 * GIB),
        ([32 * GIB, 32 * GIB], 64 * GIB),
        ([64 * GIB, 64 * GIB, 64 * GIB], 256 * GIB),
        ([128 * GIB] * 8, 1024 * GIB),
    ],
)
def test_the_hole_holds_all_large_bars(bars: list[int], hole: int) -> None:
    functions = [function(f"0000:{n:02x}:00.0", bar=bar) for n, bar in enumerate(bars, 1)]
    assert pci.hole_bytes(of_class("gpu", functions), X86_64) == hole


@pytest.mark.parametrize(
    ("memory_mib", "hole", "bits"),
    [
        (8 * 1024, 0, 36),  # memory up to 12 GiB, QEMU's hole from 32 to 64 GiB
        (28 * 1024, 0, 36),  # memory up to 32 GiB exactly
        (29 * 1024, 0, 37),  # memory up to 33 GiB, the hole from 64 to 96 GiB
        (768 * 1024, 512 * GIB, 41),  # four GPUs of 94 GiB and 768 GiB: 40 bits are known not to do
        (2048 * 1024, 4096 * GIB, 43),
    ],
)
def test_address_bits_hold_memory_and_the_hole_behind_it(memory_mib: int, hole: int, bits: int) -> None:
    assert pci.address_bits(memory_mib, hole, X86_64) == bits


@pytest.mark.parametrize(("count", "fits"), [(4, True), (5, False)])
def test_an_arm_machine_has_512_gib_for_bars(host: HostInventory, count: int, fits: bool) -> None:
    """QEMU's docs/system/arm/virt.rst, highmem-mmio-size, which libvirt cannot set."""
    functions = [function(f"0000:{n:02x}:00.0", bar=128 * GIB) for n in range(1, count + 1)]
    hole = pci.hole_bytes(of_class("gpu", functions), AARCH64)
    reasons = pci.check_bits(1024, hole, replace(host, kvm=True, address_bits=0), AARCH64)
    assert bool(reasons) != fits
    assert fits or "libvirt gives a machine of aarch64 512 GiB" in reasons[0].line()


def test_bars_beyond_the_cpus_address_space_are_refused(host: HostInventory) -> None:
    small = replace(host, address_bits=39)
    error = refused(small, ALL, gres((0, 1, 2, 3))).error()
    assert isinstance(error, NodeError)
    # four GPUs of 128 GiB and a little more: each needs a window of 256 GiB
    assert "1024 GiB of device BARs need 41 address bits: the CPU of n1 has 39" in error.line()
    (guest,) = planned(host, ALL, gres((0, 1, 2, 3))).guests
    assert (guest.pcihole64_gib, guest.address_bits) == (1024, 41)


def test_software_emulation_has_40_address_bits(host: HostInventory) -> None:
    error = refused(replace(host, kvm=False), ALL, gres((0, 1, 2, 3))).error()
    assert "QEMU's software emulation has 40" in error.line()


# --- several guests ----------------------------------------------------------


def test_guests_on_a_node_share_gpus_and_vfs_by_nearness(host: HostInventory) -> None:
    result = planned(host, ALL, gres(tuple(range(8)), 4), guests_per_node=4)
    assert [guest.hostname for guest in result.guests] == ["n1-g0", "n1-g1", "n1-g2", "n1-g3"]
    for guest in result.guests:
        (cell,) = {cell.host_cell for cell in guest.cells}
        assert {device.host_cell for device in guest.devices} == {cell}
        assert len(addresses(guest, "gpu")) == 2
        assert len(addresses(guest, "vf")) == 1
    given = [device.key for guest in result.guests for device in guest.devices]
    assert len(given) == len(set(given)) == 12


def test_guests_that_get_unequal_numbers_of_devices_are_noted(host: HostInventory) -> None:
    result = planned(host, ALL, gres((0, 1, 2)), guests_per_node=2)
    assert sorted(len(guest.devices) for guest in result.guests) == [1, 2]
    assert "3 GPUs on 2 guests: some have one more than others" in result.notes
