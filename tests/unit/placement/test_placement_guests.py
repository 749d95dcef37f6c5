# SPDX-License-Identifier: Apache-2.0
"""Several guests, several NUMA cells, huge pages, and what others hold: each test is one situation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_rig import REQUEST, case_of, fitted, host

from pace import examples
from vhpc_slurm.config import Config, Guests, Host, Placement
from vhpc_slurm.errors import FabricError, NodeError, UserError, VhpcError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.model import HostCell, HostCpu, HostInventory, MemoryBinding, NodeAllocation, NodePlan
from vhpc_slurm.placement.plan import Refusal, fit
from vhpc_slurm.placement.split import share, split_cpus
from vhpc_slurm.placement.usage import NOTHING, Usage, fold


def attempt(
    machine: HostInventory,
    cpu_ids: range,
    memory_mib: int = 4096,
    *,
    usage: Usage = NOTHING,
    guests: int = 1,
    reserve: int = 0,
    **placement: Any,
) -> NodePlan | Refusal:
    config = Config(guests=Guests(memory_reserve_mib=reserve), placement=Placement(**placement))
    request = replace(REQUEST, guests_per_node=guests)
    allocation = NodeAllocation("n1", tuple(cpu_ids), memory_mib)
    return fit(case_of(allocation, machine, request, usage=usage), config)


def planned(machine: HostInventory, cpu_ids: range, memory_mib: int = 4096, **how: Any) -> NodePlan:
    result = attempt(machine, cpu_ids, memory_mib, **how)
    assert isinstance(result, NodePlan), result.error().line()
    return result


def error(
    machine: HostInventory, cpu_ids: range, memory_mib: int = 4096, **how: Any
) -> UserError | NodeError | FabricError:
    result = attempt(machine, cpu_ids, memory_mib, **how)
    assert isinstance(result, Refusal)
    return result.error()


def far(machine: HostInventory, rows: list[list[int]]) -> HostInventory:
    """The machine with these distances."""
    cells = [
        replace(cell, distances=tuple(enumerate(row))) for cell, row in zip(machine.cells, rows, strict=True)
    ]
    return replace(machine, cells=tuple(cells))


def pools(machine: HostInventory, *pages: tuple[int, int, int]) -> HostInventory:
    """The machine with these huge pages in each cell."""
    return replace(machine, cells=tuple(replace(cell, hugepages=pages) for cell in machine.cells))


# --- cells -------------------------------------------------------------------


def test_each_used_host_cell_is_a_guest_cell_with_its_memory() -> None:
    guest = planned(host(sockets=2, cores=4), range(16), 8192).guests[0]
    assert [(c.cell, c.host_cell, c.vcpus, c.memory_mib) for c in guest.cells] == [
        (0, 0, tuple(range(8)), 4096),
        (1, 1, tuple(range(8, 16)), 4096),
    ]
    assert [pin.cell for pin in guest.pins] == [0] * 8 + [1] * 8
    assert guest.memory_binding is MemoryBinding.STRICT


def test_memory_follows_the_number_of_cpus_in_each_cell() -> None:
    guest = planned(host(sockets=2, cores=4), range(12), 6000).guests[0]
    assert [cell.memory_mib for cell in guest.cells] == [4000, 2000]


def test_distances_are_the_hosts() -> None:
    machine = far(host(sockets=3, cores=1), [[10, 21, 31], [21, 10, 41], [31, 41, 10]])
    guest = planned(machine, range(2, 6)).guests[0]
    assert [cell.host_cell for cell in guest.cells] == [1, 2]
    assert [cell.distances for cell in guest.cells] == [((0, 10), (1, 41)), ((0, 41), (1, 10))]


def test_distances_outside_libvirts_range_are_clamped() -> None:
    machine = far(host(sockets=2, cores=1), [[10, 10], [255, 10]])
    guest = planned(machine, range(4)).guests[0]
    assert [cell.distances for cell in guest.cells] == [((0, 10), (1, 11)), ((0, 254), (1, 10))]


def test_memory_that_is_too_much_for_one_cell_goes_to_the_other() -> None:
    machine = host(sockets=2, cores=4)
    machine = replace(machine, cells=(replace(machine.cells[0], memory_mib=1024), machine.cells[1]))
    guest = planned(machine, range(16), 8192).guests[0]
    assert [cell.memory_mib for cell in guest.cells] == [1024, 7168]
    assert guest.memory_binding is MemoryBinding.STRICT


def test_cpus_without_memory_join_the_nearest_cell_with_some() -> None:
    machine = far(host(sockets=3, cores=1), [[10, 31, 21], [31, 10, 31], [21, 31, 10]])
    bare = replace(machine.cells[0], memory_mib=0)
    machine = replace(machine, cells=(bare, *machine.cells[1:]))
    guest = planned(machine, range(2)).guests[0]
    assert [(cell.host_cell, cell.nodeset) for cell in guest.cells] == [(2, (2,))]
    assert guest.memory_binding is MemoryBinding.PREFERRED  # the job has not all CPUs that live from it


def test_a_cell_of_memory_alone_is_no_guest_cell() -> None:
    machine = host(sockets=1, cores=2)
    machine = replace(machine, cells=(*machine.cells, HostCell(4, 65536, (), ((0, 20), (4, 10)))))
    guest = planned(machine, range(4)).guests[0]
    assert [cell.host_cell for cell in guest.cells] == [0]


def test_memory_of_a_gpu_is_no_memory_for_guests() -> None:
    """Neither for CPUs whose own cell has none, nor as a part of what the node has."""
    machine = far(host(sockets=2, cores=1), [[10, 31], [31, 10]])
    bare = replace(machine.cells[0], memory_mib=0, distances=((0, 10), (1, 31), (2, 15)))
    gpu = HostCell(2, 1 << 20, (), ((0, 15), (1, 31), (2, 10)), gpu="0000:0b:00.0")
    machine = replace(machine, cells=(bare, machine.cells[1], gpu))
    assert [cell.host_cell for cell in planned(machine, range(2)).guests[0].cells] == [1]
    fault = error(machine, range(4), machine.memory_mib + 4096)
    assert f"n1 has {machine.cells[1].memory_mib} MiB in all" in fault.line()
    offline = replace(machine, cpus=tuple(replace(cpu, cell=-1) for cpu in machine.cpus))
    assert [cell.nodeset for cell in planned(offline, range(4)).guests[0].cells] == [(0, 1)]


def test_an_offline_cells_cpus_leave_memory_to_first_touch() -> None:
    machine = host(sockets=2, cores=1)
    machine = replace(
        machine,
        cpus=tuple(replace(cpu, cell=-1 if cpu.cell == 0 else cpu.cell) for cpu in machine.cpus),
        cells=machine.cells[1:],
    )
    guest = planned(machine, range(4)).guests[0]
    assert guest.memory_binding is MemoryBinding.NONE
    assert [cell.nodeset for cell in guest.cells] == [(1,)]


def test_strict_memory_is_the_users_to_ask_for() -> None:
    fault = error(host(sockets=2, cores=2), range(2), memory="strict")
    assert isinstance(fault, UserError)
    assert "cannot be bound to NUMA cell 0" in fault.line()
    assert (
        planned(host(sockets=2, cores=2), range(4), memory="strict").guests[0].memory_binding
        is MemoryBinding.STRICT
    )


def test_parts_of_cores_are_refused_where_whole_ones_are_asked() -> None:
    fault = error(host(), range(3), cores="strict")
    assert isinstance(fault, NodeError)
    assert "siblings 5 are not allocated to the job" in fault.line()


# --- QEMU's own threads -------------------------------------------------------


def test_a_core_is_kept_for_qemu_where_the_site_says_so() -> None:
    guest = planned(host(cores=4), range(8), emulator_core=True).guests[0]
    assert guest.emulator_cpus == (3, 7)
    assert [pin.os_cpu for pin in guest.pins] == [0, 4, 1, 5, 2, 6]
    assert "a core of the job that the guest does not see" in guest.emulator_choice
    assert guest.memory_binding is MemoryBinding.STRICT  # the job still has all of the cell


def test_the_only_core_is_the_guests() -> None:
    guest = planned(host(), range(2), emulator_core=True).guests[0]
    assert len(guest.pins) == 2
    assert guest.emulator_choice == "the job's own CPUs 0,4"


def test_site_cpus_are_used_before_a_core_of_the_job() -> None:
    config = Config(host=Host(emulator_cpus="0,4"), placement=Placement(emulator_core=True))
    result = fitted(case_of(NodeAllocation("n1", tuple(range(2, 8)), 4096), host()), config)
    assert len(result.guests[0].pins) == 6


# --- several guests -----------------------------------------------------------


def shape(result: NodePlan) -> list[tuple[list[int], set[int], int]]:
    return [
        ([pin.os_cpu for pin in guest.pins], {cell.host_cell for cell in guest.cells}, guest.memory_mib)
        for guest in result.guests
    ]


def test_two_guests_on_two_sockets_have_one_each() -> None:
    result = planned(host(sockets=2, cores=2), range(8), guests=2)
    assert shape(result) == [([0, 4, 1, 5], {0}, 2048), ([2, 6, 3, 7], {1}, 2048)]
    assert {guest.memory_binding for guest in result.guests} == {MemoryBinding.STRICT}


def test_guests_of_different_size_fill_cells_unsplit() -> None:
    """Six and eight cores for four guests: two of three, two of four, whatever is taken first."""
    machine = host(sockets=2, cores=8, threads=1)
    result = planned(machine, range(2, 16), guests=4)
    assert [len(guest.pins) for guest in result.guests] == [3, 3, 4, 4]
    assert all(len(guest.cells) == 1 for guest in result.guests)
    assert "14 cores on 4 guests: 2 have one core more than the others" in result.notes


def test_a_guest_spans_cells_only_where_it_must() -> None:
    machine = host(sockets=2, cores=3, threads=1)
    result = planned(machine, range(6), guests=3)
    assert [len(guest.cells) for guest in result.guests] == [1, 2, 1]
    assert "1 of 3 guests span NUMA cells: the job's cores leave no other way" in result.notes


def test_a_guest_needs_a_whole_core() -> None:
    fault = error(host(cores=4), range(8), guests=5)
    assert isinstance(fault, UserError)
    assert "--vhpc-guests-per-node=5" in fault.line()
    assert "4 cores" in fault.line()


@pytest.mark.parametrize("guests", [0, -1])
def test_fewer_guests_than_one_are_the_users_mistake(guests: int) -> None:
    assert isinstance(error(host(), range(8), guests=guests), UserError)


def test_the_image_must_fit_the_smallest_guest() -> None:
    fault = error(host(cores=4), range(8), 1000, guests=4)
    assert isinstance(fault, UserError)
    assert "a guest on n1 has 250" in fault.line()
    assert "4 guests share the rest" in fault.line()
    assert "--mem=1536M" in fault.line()
    planned(host(cores=4), range(8), 1536, guests=4)


def test_things_are_shared_out_whole_and_completely() -> None:
    assert share(10, [1, 1, 1]) == [4, 3, 3]
    assert share(7, [4, 2, 1]) == [4, 2, 1]
    assert share(0, [3, 1]) == [0, 0]


def test_splitting_keeps_cores_whole_and_in_order() -> None:
    machine = host(sockets=2, cores=4)
    by_number = {cpu.os_cpu: cpu for cpu in machine.cpus}
    chosen = [by_number[cpu] for cpu in machine.abstract]
    parts, _ = split_cpus(chosen, 3, reasons := list[VhpcError]())
    assert not reasons
    assert [len({cpu.core for cpu in part}) for part in parts] == [3, 2, 3]
    for part in parts:
        assert [cpu.core for cpu in part] == sorted(cpu.core for cpu in part)


def most_whole(cells: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The most of these guests that fit whole into cells of so many cores: every way is tried."""
    if not sizes:
        return 0
    best = most_whole(cells, sizes[1:])
    for at, room in enumerate(cells):
        if room >= sizes[0]:
            left = (*cells[:at], room - sizes[0], *cells[at + 1 :])
            best = max(best, 1 + most_whole(left, sizes[1:]))
    return best


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_no_other_way_leaves_more_guests_whole(cells: list[int], data: st.DataObject) -> None:
    numbers = iter(range(sum(cells)))
    chosen = [
        HostCpu(n := next(numbers), n, 0, cell) for cell, cores in enumerate(cells) for _ in range(cores)
    ]
    guests = data.draw(st.integers(2, max(2, min(len(chosen), 6))))
    parts, _ = split_cpus(chosen, guests, reasons := list[VhpcError]())
    if reasons:
        assert guests > len(chosen)
        return
    whole = sum(len({cpu.cell for cpu in part}) == 1 for part in parts)
    assert whole == most_whole(tuple(cells), tuple(len(part) for part in parts))


