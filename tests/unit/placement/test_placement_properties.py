# SPDX-License-Identifier: Apache-2.0
"""What holds of every plan, on machines of any shape and on captured ones."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import count

import pytest
from captured import NAMES, Trees, one_worker, read
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from placement_rig import MANIFEST, REQUEST, case_of

from pace import examples
from vhpc_slurm.config import Config, Guests, Placement
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.hardware import PciBar, PciFunction, Reservation
from vhpc_slurm.model import (
    Generation,
    GresAllocation,
    HostCell,
    HostCpu,
    HostInventory,
    MemoryBinding,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.node.resource.reservations import of_plan
from vhpc_slurm.placement.plan import Refusal, fit
from vhpc_slurm.placement.usage import fold

pytestmark = one_worker
SMALL = replace(MANIFEST, min_memory_mib=2)


@st.composite
def machines(draw: st.DrawFn) -> HostInventory:
    """1-16 sockets, SMT 1, 2 or 4, sub-NUMA clusters, cells without memory or CPUs, cores offline.

    OS numbers of CPUs and cells are in any order and have holes.
    """
    sockets, threads = draw(st.integers(1, 16)), draw(st.sampled_from([1, 2, 4]))
    per_socket, cores = draw(st.sampled_from([1, 1, 2, 4])), draw(st.integers(1, 3))
    total = sockets * per_socket * cores
    dice = random.Random(draw(st.integers(0, 1 << 32)))  # much faster than a draw for each number
    numbers = iter(dice.sample(range(total * threads + 7), total * threads))
    spare = draw(st.integers(0, 3))
    names = dice.sample(range(sockets * per_socket + spare), sockets * per_socket + spare)
    offline = set(dice.sample(range(total), draw(st.integers(0, total - 1))))
    cpus: list[HostCpu] = []
    abstract: list[int] = []
    members: dict[int, list[int]] = defaultdict(list)
    logical = count()
    for core in range(total):
        here = sorted(next(numbers) for _ in range(threads))
        if core in offline:
            cpus += [HostCpu(cpu, -1, -1, -1, online=False) for cpu in here]
            continue
        cell, place = names[core // cores], next(logical)
        cpus += [HostCpu(cpu, place, core // cores // per_socket, cell) for cpu in here]
        abstract += here
        members[cell] += here
    used = sorted(names[: sockets * per_socket + draw(st.integers(0, spare))])
    far = {
        (one, other): 10 if one == other else dice.randint(10, 255)
        for one in used
        for other in used
        if one <= other
    }
    memory = [dice.choice([0, 4096, 4097, 65536]) for _ in used]
    memory[0] = max(memory[0], 4096)
    cells = tuple(
        HostCell(
            cell,
            mib,
            tuple(sorted(members[cell])),
            tuple((other, far[min(cell, other), max(cell, other)]) for other in used),
            ((2048, mib // 4, dice.randint(0, mib // 4)), (1048576, mib // 2048, mib // 2048)),
        )
        for cell, mib in zip(used, memory, strict=True)
    )
    return HostInventory(
        "n1",
        "",
        tuple(sorted(cpus)),
        cells,
        tuple(abstract),
        kvm=True,
        kvm_reason="",
        pci=draw(functions(used)),
    )


@st.composite
def functions(draw: st.DrawFn, cells: list[int]) -> tuple[PciFunction, ...]:
    """Root complexes with GPUs and an HCA's VFs, with and without switches, at any cell or none."""
    found = []
    for bus in range(draw(st.integers(0, 3))):
        cell = draw(st.sampled_from([*cells, -1]))
        switched = draw(st.booleans())
        gpus, vfs = draw(st.integers(0, 3)), draw(st.integers(0, 4))
        for slot in range(gpus + vfs):
            gpu = slot < gpus
            place = f"{bus:02x}:{slot:02x}"
            found.append(
                PciFunction(
                    address=f"0000:{place}.0" if gpu else f"0000:{place}.1",
                    class_code=0x030200 if gpu else 0x020700,
                    vendor=1,
                    device=1,
                    driver="vfio-pci",
                    cell=cell,
                    cpus=(),
                    root_complex=f"pci0000:{bus:02x}",
                    bridges=("port", f"up{bus}", f"down{slot}") if switched else (f"port{slot}",),
                    iommu_group=bus * 32 + slot,
                    bars=(
                        PciBar(
                            0,
                            1 << draw(st.sampled_from([12, 30, 37])),
                            memory=True,
                            wide=True,
                            prefetchable=True,
                        ),
                    ),
                    physfn="" if gpu else f"0000:{bus:02x}:1f.0",
                )
            )
    return tuple(found)


