# SPDX-License-Identifier: Apache-2.0
"""Maps Slurm's abstract CPU ids to pinned vCPUs and to the guest's CPU topology.

Slurm has already chosen the CPUs; this module never chooses others.
"""
# Decision: The order of CPUs

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.hardware import NO_CLUSTER
from vhpc_slurm.model import GuestTopology, HostCpu, HostInventory, NodeAllocation, VcpuPin
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.usage import held_cpus
from vhpc_slurm.record import Record

ONE_CELL = 0


class CpuPlacement(Record, frozen=True):
    """vCPU pins in the order of the guest's CPU numbers, and the topology that the guest sees."""

    pins: tuple[VcpuPin, ...]
    topology: GuestTopology
    notes: tuple[str, ...] = ()

    @property
    def os_cpus(self) -> tuple[int, ...]:
        """The pinned OS CPUs, ascending."""
        return tuple(sorted(pin.os_cpu for pin in self.pins))


class EmulatorPlacement(Record, frozen=True):
    """OS CPUs of QEMU's own threads, and why they were chosen."""

    cpus: tuple[int, ...]
    choice: str


def choose_cpus(what: PlanInput, reasons: list[VhpcError], *, whole_cores: bool) -> tuple[HostCpu, ...]:
    """The host's CPUs that Slurm allocated, in abstract order.

    Args:
        what: has the job's resources on this node, from Slurm.
        reasons: gets all reasons against it; the result is empty then.
        whole_cores: refuse parts of cores.
    """
    host = what.host
    errors = [*_allocation_errors(what.allocation, host), *_host_errors(host)]
    if errors:
        reasons += errors
        return ()
    by_number = {cpu.os_cpu: cpu for cpu in host.cpus}
    chosen = tuple(by_number[host.abstract[abstract]] for abstract in sorted(what.allocation.cpu_ids))
    errors = held_cpus([cpu.os_cpu for cpu in chosen], what.usage)
    if whole_cores and (siblings := _foreign_siblings(chosen, host)):
        errors.append(
            NodeError(
                f"Slurm allocated parts of cores on {host.node}",
                f"siblings {format_cpu_list(siblings)} are not allocated to the job, "
                "and placement.cores is strict",
                "set SelectTypeParameters=CR_Core_Memory in slurm.conf",
            )
        )
    reasons += errors
    return () if errors else chosen


def place_cpus(chosen: Sequence[HostCpu], host: HostInventory) -> CpuPlacement:
    """Pin one vCPU of a guest to each of these CPUs.

    vCPUs follow the abstract order, so that threads of a host core become
    threads of a guest core.
    """
    topology, notes = _guest_topology(chosen, host)
    pins = tuple(VcpuPin(vcpu, cpu.os_cpu, ONE_CELL) for vcpu, cpu in enumerate(chosen))
    return CpuPlacement(pins, topology, tuple(notes))


def spare_core(chosen: Sequence[HostCpu]) -> tuple[tuple[HostCpu, ...], tuple[int, ...]]:
    """Reserve one core of a guest for QEMU's own threads: the last core of the cell with most cores.

    Returns:
        The remaining CPUs, and the OS CPUs of the reserved core: empty if the guest has only one core.
    """
    cores: dict[int, list[HostCpu]] = {}
    for cpu in chosen:
        cores.setdefault(cpu.core, []).append(cpu)
    if len(cores) < 2:
        return tuple(chosen), ()
    in_cell = Counter(cpus[0].cell for cpus in cores.values())
    cell = max(in_cell, key=lambda number: (in_cell[number], -number))
    spare = [core for core, cpus in cores.items() if cpus[0].cell == cell][-1]
    kept = tuple(cpu for cpu in chosen if cpu.core != spare)
    return kept, tuple(sorted(cpu.os_cpu for cpu in cores[spare]))


def place_emulator(
    configured: tuple[int, ...],
    own: tuple[int, ...],
    spare: tuple[int, ...],
    host: HostInventory,
    reasons: list[VhpcError],
) -> EmulatorPlacement | None:
    """Choose the OS CPUs of QEMU's main loop and I/O threads.

    Args:
        configured: OS CPUs that the site reserves for QEMU (host.emulator_cpus), may be empty.
        own: CPUs of the guest's vCPUs, ascending.
        spare: CPUs of the job that no vCPU is pinned to.
        host: for checking that the site's CPUs exist.
        reasons: gets all reasons against it; the result is None then.
    """
    if not configured and spare:
        choice = f"CPUs {format_cpu_list(spare)}, a core of the job that the guest does not see"
        return EmulatorPlacement(spare, choice)
    if not configured:
        return EmulatorPlacement(own, f"the job's own CPUs {format_cpu_list(own)}")
    listed = f"host.emulator_cpus lists {format_cpu_list(configured)}"
    online = {cpu.os_cpu for cpu in host.cpus if cpu.online}
    if absent := set(configured) - online:
        reasons.append(
            NodeError(f"{listed}, but {format_cpu_list(absent)} are not online", "", "see vhpc.toml(5)")
        )
    if shared := set(configured) & {*own, *spare}:
        reasons.append(
            NodeError(
                f"{listed}, but Slurm gave {format_cpu_list(shared)} to the job",
                "",
                "keep them out of Slurm with CpuSpecList in slurm.conf",
            )
        )
    if absent or shared:
        return None
    choice = f"CPUs {format_cpu_list(configured)}, reserved by host.emulator_cpus"
    return EmulatorPlacement(configured, choice)


