# SPDX-License-Identifier: Apache-2.0
"""A compute node as its kernel describes it."""

from __future__ import annotations

from vhpc_slurm.hardware import NO_CLUSTER, HostCache, PciFunction
from vhpc_slurm.record import Record


class HostCpu(Record, frozen=True, order=True):
    """One logical CPU: Linux numbers, and its place in the host's topology.

    ``cluster`` numbers the groups of cores that share a cache or a part of the bus
    (cluster_cpus in Linux); -1 for a core without a cluster.
    """

    os_cpu: int
    core: int
    socket: int
    cell: int
    online: bool = True
    cluster: int = NO_CLUSTER


class HostCell(Record, frozen=True):
    """One NUMA cell; ``hugepages`` maps page size in KiB to (total, free) pages.

    ``gpu`` is the PCI address of the GPU whose memory the cell is, empty for
    the host's own: no guest gets memory of it.
    """

    cell: int
    memory_mib: int
    cpus: tuple[int, ...]
    distances: tuple[tuple[int, int], ...]
    hugepages: tuple[tuple[int, int, int], ...] = ()
    gpu: str = ""


class HostInventory(Record, frozen=True):
    """A compute node as its kernel describes it.

    ``abstract`` lists OS CPU ids in Slurm's abstract order: entry *i* is the OS
    id of abstract CPU *i*.  ``address_bits`` is how wide the CPU's physical
    addresses are, 0 where that is not known.  ``invariant_tsc``: the CPU's time
    stamp counter runs on in all power states; those of virtual machines seldom do.
    ``remarks`` are lines for people about what could not be read.
    """

    node: str
    cpu_vendor: str
    cpus: tuple[HostCpu, ...]
    cells: tuple[HostCell, ...]
    abstract: tuple[int, ...]
    kvm: bool
    kvm_reason: str
    arch: str = "x86_64"
    caches: tuple[HostCache, ...] = ()
    pci: tuple[PciFunction, ...] = ()
    address_bits: int = 0
    invariant_tsc: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def memory_cells(self) -> tuple[HostCell, ...]:
        """The cells that guests may have memory of: not those of GPUs."""
        return tuple(cell for cell in self.cells if not cell.gpu)

    @property
    def memory_mib(self) -> int:
        """All of the host's own memory."""
        return sum(cell.memory_mib for cell in self.memory_cells)