@dataclass(frozen=True)
class Job:
    """What Slurm could give a job on a machine."""

    allocation: NodeAllocation
    guests: int


@st.composite
def jobs(draw: st.DrawFn, machine: HostInventory, number: int) -> list[Job]:
    """Jobs that share a machine as Slurm lets them: no core and no GPU twice."""
    by_number = {cpu.os_cpu: cpu for cpu in machine.cpus}
    cores: dict[int, list[int]] = defaultdict(list)
    for abstract, os_cpu in enumerate(machine.abstract):
        cores[by_number[os_cpu].core].append(abstract)
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    owner = {core: dice.randint(0, number) for core in cores}
    gpus = [f for f in machine.pci if f.class_code == 0x030200]
    gpu_owner = {index: dice.randint(0, number) for index in range(len(gpus))}
    found = []
    for job in range(number):
        mine = [core for core in cores if owner[core] == job]
        if not mine:
            continue
        indexes = tuple(index for index in gpu_owner if gpu_owner[index] == job)
        gres = (
            GresAllocation("gpu", "", len(indexes), indexes),
            GresAllocation("ibvf", "", draw(st.integers(0, 2))),
        )
        ids = tuple(sorted(abstract for core in mine for abstract in cores[core]))
        memory = draw(st.integers(64, 16384))
        found.append(Job(NodeAllocation("n1", ids, memory, gres), draw(st.integers(1, len(mine)))))
    return found


def configs() -> st.SearchStrategy[Config]:
    firm = st.sampled_from(["preferred", "strict"])
    return st.builds(
        Config,
        guests=st.just(Guests(memory_reserve_mib=0)),
        placement=st.builds(
            Placement,
            cores=firm,
            memory=firm,
            devices=firm,
            rounding=firm,
            hugepages=st.sampled_from(["none", "2M", "1G", "auto"]),
            emulator_core=st.booleans(),
        ),
    )


def node_devices(machine: HostInventory) -> NodeDevices:
    return NodeDevices(gpus=tuple(f.address for f in machine.pci if f.class_code == 0x030200))


