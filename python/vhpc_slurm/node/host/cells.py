# SPDX-License-Identifier: Apache-2.0
"""NUMA cells: CPUs, memory, distances and huge pages.

NVIDIA's driver may show the memory of a GPU as a separate cell, with memory
and without CPUs (POWER9, Grace).  The kernel does not distinguish such a cell
from host memory; the driver does, in ``numa_status``.

Sources: Documentation/ABI/stable/sysfs-devices-node, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import re

from vhpc_slurm.model import HostCell
from vhpc_slurm.node.host import sysfs
from vhpc_slurm.node.host.sysfs import bits

_POOL = re.compile(r"hugepages-([0-9]{1,9})kB", re.ASCII)
_NODE = re.compile(r"^Node:\s*([0-9]{1,6})\s*$", re.ASCII | re.MULTILINE)
_TOTAL = re.compile(r"MemTotal:\s*([0-9]{1,15}) kB", re.ASCII)


def cell_cpus(sysfs_root: str, online: int) -> dict[int, int]:
    """Online CPUs of each NUMA cell; a kernel without NUMA has one cell, 0, with all of them."""
    cells = {cell: sysfs.read_mask(f"{folder}/cpumap") & online for cell, folder in _folders(sysfs_root)}
    return cells or {0: online}


def read_cells(sysfs_root: str, proc_root: str, cpus: dict[int, int]) -> tuple[HostCell, ...]:
    """The cells of a host, by their numbers.

    Args:
        sysfs_root: path of sysfs.
        proc_root: path of procfs: read for the memory of a host with at most one cell, and
            for the cells of GPUs.
        cpus: the result of ``cell_cpus``.

    Raises:
        OSError, ValueError: a file is unreadable, or not in the kernel's format.
    """
    folders = dict(_folders(sysfs_root))
    # not every kernel lists the possible cells
    possible = bits(sysfs.read_list(f"{sysfs_root}/devices/system/node/possible")) or list(folders)
    everything = _memory_mib(f"{proc_root}/meminfo") if len(possible) <= 1 else 0
    gpus = _gpus(proc_root)
    if not folders:
        pages = _hugepages(f"{sysfs_root}/kernel/mm/hugepages")
        return (HostCell(0, everything, tuple(bits(cpus[0])), ((0, 10),), pages),)
    return tuple(
        HostCell(
            cell=cell,
            # A single cell has all memory; some kernels omit hot-added memory in the cell's own count.
            memory_mib=max(_memory_mib(f"{folder}/meminfo"), everything),
            cpus=tuple(bits(cpus[cell])),
            distances=_distances(cell, folder, list(folders), possible),
            hugepages=_hugepages(f"{folder}/hugepages"),
            gpu="" if cpus[cell] else gpus.get(cell, ""),
        )
        for cell, folder in folders.items()
    )


def _gpus(proc_root: str) -> dict[int, str]:
    """GPUs whose memory is a cell, by its number; for others the driver writes -1, or has no such file."""
    folder = f"{proc_root}/driver/nvidia/gpus"
    found = {}
    for address in sysfs.listing(folder):
        match = _NODE.search(sysfs.text_or_empty(f"{folder}/{address}/numa_status"))
        if match is not None:
            found[int(match[1])] = address
    return found


def _folders(sysfs_root: str) -> list[tuple[int, str]]:
    return sysfs.numbered(f"{sysfs_root}/devices/system/node", "node")


def _distances(cell: int, folder: str, online: list[int], possible: list[int]) -> tuple[tuple[int, int], ...]:
    """(cell, distance) to each online cell; 10 is local (ACPI SLIT).

    The kernel prints a row with an entry per online cell, some kernels one
    per possible cell.  Any other row is ignored.
    """
    row = [int(word) for word in (sysfs.text(f"{folder}/distance") or "").split()]
    for cells in (online, possible):
        if len(row) == len(cells):
            return tuple(
                (other, distance) for other, distance in zip(cells, row, strict=True) if other in online
            )
    return ((cell, 10),)


def _memory_mib(meminfo: str) -> int:
    """``MemTotal`` of a ``meminfo`` file in MiB, rounded down; 0 if it has no such line."""
    found = sysfs.text(meminfo)
    if found is None:
        return 0
    match = _TOTAL.search(found)
    if match is None:
        raise ValueError(f"no MemTotal in {meminfo}")
    return int(match[1]) // 1024


def _hugepages(folder: str) -> tuple[tuple[int, int, int], ...]:
    """(page size in KiB, total, free) for each size, smallest first."""
    pools = []
    for pool in filter(None, map(_POOL.fullmatch, sysfs.listing(folder))):
        where = f"{folder}/{pool[0]}"
        pools.append((int(pool[1]), _count(f"{where}/nr_hugepages"), _count(f"{where}/free_hugepages")))
    return tuple(sorted(pools))


def _count(path: str) -> int:
    return int(sysfs.text(path) or "0")