def _allocation_errors(allocation: NodeAllocation, host: HostInventory) -> list[VhpcError]:
    errors: list[VhpcError] = []
    if not allocation.cpu_ids:
        errors.append(NodeError(f"Slurm allocated no CPU on {host.node}"))
    beyond = [cpu for cpu in allocation.cpu_ids if not 0 <= cpu < len(host.abstract)]
    if beyond:
        errors.append(
            NodeError(
                f"Slurm allocated CPU ids {format_cpu_list(beyond)} on {host.node}",
                f"the host has {len(host.abstract)} CPUs online, ids 0-{len(host.abstract) - 1}",
                "make Sockets, CoresPerSocket and ThreadsPerCore in slurm.conf match: slurmd -C",
            )
        )
    twice = sorted(cpu for cpu, count in Counter(allocation.cpu_ids).items() if count > 1)
    if twice:
        errors.append(NodeError(f"Slurm's layout of {host.node} names CPU {format_cpu_list(twice)} twice"))
    return errors


def _host_errors(host: HostInventory) -> list[VhpcError]:
    """Slurm numbers CPUs as core * threads + thread, which needs the same number of threads in each core."""
    threads = {len(cpus) for cpus in _by_core(_counted(host)).values()}
    if len(threads) <= 1:
        return []
    return [
        NodeError(
            f"cores of {host.node} differ in their number of online threads",
            f"{min(threads)} to {max(threads)} per core; Slurm's CPU ids are ambiguous there",
            "bring all threads online, or take whole cores offline",
        )
    ]


def _counted(host: HostInventory) -> list[HostCpu]:
    """The CPUs that Slurm counts, in its order."""
    by_number = {cpu.os_cpu: cpu for cpu in host.cpus}
    return [by_number[os_cpu] for os_cpu in host.abstract]


def _by_core(cpus: Iterable[HostCpu]) -> dict[int, list[int]]:
    cores: dict[int, list[int]] = defaultdict(list)
    for cpu in cpus:
        cores[cpu.core].append(cpu.os_cpu)
    return cores


def _foreign_siblings(chosen: Iterable[HostCpu], host: HostInventory) -> list[int]:
    """Threads of the chosen CPUs' cores that were not chosen."""
    host_cores = _by_core(_counted(host))
    shared = (set(host_cores[core]) - set(cpus) for core, cpus in _by_core(chosen).items())
    return sorted(cpu for cpus in shared for cpu in cpus)


def _guest_topology(chosen: Sequence[HostCpu], host: HostInventory) -> tuple[GuestTopology, list[str]]:
    """The host's sockets, clusters, cores and threads if the allocation is regular, otherwise flat cores.

    With wrong siblings, a guest's scheduler places threads badly. Therefore an
    irregular allocation is shown as single-threaded cores.
    """
    siblings = _foreign_siblings(chosen, host)
    if siblings:
        note = (
            f"Slurm allocated parts of cores: siblings {format_cpu_list(siblings)} are not in this guest, "
            "the guest sees single-threaded cores"
        )
        return GuestTopology(1, 1, len(chosen), 1), [note]
    threads = sum(cpu.core == chosen[0].core for cpu in chosen)
    per_socket = Counter(cpu.socket for cpu in chosen)
    if len(set(per_socket.values())) == 1:
        clusters = _clusters(chosen, host) // len(per_socket) or 1
        cores = per_socket[chosen[0].socket] // threads // clusters
        return GuestTopology(len(per_socket), clusters, cores, threads), []
    note = f"unequal numbers of cores on {len(per_socket)} sockets: the guest sees one socket"
    return GuestTopology(1, 1, len(chosen) // threads, threads), [note]


def _clusters(chosen: Sequence[HostCpu], host: HostInventory) -> int:
    """How many clusters of cores the CPUs are in; 0 if QEMU cannot show them to the guest.

    QEMU's machines for x86-64 have none, and all clusters of a guest have the same number of cores.
    """
    if of_machine(host.arch).is_pc:
        return 0
    runs = [(cluster, len(list(cpus))) for cluster, cpus in groupby(chosen, key=lambda cpu: cpu.cluster)]
    numbers, sizes = [cluster for cluster, _ in runs], {size for _, size in runs}
    regular = NO_CLUSTER not in numbers and len(set(numbers)) == len(numbers) and len(sizes) == 1
    return len(runs) if regular else 0


def numbering_notes(host: HostInventory) -> list[str]:
    """Warnings about OS CPU numbers beyond the number of CPUs, which slurmd's own map ignores."""
    beyond = [cpu for cpu in host.abstract if cpu >= len(host.abstract)]
    if not beyond:
        return []
    return [
        f"OS CPU numbers of {host.node} have gaps: slurmd may bind tasks outside of guests to other CPUs "
        f"than it allocated (OS CPUs not below the number of CPUs: {format_cpu_list(beyond)})"
    ]
