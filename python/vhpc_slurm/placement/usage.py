"""What live guests hold of a node, folded from their claims; never a counter that could drift."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.hardware import Claim


@dataclass(frozen=True)
class Usage:
    """Who holds each CPU and each device, and how many huge pages are promised.

    Attributes:
        cpus: generation by OS CPU.
        devices: generation by PCI address.
        pages: number of pages by host cell and page size in KiB.
    """

    cpus: Mapping[int, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    pages: Mapping[tuple[int, int], int] = field(default_factory=dict)


NOTHING = Usage()


def fold(claims: Iterable[Claim]) -> Usage:
    """Usage of a node.

    Raises:
        NodeError: two guests claim the same CPU or device.
    """
    cpus: dict[int, str] = {}
    devices: dict[str, str] = {}
    pages: dict[tuple[int, int], int] = {}
    for claim in claims:
        for cpu in claim.cpus:
            if cpu in cpus:
                raise _twice(f"CPU {cpu}", cpus[cpu], claim)
            cpus[cpu] = claim.generation
        for address in claim.devices:
            if address in devices:
                raise _twice(f"device {address}", devices[address], claim)
            devices[address] = claim.generation
        for cell, mib in claim.cells if claim.hugepage_kib else ():
            key = cell, claim.hugepage_kib
            pages[key] = pages.get(key, 0) + mib * 1024 // claim.hugepage_kib
    return Usage(cpus, devices, pages)


def _twice(what: str, first: str, second: Claim) -> NodeError:
    return NodeError(
        f"{what} is claimed twice", f"by {first} and by {second.generation}", "see: vhpc reconcile --check"
    )


def held_cpus(wanted: Iterable[int], usage: Usage) -> list[VhpcError]:
    """An error for each generation that holds CPUs which are wanted.

    Not the node's fault: Slurm has given them out twice, because it has forgotten
    a job in a crash, has suspended one or shares CPUs.  The job that comes later
    is to try again; what a forgotten job left is gone by then.
    """
    by_holder: dict[str, list[int]] = {}
    for cpu in wanted:
        if cpu in usage.cpus:
            by_holder.setdefault(usage.cpus[cpu], []).append(cpu)
    return [
        FabricError(
            f"CPUs {format_cpu_list(cpus)} are held by guests of {holder}",
            "Slurm gave them to this job too",
            "if that job is over: vhpc reconcile; else forbid OverSubscribe and suspending preemption",
        )
        for holder, cpus in by_holder.items()
    ]