# --- huge pages ---------------------------------------------------------------

M2, G1 = 2048, 1048576


def test_pages_of_1_gib_are_whole_in_each_cell() -> None:
    machine = pools(host(sockets=2, cores=4), (G1, 16, 16))
    result = planned(machine, range(16), 5500, hugepages="1G")
    guest = result.guests[0]
    assert (guest.hugepage_kib, guest.memory_mib) == (G1, 5120)
    assert [cell.memory_mib for cell in guest.cells] == [3072, 2048]


def test_huge_pages_are_bound_strictly_on_a_shared_cell() -> None:
    guest = planned(pools(host(), (M2, 4096, 4096)), range(2), hugepages="2M").guests[0]
    assert guest.memory_binding is MemoryBinding.STRICT


def test_too_few_pages_are_the_nodes_fault_with_the_numbers() -> None:
    fault = error(pools(host(), (M2, 1024, 700)), range(2), 2048, hugepages="2M")
    assert isinstance(fault, NodeError)
    assert "1024 pages of 2048 KiB are needed in NUMA cell 0 of n1" in fault.line()
    assert "its pool has 1024, 700 of them free" in fault.line()


def test_promised_untouched_pages_count_as_used() -> None:
    machine = pools(host(), (M2, 2048, 2048))
    usage = fold([Reservation("7.0.0123abcd", 0, (3, 7), ((0, 3072),), M2)])
    fault = error(machine, range(2), 2048, hugepages="2M", usage=usage)
    assert "512 of them not reserved" in fault.line()
    planned(machine, range(2), 1024, hugepages="2M", usage=usage)


