# SPDX-License-Identifier: Apache-2.0
"""CPUs, cores, sockets and caches, in the order in which Slurm counts them.

Slurm counts CPUs abstractly (socket by socket, core by core, thread by
thread) in hwloc's logical order, loaded with L1 and L2 caches ignored
(slurmd, ``xcpuinfo.c``).  hwloc sorts the children of every object by their
lowest OS CPU number, so the order follows from the CPU sets of packages,
dies, NUMA cells, L3 caches, clusters and cores; hwloc itself is not needed.

Source: Documentation/admin-guide/cputopology.rst, Documentation/ABI/testing/sysfs-devices-system-cpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vhpc_slurm.hardware import NO_CLUSTER, UNKNOWN_CELL, HostCache
from vhpc_slurm.model import HostCpu
from vhpc_slurm.node.host import sysfs
from vhpc_slurm.node.host.sysfs import bits, lowest, mask_of
from vhpc_slurm.record import Record

NOWHERE = -1
CACHE_SORTING_LEVEL = 3
_KINDS = {"Data": "data", "Instruction": "instruction", "Unified": "unified"}
_UNITS = {"K": 1, "M": 1 << 10, "G": 1 << 20}


class Topology(Record, frozen=True):
    """Online CPUs in abstract order, offline CPUs, and caches, smallest first."""

    online: tuple[HostCpu, ...]
    offline: tuple[HostCpu, ...]
    caches: tuple[HostCache, ...]


def read_topology(sysfs_root: str, cell_cpus: dict[int, int], online: int, offline: int) -> Topology:
    """The topology of a host.

    Args:
        sysfs_root: path of sysfs.
        cell_cpus: mask of the online CPUs of each NUMA cell.
        online: mask of the online CPUs.
        offline: mask of the CPUs that are present and offline.

    Raises:
        OSError, ValueError: a file is unreadable, or not in the kernel's format.
    """
    around = _surroundings(sysfs_root, online)
    packages = _nested([sets.package for sets in around.values()])
    caches = _caches(sysfs_root, online, packages)
    absent = tuple(HostCpu(cpu, NOWHERE, NOWHERE, NOWHERE, online=False) for cpu in bits(offline))
    sorting = [mask for level, _, mask in caches if level == CACHE_SORTING_LEVEL]
    ordered = _ordered(around, packages, [*cell_cpus.values()], sorting)
    cell_of = {cpu: cell for cell, mask in cell_cpus.items() for cpu in bits(mask)}
    placed = tuple(replace(cpu, cell=cell_of.get(cpu.os_cpu, UNKNOWN_CELL)) for cpu in ordered)
    found = tuple(
        HostCache(level, kind, size, tuple(bits(mask)))
        for (level, kind, mask), size in sorted(caches.items())
    )
    return Topology(placed, absent, found)


def cpu_numbers(sysfs_root: str) -> tuple[int, int]:
    """Masks of online and of offline (but present) CPUs.

    Kernels before 2.6.26 have no ``online`` file; there each CPU has its own.
    """
    root = f"{sysfs_root}/devices/system/cpu"
    online = sysfs.read_list(f"{root}/online")
    present = sysfs.read_list(f"{root}/present")
    if not online:
        for cpu, folder in sysfs.numbered(root, "cpu"):
            present |= 1 << cpu
            if sysfs.text(f"{folder}/online") != "0":
                online |= 1 << cpu
    return online, present & ~online


def performance_cores(sysfs_root: str) -> int:
    """CPUs of performance cores on a hybrid x86 machine, 0 elsewhere.

    slurmd does not count efficiency cores (unless ``allow_ecores`` is set,
    which vhpc does not support: cores would differ in their thread count).
    """
    if sysfs.text(f"{sysfs_root}/devices/cpu_atom/cpus") is None:
        return 0
    return sysfs.read_list(f"{sysfs_root}/devices/cpu_core/cpus")


# --- caches -------------------------------------------------------------------------


def _caches(sysfs_root: str, online: int, packages: Sequence[int]) -> dict[tuple[int, str, int], int]:
    """Size in KiB of each cache, by level, kind and CPU mask.

    CPUs that share all their L1 caches share all caches above them too, so only
    one of them is read.  A cache that overlaps packages is a firmware error.
    """
    found: dict[tuple[int, str, int], int] = {}
    left = online
    while left:
        cpu = lowest(left)
        alike = left
        for _, index in sysfs.numbered(f"{sysfs_root}/devices/system/cpu/cpu{cpu}/cache", "index"):
            level = sysfs.text(f"{index}/level") or ""
            mask = sysfs.read_mask(f"{index}/shared_cpu_map") & online
            if not level.isdecimal() or not mask:
                continue
            if level == "1":
                alike &= mask
            kind = _KINDS.get(sysfs.text(f"{index}/type") or "", "unified")
            if all((mask & package) in (0, mask, package) for package in packages):
                found[int(level), kind, mask] = _size_kib(sysfs.text(f"{index}/size") or "")
        left &= ~((alike if alike != left else 0) | 1 << cpu)
    return found


def _size_kib(text: str) -> int:
    """Size in KiB of a text like ``48K``; 0 if the kernel does not report it."""
    number, unit = text[:-1], text[-1:]
    return int(number) * _UNITS[unit] if number.isdecimal() and unit in _UNITS else 0


# --- order --------------------------------------------------------------------------


class _Around(Record, frozen=True):
    """CPU sets that contain one CPU."""

    package: int
    core: int
    die: int
    cluster: int


def _ordered(
    around: dict[int, _Around], packages: list[int], cells: list[int], caches: list[int]
) -> list[HostCpu]:
    """Online CPUs in abstract order; cores, clusters and sockets are numbered in that order, host-wide."""
    sets = _nested(
        [
            *packages,
            *(near.core for near in around.values()),
            *cells,
            *(near.die for near in around.values()),
            *(near.cluster for near in around.values()),
            *caches,
        ]
    )
    place: dict[int, list[int]] = {cpu: [] for cpu in around}
    for mask in sets:  # outermost first: the lowest CPU of each set around a CPU
        first = lowest(mask)
        for cpu in bits(mask):
            place[cpu].append(first)
    # A CPU may report a package that contradicts others; then the package that another CPU reports counts.
    package_of = {cpu: mask for mask in packages for cpu in bits(mask)}
    sockets: dict[int, int] = {}
    cores: dict[int, int] = {}
    clusters: dict[int, int] = {}
    ordered = []
    for cpu in sorted(around, key=lambda cpu: (*place[cpu], cpu)):
        socket = sockets.setdefault(package_of.get(cpu, around[cpu].package), len(sockets))
        core = cores.setdefault(around[cpu].core, len(cores))
        near = around[cpu].cluster
        # the kernel gives a CPU without a cluster one of its own; of contradicting sets the first counts
        several = near in sets and near & ~around[cpu].core
        cluster = clusters.setdefault(near, len(clusters)) if several else NO_CLUSTER
        ordered.append(HostCpu(cpu, core, socket, UNKNOWN_CELL, cluster=cluster))
    return ordered


def _surroundings(sysfs_root: str, online: int) -> dict[int, _Around]:
    folders = {cpu: f"{sysfs_root}/devices/system/cpu/cpu{cpu}/topology" for cpu in bits(online)}
    core_ids = {cpu: sysfs.text(f"{folder}/core_id") for cpu, folder in folders.items()}
    shared: dict[int, tuple[int, int, int]] = {}  # data that siblings share is read once
    found = {}
    for cpu, folder in folders.items():
        own = 1 << cpu
        siblings = sysfs.first_mask(folder, "core_cpus", "thread_siblings") & online | own
        if siblings not in shared:
            package = sysfs.first_mask(folder, "package_cpus", "core_siblings") & online
            die = sysfs.read_mask(f"{folder}/die_cpus") & online
            shared[siblings] = (package, die, sysfs.read_mask(f"{folder}/cluster_cpus") & online)
        package, die, cluster = shared[siblings]
        # AMD's family 15h lists the two cores of a compute unit as thread siblings;
        # hwloc, and with it Slurm, counts two cores.
        core = mask_of(other for other in bits(siblings) if core_ids[other] == core_ids[cpu])
        found[cpu] = _Around(package | own, core, die, cluster)
    return found


def _nested(candidates: Sequence[int]) -> list[int]:
    """The sets, larger first, that do not partly overlap one accepted before.

    With contradicting firmware data the first set counts, as in hwloc.
    """
    kept: list[int] = []
    around: dict[int, list[int]] = {}
    for mask in dict.fromkeys(candidates):
        members = bits(mask)
        near = {other for cpu in members for other in around.get(cpu, ())}
        if mask and all((mask & other) in (mask, other) for other in near):
            kept.append(mask)
            for cpu in members:
                around.setdefault(cpu, []).append(mask)
    return sorted(kept, key=lambda mask: (-mask.bit_count(), lowest(mask)))
