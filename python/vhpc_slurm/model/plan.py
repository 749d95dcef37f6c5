# SPDX-License-Identifier: Apache-2.0
"""The plan of a node: each guest of a job with all that its boot needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vhpc_slurm.hardware import PassthroughDevice, PciController
from vhpc_slurm.model.job import Generation


@dataclass(frozen=True)
class VcpuPin:
    """A vCPU, the one OS CPU it is pinned to, and the guest cell it lies in."""

    vcpu: int
    os_cpu: int
    cell: int


@dataclass(frozen=True)
class GuestCell:
    """A NUMA cell of the guest and the host cell that its vCPUs run in.

    ``nodeset`` lists all host cells its memory may come from, where that is
    more than ``host_cell`` alone; ``distances`` holds (guest cell, distance)
    pairs in the ACPI scale, where 10 is local.
    """

    cell: int
    vcpus: tuple[int, ...]
    memory_mib: int
    host_cell: int
    distances: tuple[tuple[int, int], ...] = ()
    nodeset: tuple[int, ...] = ()


class MemoryBinding(StrEnum):
    """How guest memory is held to its host cells; ``NONE`` leaves it to first touch by pinned vCPUs."""

    STRICT = "strict"
    PREFERRED = "preferred"
    NONE = "none"


@dataclass(frozen=True)
class GuestTopology:
    """SMT topology the guest sees; the product is the number of vCPUs."""

    sockets: int
    dies: int
    cores: int
    threads: int


@dataclass(frozen=True)
class GuestPlan:
    """One guest of a job on a node: which CPUs, which memory, which devices.

    ``pcihole64_gib`` is address space for large BARs, 0 where QEMU's own will
    do; ``address_bits`` how wide physical addresses have to be for it and the
    memory, 0 without devices.
    """

    index: int
    hostname: str
    pins: tuple[VcpuPin, ...]
    topology: GuestTopology
    cells: tuple[GuestCell, ...]
    memory_mib: int
    emulator_cpus: tuple[int, ...]
    emulator_choice: str
    hugepage_kib: int = 0
    memory_binding: MemoryBinding = MemoryBinding.NONE
    devices: tuple[PassthroughDevice, ...] = ()
    controllers: tuple[PciController, ...] = ()
    pcihole64_gib: int = 0
    address_bits: int = 0


@dataclass(frozen=True)
class NodePlan:
    """All guests of one generation on one node; pure data, printable."""

    generation: Generation
    node: str
    guests: tuple[GuestPlan, ...]
    job_memory_mib: int
    reserve_mib: int
    notes: tuple[str, ...] = ()