def check(plan: NodePlan, job: Job, machine: HostInventory, config: Config) -> None:
    """Everything that no plan may ever break, read off the plan and the machine alone."""
    core_of = {cpu.os_cpu: cpu.core for cpu in machine.cpus}
    cells = {cell.cell: cell for cell in machine.cells}
    allocated = {machine.abstract[cpu] for cpu in job.allocation.cpu_ids}
    given: list[int] = []
    for guest in plan.guests:
        pinned = [pin.os_cpu for pin in guest.pins]
        given += pinned
        assert [pin.vcpu for pin in guest.pins] == list(range(len(pinned)))
        # siblings of the guest are siblings of the host, and no core is in two guests
        shape = guest.topology
        assert shape.sockets * shape.clusters * shape.cores * shape.threads == len(pinned)
        groups = [
            {core_of[cpu] for cpu in pinned[at : at + shape.threads]}
            for at in range(0, len(pinned), shape.threads)
        ]
        assert all(len(group) == 1 for group in groups)
        assert len(set().union(*groups)) == len(groups)
        # QEMU's own threads stay within the job
        assert set(guest.emulator_cpus) <= allocated
        # guest cells: all vCPUs in one each, all memory, pages whole
        assert sorted(vcpu for cell in guest.cells for vcpu in cell.vcpus) == list(range(len(pinned)))
        assert {pin.vcpu: pin.cell for pin in guest.pins} == {v: c.cell for c in guest.cells for v in c.vcpus}
        assert sum(cell.memory_mib for cell in guest.cells) == guest.memory_mib
        assert [cell.cell for cell in guest.cells] == list(range(len(guest.cells)))
        assert len({cell.host_cell for cell in guest.cells}) == len(guest.cells)
        grain = guest.hugepage_kib // 1024 or 2
        assert all(cell.memory_mib % grain == 0 and cell.memory_mib > 0 for cell in guest.cells)
        if guest.memory_binding is not MemoryBinding.NONE:
            assert all(cells[cell.host_cell].memory_mib for cell in guest.cells)
        for cell in guest.cells:
            for other, distance in cell.distances:
                assert (distance == 10) == (other == cell.cell)
                assert 10 <= distance <= 254
        # PCI: every device in a port of its own, buses do not overlap and leave the first ones free
        ports = [device.port for device in guest.devices]
        assert len(set(ports)) == len(ports)
        parents = {controller.parent for controller in guest.controllers}
        models = {controller.index: controller.model for controller in guest.controllers}
        assert {models[port] for port in ports} <= {"pcie-root-port", "pcie-switch-downstream-port"}
        assert set(models) - parents - set(ports) == set()
        starts = [c.bus_nr for c in guest.controllers if c.model == "pcie-expander-bus"]
        assert starts == sorted(set(starts))
        assert all(48 <= start <= 254 for start in starts)
        assert len({d.root_complex for d in guest.devices}) == len(starts)
        assert all(c.cell < len(guest.cells) for c in guest.controllers)
    assert len(given) == len(set(given))
    assert set(given) <= allocated
    if not config.placement.emulator_core:
        assert set(given) == allocated
    assert sum(guest.memory_mib for guest in plan.guests) <= job.allocation.memory_mib
    assert max(len(g.pins) for g in plan.guests) - min(len(g.pins) for g in plan.guests) <= 4 * (
        1 + config.placement.emulator_core
    )
    wanted = sum(gres.count for gres in job.allocation.gres)
    assert len([d for guest in plan.guests for d in guest.devices]) == wanted


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_jobs_on_one_machine_never_get_anything_twice(data: st.DataObject) -> None:
    machine = data.draw(machines())
    config = data.draw(configs())
    reservations: list[Reservation] = []
    for number, job in enumerate(data.draw(jobs(machine, 3)), 1):
        generation = Generation(number, 0, "0123abcd")
        request = replace(REQUEST, guests_per_node=job.guests)
        usage = fold(reservations)  # raises where two reservations name one thing
        case = case_of(
            job.allocation,
            machine,
            request,
            SMALL,
            generation=generation,
            usage=usage,
            devices=node_devices(machine),
        )
        result = fit(case, config)
        if isinstance(result, Refusal):
            event("refused")
            assert result.reasons
            assert "\n" not in result.error().line()
            continue
        event("planned")
        check(result, job, machine, config)
        reservations += of_plan(result)
    usage = fold(reservations)
    for cell in machine.cells:
        for size, total, _ in cell.hugepages:
            assert usage.pages.get((cell.cell, size), 0) <= total


@pytest.mark.parametrize("name", NAMES)
def test_captured_machines_are_planned_whole_and_in_parts(name: str, trees: Trees) -> None:
    machine = replace(read(trees(name)), arch="x86_64")
    config = Config(guests=Guests(memory_reserve_mib=0))
    total = len(machine.abstract)
    by_number = {cpu.os_cpu: cpu for cpu in machine.cpus}
    memory = sum(cell.memory_mib for cell in machine.cells) // 2
    cores = len({by_number[cpu].core for cpu in machine.abstract})
    for guests in (1, 2, len(machine.cells)):
        job = Job(NodeAllocation("n1", tuple(range(total)), memory), guests)
        request = replace(REQUEST, guests_per_node=guests)
        result = fit(case_of(job.allocation, machine, request, SMALL), config)
        threads = {
            sum(by_number[c].core == by_number[cpu].core for c in machine.abstract)
            for cpu in machine.abstract
        }
        if len(threads) > 1:
            assert isinstance(result, Refusal)
            assert "differ in their number of online threads" in result.error().line()
            continue
        assert isinstance(result, NodePlan), result.error().line()
        check(result, job, machine, config)
        if guests == 1:
            online = {cpu.cell for cpu in machine.cpus if cpu.online}
            assert {cell.host_cell for cell in result.guests[0].cells} == online or -1 in online
        elif guests == len(machine.cells) and cores % guests == 0:
            assert all(len(guest.cells) == 1 for guest in result.guests)
