"""From Slurm's abstract CPU ids to pinned vCPUs and the topology the guest sees.

Slurm has chosen the CPUs already; they are mapped here, never searched for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import GuestTopology, HostCpu, HostInventory, NodeAllocation, VcpuPin

ONE_CELL = 0


@dataclass(frozen=True)
class CpuPlacement:
    """vCPUs in the order the guest counts them, and what they look like from inside."""

    pins: tuple[VcpuPin, ...]
    topology: GuestTopology
    notes: tuple[str, ...] = ()

    @property
    def os_cpus(self) -> tuple[int, ...]:
        """The pinned OS CPUs, ascending."""
        return tuple(sorted(pin.os_cpu for pin in self.pins))


@dataclass(frozen=True)
class EmulatorPlacement:
    """OS CPUs of QEMU's own threads, with the reason in words."""

    cpus: tuple[int, ...]
    choice: str


def place_cpus(
    allocation: NodeAllocation, host: HostInventory
) -> tuple[CpuPlacement | None, list[VhpcError]]:
    """Pin one vCPU to each CPU that Slurm allocated.

    vCPUs follow the abstract order, so that threads of a host core become
    threads of a guest core.

    Returns:
        The placement and no errors, or None and every error found.
    """
    errors = [*_allocation_errors(allocation, host), *_host_errors(host)]
    if errors:
        return None, errors
    by_number = {cpu.os_cpu: cpu for cpu in host.cpus}
    chosen = [by_number[host.abstract[abstract]] for abstract in sorted(allocation.cpu_ids)]
    topology, notes = _guest_topology(chosen, host)
    pins = tuple(VcpuPin(vcpu, cpu.os_cpu, ONE_CELL) for vcpu, cpu in enumerate(chosen))
    return CpuPlacement(pins, topology, (*notes, *_numbering_notes(host))), []


def place_emulator(
    configured: tuple[int, ...], placement: CpuPlacement, host: HostInventory
) -> tuple[EmulatorPlacement | None, list[VhpcError]]:
    """Where QEMU's main loop and I/O threads run.

    Args:
        configured: OS CPUs that the site keeps for it, empty when it keeps none.
        placement: the job's own CPUs.
        host: for checking that the site's CPUs exist.
    """
    if not configured:
        own = placement.os_cpus
        return EmulatorPlacement(own, f"the job's own CPUs {format_cpu_list(own)}"), []
    errors: list[VhpcError] = []
    listed = f"host.emulator_cpus lists {format_cpu_list(configured)}"
    online = {cpu.os_cpu for cpu in host.cpus if cpu.online}
    if absent := set(configured) - online:
        errors.append(
            NodeError(f"{listed}, but {format_cpu_list(absent)} are not online", "", "see vhpc.toml(5)")
        )
    if shared := set(configured) & set(placement.os_cpus):
        errors.append(
            NodeError(
                f"{listed}, but Slurm gave {format_cpu_list(shared)} to the job",
                "",
                "keep them out of Slurm with CpuSpecList in slurm.conf",
            )
        )
    if errors:
        return None, errors
    choice = f"CPUs {format_cpu_list(configured)}, kept for it by host.emulator_cpus"
    return EmulatorPlacement(configured, choice), []


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
    """Slurm numbers CPUs as core * threads + thread: no such number exists where cores differ in threads."""
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


def _guest_topology(chosen: list[HostCpu], host: HostInventory) -> tuple[GuestTopology, list[str]]:
    """The host's sockets, cores and threads where the allocation has their shape, else flat cores.

    A guest scheduler that is told of siblings which are none places threads
    wrongly, so anything irregular is shown as single-threaded cores.
    """
    host_cores = _by_core(_counted(host))
    shared = {core: set(host_cores[core]) - set(cpus) for core, cpus in _by_core(chosen).items()}
    siblings = sorted(cpu for cpus in shared.values() for cpu in cpus)
    if siblings:
        note = (
            f"Slurm allocated parts of cores: siblings {format_cpu_list(siblings)} belong to others, "
            "the guest sees single-threaded cores"
        )
        return GuestTopology(1, 1, len(chosen), 1), [note]
    threads = len(host_cores[chosen[0].core])
    per_socket = Counter(cpu.socket for cpu in chosen)
    if len(set(per_socket.values())) == 1:
        cores = per_socket[chosen[0].socket] // threads
        return GuestTopology(len(per_socket), 1, cores, threads), []
    note = f"unequal numbers of cores on {len(per_socket)} sockets: the guest sees one socket"
    return GuestTopology(1, 1, len(chosen) // threads, threads), [note]


def _numbering_notes(host: HostInventory) -> list[str]:
    """Warn where slurmd's own map gives up: it ignores OS CPU numbers beyond its count of CPUs."""
    beyond = [cpu for cpu in host.abstract if cpu >= len(host.abstract)]
    if not beyond:
        return []
    return [
        f"OS CPU numbers of {host.node} have holes: slurmd may bind tasks outside of guests to other CPUs "
        f"than it allocated (beyond its count: {format_cpu_list(beyond)})"
    ]