def test_pages_that_others_than_guests_took_count_as_used_too() -> None:
    fault = error(pools(host(), (M2, 2048, 100)), range(2), 2048, hugepages="2M")
    assert "100 of them free" in fault.line()


def test_auto_takes_the_largest_pages_that_suffice() -> None:
    both = pools(host(), (M2, 4096, 4096), (G1, 4, 4))
    assert planned(both, range(8), 4096, hugepages="auto").guests[0].hugepage_kib == G1
    assert planned(both, range(8), 8192, hugepages="auto").guests[0].hugepage_kib == M2


def test_auto_takes_what_a_kernel_with_64_kib_pages_has() -> None:
    """Documentation/arch/arm64/hugetlbpage.rst: 2 MiB and 512 MiB, no 1 GiB."""
    arm = pools(host(), (M2, 4096, 4096), (524288, 10, 10))
    assert planned(arm, range(8), 4096, hugepages="auto").guests[0].hugepage_kib == 524288
    assert planned(arm, range(8), 8192, hugepages="auto").guests[0].hugepage_kib == M2
    assert planned(arm, range(8), 4096, hugepages="512M").guests[0].hugepage_kib == 524288


def test_auto_does_not_take_pages_that_waste_much() -> None:
    both = pools(host(), (M2, 4096, 4096), (G1, 4, 4))
    assert planned(both, range(8), 3500, hugepages="auto").guests[0].hugepage_kib == M2


