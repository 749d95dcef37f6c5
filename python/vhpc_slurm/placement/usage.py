# SPDX-License-Identifier: Apache-2.0
"""Resources of a node that live guests hold, computed from their reservations, not from counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import field

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.record import Record


class Usage(Record, frozen=True):
    """Holder of each CPU and device, and number of reserved huge pages.

    Attributes:
        cpus: generation by OS CPU.
        devices: generation by PCI address.
        pages: number of pages by host cell and page size in KiB.
    """

    cpus: Mapping[int, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    pages: Mapping[tuple[int, int], int] = field(default_factory=dict)


NOTHING = Usage()


def fold(reservations: Iterable[Reservation]) -> Usage:
    """Compute the usage of a node.

    Raises:
        NodeError: two guests reserve the same CPU or device.
    """
    cpus: dict[int, str] = {}
    devices: dict[str, str] = {}
    pages: dict[tuple[int, int], int] = {}
    for reservation in reservations:
        for cpu in reservation.cpus:
            if cpu in cpus:
                raise _twice(f"CPU {cpu}", cpus[cpu], reservation)
            cpus[cpu] = reservation.generation
        for address in reservation.devices:
            if address in devices:
                raise _twice(f"device {address}", devices[address], reservation)
            devices[address] = reservation.generation
        for cell, mib in reservation.cells if reservation.hugepage_kib else ():
            key = cell, reservation.hugepage_kib
            pages[key] = pages.get(key, 0) + mib * 1024 // reservation.hugepage_kib
    return Usage(cpus, devices, pages)


def _twice(what: str, first: str, second: Reservation) -> NodeError:
    return NodeError(
        f"{what} is reserved twice", f"by {first} and by {second.generation}", "see: vhpc reconcile --check"
    )


def held_cpus(wanted: Iterable[int], usage: Usage) -> list[VhpcError]:
    """An error for each generation that holds wanted CPUs.

    The node is not at fault: Slurm allocated the CPUs twice, because it lost a
    job in a crash, suspended one, or shares CPUs.  The later job is requeued;
    by then the resources of a lost job have been released.
    """
    by_holder: dict[str, list[int]] = {}
    for cpu in wanted:
        if cpu in usage.cpus:
            by_holder.setdefault(usage.cpus[cpu], []).append(cpu)
    return [
        FabricError(
            f"CPUs {format_cpu_list(cpus)} are held by guests of {holder}",
            "Slurm allocated them to this job, too",
            "if that job has ended: vhpc reconcile; otherwise disable OverSubscribe and suspend preemption",
        )
        for holder, cpus in by_holder.items()
    ]
