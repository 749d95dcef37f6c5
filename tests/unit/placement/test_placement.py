# SPDX-License-Identifier: Apache-2.0
"""Placement maps what Slurm allocated; each test is one situation of a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_rig import MANIFEST, REQUEST, case_of, fitted, host

from pace import examples
from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.cpulist import format_cpu_list, parse_cpu_list
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import (
    GuestTopology,
    HostCell,
    HostCpu,
    HostInventory,
    ImageManifest,
    JobRequest,
    MemoryBinding,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.placement.plan import Refusal, fit

CONFIG = Config()


def plan(
    machine: HostInventory,
    cpu_ids: tuple[int, ...],
    memory_mib: int = 4096,
    *,
    request: JobRequest = REQUEST,
    manifest: ImageManifest = MANIFEST,
    config: Config = CONFIG,
) -> NodePlan:
    allocation = NodeAllocation("n1", cpu_ids, memory_mib)
    return fitted(case_of(allocation, machine, request, manifest), config)


def pinned(result: NodePlan) -> list[int]:
    return [pin.os_cpu for pin in result.guests[0].pins]


def test_a_whole_core_becomes_a_guest_core_with_siblings() -> None:
    result = plan(host(), (2, 3))
    assert pinned(result) == [1, 5]
    assert result.guests[0].topology == GuestTopology(1, 1, 1, 2)
    assert result.notes == ()


def test_cores_on_two_sockets_in_equal_numbers_show_two_sockets() -> None:
    result = plan(host(sockets=2, cores=2), (0, 1, 4, 5))
    assert pinned(result) == [0, 4, 2, 6]
    assert result.guests[0].topology == GuestTopology(2, 1, 1, 2)


def test_uneven_sockets_are_shown_as_one_with_a_note() -> None:
    result = plan(host(sockets=2, cores=2), (0, 1, 2, 3, 4, 5))
    assert result.guests[0].topology == GuestTopology(1, 1, 3, 2)
    assert "unequal numbers of cores" in result.notes[0]


def test_half_a_core_is_single_threads_with_a_named_sibling() -> None:
    result = plan(host(), (0, 1, 2))
    assert result.guests[0].topology == GuestTopology(1, 1, 3, 1)
    assert "siblings 5 are not in this guest" in result.notes[0]


def test_an_unsorted_layout_gives_the_same_plan_as_a_sorted_one() -> None:
    assert plan(host(), (3, 0, 2, 1)) == plan(host(), (0, 1, 2, 3))


def test_a_core_that_is_offline_is_skipped_in_slurms_count() -> None:
    result = plan(host(offline_cores=frozenset({1})), (2, 3))
    assert pinned(result) == [2, 6]


def test_numbers_beyond_slurmds_count_are_pinned_and_noted() -> None:
    result = plan(host(offline_cores=frozenset({0})), (4, 5))
    assert pinned(result) == [3, 7]
    assert "have gaps" in result.notes[0]


def test_uneven_threads_per_core_are_a_node_error() -> None:
    with pytest.raises(NodeError, match=r"1 to 2 per core"):
        plan(host(offline_cpus=frozenset({5})), (0,))


def test_an_index_beyond_the_host_blames_slurm_conf() -> None:
    with pytest.raises(NodeError, match=r"CPU ids 8-9 on n1.*ids 0-7.*slurmd -C"):
        plan(host(), (0, 1, 8, 9))


def test_an_allocation_without_cpus_is_the_nodes_fault() -> None:
    with pytest.raises(NodeError, match="allocated no CPU"):
        plan(host(), ())


def test_an_id_named_twice_is_the_nodes_fault() -> None:
    with pytest.raises(NodeError, match="names CPU 1 twice"):
        plan(host(), (0, 1, 1))


def test_emulator_threads_run_on_job_cpus_by_default() -> None:
    guest = plan(host(), (0, 1)).guests[0]
    assert guest.emulator_cpus == (0, 4)
    assert guest.emulator_choice == "the job's own CPUs 0,4"


def test_emulator_threads_run_on_the_cpus_the_site_keeps() -> None:
    guest = plan(host(), (2, 3), config=Config(host=Host(emulator_cpus="0,4"))).guests[0]
    assert guest.emulator_cpus == (0, 4)
    assert "host.emulator_cpus" in guest.emulator_choice


@pytest.mark.parametrize(
    ("emulator_cpus", "message"),
    [
        ("0-1", "lists 0-1, but Slurm gave 1 to the job"),
        ("0,99", "99 are not online"),
        ("0-", "not a CPU list"),
    ],
)
def test_emulator_cpus_that_cannot_be_kept_are_the_sites_fault(emulator_cpus: str, message: str) -> None:
    with pytest.raises(NodeError, match=message):
        plan(host(), (2, 3), config=Config(host=Host(emulator_cpus=emulator_cpus)))


def test_guest_memory_is_the_jobs_less_the_reserve_in_huge_pages() -> None:
    result = plan(host(), (0, 1), 4097, config=Config(guests=Guests(memory_reserve_mib=256)))
    assert result.guests[0].memory_mib == 3840
    assert (result.job_memory_mib, result.reserve_mib) == (4097, 256)


def test_the_users_own_reserve_replaces_the_sites() -> None:
    result = plan(host(), (0, 1), 4096, request=replace(REQUEST, mem_reserve_mib=1024))
    assert result.guests[0].memory_mib == 3072


def test_a_reserve_of_zero_is_a_reserve() -> None:
    assert (
        plan(host(), (0, 1), 4096, request=replace(REQUEST, mem_reserve_mib=0)).guests[0].memory_mib == 4096
    )


def test_memory_of_exactly_the_images_minimum_is_enough() -> None:
    assert plan(host(), (0, 1), 640).guests[0].memory_mib == 384


@pytest.mark.promise("image.cpus")
def test_fewer_cpus_than_the_image_needs_is_a_user_error() -> None:
    """Hyperthreads count, as Slurm counts them: two cores have four CPUs."""
    assert len(plan(host(), (0, 1, 2, 3), manifest=replace(MANIFEST, min_cpus=4)).guests[0].pins) == 4
    with pytest.raises(UserError) as caught:
        plan(host(), (0, 1, 2, 3), manifest=replace(MANIFEST, min_cpus=5))
    line = "image debian-minimal:latest needs 5 CPUs, a guest on n1 has 4"
    assert caught.value.line().startswith(line)
    assert "--cpus-per-task" in caught.value.line()


def test_memory_below_the_image_minimum_is_a_user_error() -> None:
    with pytest.raises(UserError) as caught:
        plan(host(), (0, 1), 639)
    line = caught.value.line()
    for part in (
        "debian-minimal:latest needs 384 MiB",
        "has 382",
        "639 MiB",
        "256 MiB stay outside",
        "--mem=640M",
    ):
        assert part in line
    assert "mem-reserve" not in line


def test_a_user_reserve_that_is_too_large_is_named() -> None:
    with pytest.raises(UserError, match=r"--mem=4384M or for a smaller --vhpc-mem-reserve"):
        plan(host(), (0, 1), 4000, request=replace(REQUEST, mem_reserve_mib=4000))


def test_a_negative_reserve_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="negative"):
        plan(host(), (0, 1), request=replace(REQUEST, mem_reserve_mib=-1))


def test_unallocated_memory_is_a_fault_of_the_site() -> None:
    with pytest.raises(NodeError, match="CR_Core_Memory"):
        plan(host(), (0, 1), 0)


def test_more_memory_than_the_node_has_is_the_nodes_fault() -> None:
    with pytest.raises(NodeError, match="RealMemory"):
        plan(host(cell_mib=1024), (0, 1), 4096)


def test_an_image_of_another_architecture_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="is for aarch64, n1 is x86_64"):
        plan(host(), (0, 1), manifest=replace(MANIFEST, arch="aarch64"))
    tests_only = Config(guests=Guests(accelerator="tcg", emulated=("aarch64",)))
    assert plan(host(), (0, 1), manifest=replace(MANIFEST, arch="aarch64"), config=tests_only).guests


def test_an_image_with_an_unbootable_root_is_a_user_error() -> None:
    with pytest.raises(UserError, match="format 'qcow2'"):
        plan(host(), (0, 1), manifest=replace(MANIFEST, root_format="qcow2"))


def test_all_reasons_are_collected_and_the_user_sees_his() -> None:
    case = case_of(NodeAllocation("n1", (0, 77), 100), host(), manifest=replace(MANIFEST, arch="riscv64"))
    result = fit(case, Config(host=Host(emulator_cpus="0-")))
    assert isinstance(result, Refusal)
    assert [type(reason) for reason in result.reasons] == [UserError, NodeError, UserError]
    error = result.error()
    assert isinstance(error, UserError)
    assert "riscv64" in error.line()
    assert "--mem=640M" in error.line()
    assert "77" not in error.line()


def test_all_of_a_nodes_faults_are_in_one_line() -> None:
    with pytest.raises(NodeError) as caught:
        plan(host(cell_mib=1024), (0, 9), 4096)
    assert "CPU ids 9" in caught.value.line()
    assert "RealMemory" in caught.value.line()


def test_memory_is_bound_strictly_on_wholly_owned_cells() -> None:
    guest = plan(host(sockets=2, cores=2), (0, 1, 2, 3)).guests[0]
    assert guest.memory_binding is MemoryBinding.STRICT
    assert (guest.cells[0].host_cell, guest.cells[0].nodeset) == (0, (0,))


def test_memory_only_prefers_a_cell_that_other_jobs_run_in() -> None:
    guest = plan(host(sockets=2, cores=2), (4, 5)).guests[0]
    assert guest.memory_binding is MemoryBinding.PREFERRED
    assert guest.cells[0].host_cell == 1


def test_memory_on_shared_cells_only_prefers_its_cell() -> None:
    guest = plan(host(sockets=2, cores=2), (0, 1, 4, 5)).guests[0]
    assert guest.memory_binding is MemoryBinding.PREFERRED
    assert [(cell.host_cell, cell.nodeset) for cell in guest.cells] == [(0, (0,)), (1, (1,))]


def test_memory_larger_than_the_cell_is_not_bound_and_noted() -> None:
    result = plan(host(sockets=2, cores=2, cell_mib=4096), (0, 1, 2, 3), 6000)
    assert result.guests[0].memory_binding is MemoryBinding.PREFERRED
    assert "some memory is remote" in result.notes[0]


@st.composite
def situations(draw: st.DrawFn) -> tuple[HostInventory, NodeAllocation]:
    """Whole cores of a host of any regular shape: cores offline, OS numbers in any order."""
    threads = draw(st.sampled_from([1, 2, 4]))
    sockets = draw(st.integers(1, 4))
    cores = draw(st.integers(1, 6))
    total = sockets * cores
    offline = draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    numbers = draw(st.permutations(range(total * threads)))
    number = iter(numbers)
    cpus: list[HostCpu] = []
    abstract: list[int] = []
    cells: dict[int, list[int]] = {}
    logical = count()
    for core in range(total):
        here = sorted(next(number) for _ in range(threads))
        if core in offline:
            cpus += [HostCpu(cpu, -1, -1, -1, online=False) for cpu in here]
            continue
        place = next(logical)
        cpus += [HostCpu(cpu, place, core // cores, core // cores) for cpu in here]
        abstract += here
        cells.setdefault(core // cores, []).extend(here)
    inventory = HostInventory(
        node="n1",
        cpu_vendor="AuthenticAMD",
        cpus=tuple(sorted(cpus)),
        cells=tuple(HostCell(cell, 65536, tuple(sorted(members)), ()) for cell, members in cells.items()),
        abstract=tuple(abstract),
        kvm=False,
        kvm_reason="",
    )
    online = total - len(offline)
    taken = draw(st.sets(st.integers(0, online - 1), min_size=1))
    ids = tuple(sorted(core * threads + thread for core in taken for thread in range(threads)))
    # the image needs 384 MiB, and some 340 stay outside a guest of 96 vCPUs
    return inventory, NodeAllocation("n1", ids, draw(st.integers(768, 65536)))


@pytest.mark.promise("place.vcpus")
@settings(max_examples=examples(200), deadline=None)
@given(situations(), st.one_of(st.none(), st.integers(0, 256)))
def test_whole_cores_of_any_host(case: tuple[HostInventory, NodeAllocation], reserve: int | None) -> None:
    machine, allocation = case
    request = replace(REQUEST, mem_reserve_mib=reserve)
    result = fitted(case_of(allocation, machine, request), CONFIG)
    (guest,) = result.guests
    core_of = {cpu.os_cpu: cpu.core for cpu in machine.cpus if cpu.online}

    # Every vCPU has exactly one CPU of the allocation, every CPU of the allocation one vCPU.
    assert [pin.vcpu for pin in guest.pins] == list(range(len(allocation.cpu_ids)))
    assert sorted(pinned(result)) == sorted(machine.abstract[cpu] for cpu in allocation.cpu_ids)
    assert len(set(pinned(result))) == len(guest.pins)
    # The guest's siblings are the host's: vCPUs of one guest core share a host core, and no other does.
    shape = guest.topology
    assert shape.sockets * shape.clusters * shape.cores * shape.threads == len(guest.pins)
    groups = [
        {core_of[pin.os_cpu] for pin in guest.pins[at : at + shape.threads]}
        for at in range(0, len(guest.pins), shape.threads)
    ]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(groups)
    # Memory stays within the job's.
    assert guest.memory_mib % 2 == 0
    assert MANIFEST.min_memory_mib <= guest.memory_mib <= allocation.memory_mib - result.reserve_mib
    assert allocation.memory_mib - result.reserve_mib - guest.memory_mib < 2
    assert sum(cell.memory_mib for cell in guest.cells) == guest.memory_mib
    assert [vcpu for cell in guest.cells for vcpu in cell.vcpus] == [pin.vcpu for pin in guest.pins]
    # QEMU's own threads do not leave the job.
    assert set(guest.emulator_cpus) == set(pinned(result))


@settings(max_examples=examples(200), deadline=None)
@given(
    situations(),
    st.lists(st.integers(-2, 120), max_size=12),
    st.integers(-10, 70000),
    st.one_of(st.none(), st.integers(-5, 70000)),
)
def test_any_layout_gives_a_plan_or_reasons(
    case: tuple[HostInventory, NodeAllocation], ids: list[int], memory: int, reserve: int | None
) -> None:
    machine, _ = case
    request = replace(REQUEST, mem_reserve_mib=reserve)
    result = fit(case_of(NodeAllocation("n1", tuple(ids), memory), machine, request), CONFIG)
    if isinstance(result, Refusal):
        assert result.reasons
        assert "\n" not in result.error().line()
    else:
        assert len(set(pinned(result))) == len(ids)
        assert set(pinned(result)) <= set(machine.abstract)


@given(st.sets(st.integers(0, 5000)))
def test_a_cpu_list_reads_back(numbers: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1;2", "٣"])
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU list"):
        parse_cpu_list(text)


def test_cpu_lists_are_written_as_the_kernel_writes_them() -> None:
    assert format_cpu_list([8, 0, 2, 1, 3, 10, 11]) == "0-3,8,10-11"
    assert parse_cpu_list("0-3,8\n") == (0, 1, 2, 3, 8)