def test_auto_falls_back_to_ordinary_pages_and_says_why() -> None:
    result = planned(pools(host(), (M2, 10, 10)), range(8), 4096, hugepages="auto")
    assert result.guests[0].hugepage_kib == 0
    assert any(note.startswith("no 2M pages: 2048 pages of 2048 KiB are needed") for note in result.notes)
    assert any(note.startswith("no 1G pages: ") for note in result.notes)


def test_uneven_memory_is_refused_where_rounding_is_off() -> None:
    machine = pools(host(), (G1, 16, 16))
    fault = error(machine, range(8), 4500, hugepages="1G", rounding="strict")
    assert isinstance(fault, UserError)
    assert "--mem=4096M or --mem=5120M" in fault.line()
    planned(machine, range(8), 4096, hugepages="1G", rounding="strict")


def test_an_image_too_large_after_rounding_is_told_the_next_page() -> None:
    fault = error(pools(host(), (G1, 16, 16)), range(8), 1100, hugepages="1G", reserve=256)
    assert isinstance(fault, UserError)
    assert "--mem=1280M" in fault.line()


# --- what others hold ----------------------------------------------------------


def test_cpus_of_another_jobs_guest_are_never_given_again() -> None:
    usage = fold([Reservation("7.0.0123abcd", 0, (1, 5), ((0, 1024),))])
    fault = error(host(), range(4), usage=usage)
    assert isinstance(fault, FabricError)  # the job is requeued, the node not drained
    assert "CPUs 1,5 are held by guests of 7.0.0123abcd" in fault.line()
    planned(host(), range(4, 8), usage=usage)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Reservation("7.0.0123abcd", 0, (1,), ()), Reservation("8.0.0123abcd", 0, (1,), ())),
        (
            Reservation("7.0.0123abcd", 0, (), (), 0, ("0000:0b:00.0",)),
            Reservation("7.0.0123abcd", 1, (), (), 0, ("0000:0b:00.0",)),
        ),
    ],
)
def test_a_double_reservation_is_an_error(first: Reservation, second: Reservation) -> None:
    with pytest.raises(NodeError, match="reserved twice"):
        fold([first, second])
