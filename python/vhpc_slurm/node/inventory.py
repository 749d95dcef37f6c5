"""A compute node as its kernel describes it: sysfs and procfs -> ``HostInventory``.

Only reads, and only below the roots it is given, so that captured trees of
other machines work as well as this one.

The order of CPUs matters most.  Slurm counts them abstractly (socket by
socket, core by core, thread by thread) in hwloc's logical order, loaded with
L1 and L2 caches ignored (slurmd, ``xcpuinfo.c``).  hwloc sorts the children
of every object by their lowest OS CPU number, so the order follows from the
CPU sets of packages, dies, NUMA cells, L3 caches, clusters and cores; hwloc
itself is not needed.

Sources: Documentation/admin-guide/cputopology.rst,
Documentation/ABI/stable/sysfs-devices-node, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostCell, HostCpu, HostInventory

PROC = Path("/proc")
KVM_DEVICE = Path("/dev/kvm")
NOWHERE = -1


def read(
    node: str,
    config: Config,
    *,
    proc_root: Path = PROC,
    kvm_device: Path = KVM_DEVICE,
) -> HostInventory:
    """Describe this node.

    Args:
        node: Slurm's name of the node.
        config: ``host.sysfs_root`` names the tree to read; ``guests.accelerator`` has the last word on KVM.
        proc_root: where procfs is; ``cpuinfo`` and, with at most one NUMA cell, ``meminfo`` are read.
        kvm_device: the device node that QEMU would open.

    Raises:
        NodeError: the tree lacks what every Linux has, or is unreadable.
    """
    sysfs = Path(config.host.sysfs_root)
    try:
        cpuinfo = (proc_root / "cpuinfo").read_text(encoding="utf-8", errors="replace")
        online, offline = _cpu_numbers(sysfs)
        cell_cpus = _cell_cpus(sysfs, online)
        slurm_cpus = online & (_performance_cores(sysfs) or online)
        topology = _topology(sysfs, online, cell_cpus)
        cells = _cells(sysfs, proc_root, cell_cpus)
    except (OSError, ValueError) as err:
        raise NodeError(f"cannot read the topology of {node} below {sysfs}", str(err)) from err
    if not topology:
        raise NodeError(f"{sysfs} lists no online CPU", "", "check host.sysfs_root")
    absent = [HostCpu(cpu, NOWHERE, NOWHERE, NOWHERE, online=False) for cpu in _bits(offline)]
    kvm, reason = decide_kvm(config.guests.accelerator, cpuinfo, kvm_device)
    return HostInventory(
        node=node,
        cpu_vendor=_cpuinfo_field(cpuinfo, "vendor_id"),
        cpus=tuple(sorted([*topology, *absent])),
        cells=cells,
        abstract=tuple(cpu.os_cpu for cpu in topology if slurm_cpus >> cpu.os_cpu & 1),
        kvm=kvm,
        kvm_reason=reason,
        arch=platform.machine(),
    )


def decide_kvm(accelerator: str, cpuinfo: str, kvm_device: Path = KVM_DEVICE) -> tuple[bool, str]:
    """Whether guests use KVM here, and one clause that says why.

    A device that opens proves little: software modules provide ``/dev/kvm`` on
    CPUs without virtualization, and distribution kernels do not boot there.
    So the CPU has to show svm or vmx as well, unless the site insists.

    Args:
        accelerator: ``auto``, ``kvm`` or ``tcg``: the site's word.
        cpuinfo: text of /proc/cpuinfo.
        kvm_device: the device node that QEMU would open.

    Raises:
        NodeError: the site insists on KVM and the device does not open.
    """
    if accelerator == "tcg":
        return False, "guests.accelerator = tcg"
    problem = _open_problem(kvm_device)
    if accelerator == "kvm":
        if problem:
            raise NodeError(
                "guests.accelerator = kvm, but KVM is not usable",
                problem,
                "load kvm_intel or kvm_amd, enable virtualization in the firmware, or set accelerator = auto",
            )
        return True, "guests.accelerator = kvm"
    if problem:
        return False, problem
    flags = set(_cpuinfo_field(cpuinfo, "flags").split())
    for flag in ("vmx", "svm"):
        if flag in flags:
            return True, f"{kvm_device} opens and the CPU has {flag}"
    return False, f"{kvm_device} opens, but the CPU shows neither svm nor vmx"


def _open_problem(device: Path) -> str:
    """Why ``device`` does not open read-write; empty when it does."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as err:
        if err.errno == errno.ENOENT:
            return f"there is no {device}"
        return f"{device} does not open: {err.strerror}"
    return ""


def _cpuinfo_field(cpuinfo: str, key: str) -> str:
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


# --- sets of CPUs: integers used as bit masks, CPU n is bit n -------------------


def _bits(mask: int) -> list[int]:
    return [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1]


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _mask_of(cpus: Iterable[int]) -> int:
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return mask


def _text(path: Path) -> str:
    """A sysfs attribute; kernels 2.6.32 ended CPU lists with a newline and a NUL."""
    return path.read_text(encoding="ascii").strip(" \n\0")


def _read_mask(path: Path) -> int:
    """A kernel cpumask file (``ffffffff,00000003``); 0 when there is no such file."""
    try:
        return int(_text(path).replace(",", "") or "0", 16)
    except FileNotFoundError:
        return 0


def _read_list(path: Path) -> int:
    """A kernel CPU list file (``0-3,8``); 0 when there is no such file."""
    try:
        return _mask_of(parse_cpu_list(_text(path)))
    except FileNotFoundError:
        return 0


# --- CPUs ---------------------------------------------------------------------------


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """The entries ``prefix<N>`` of a folder with their numbers, in numeric order."""
    pattern = re.compile(rf"{prefix}([0-9]+)", re.ASCII)
    if not folder.is_dir():
        return []
    found = ((pattern.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match[1]), entry) for match, entry in found if match)


def _cpu_numbers(sysfs: Path) -> tuple[int, int]:
    """Masks of online and of offline (present, switched off) CPUs.

    Kernels before 2.6.26 have no ``online`` file; there each CPU says so itself.
    """
    root = sysfs / "devices/system/cpu"
    online = _read_list(root / "online")
    present = _read_list(root / "present")
    if not online:
        for cpu, folder in _numbered(root, "cpu"):
            present |= 1 << cpu
            switch = folder / "online"
            if not switch.exists() or _text(switch) != "0":
                online |= 1 << cpu
    return online, present & ~online


def _performance_cores(sysfs: Path) -> int:
    """CPUs of performance cores on a hybrid x86 machine, 0 elsewhere.

    slurmd leaves efficiency cores out of its count (unless ``allow_ecores``,
    which vhpc does not support: cores would differ in their thread count).
    """
    if not (sysfs / "devices/cpu_atom/cpus").exists():
        return 0
    return _read_list(sysfs / "devices/cpu_core/cpus")


def _first_mask(folder: Path, *names: str) -> int:
    for name in names:
        mask = _read_mask(folder / name)
        if mask:
            return mask
    return 0


@dataclass(frozen=True)
class _Sets:
    """CPU sets of one CPU's surroundings."""

    package: int
    core: int
    others: tuple[int, ...]


def _core(sysfs: Path, cpu: int, siblings: int) -> int:
    """Those siblings that share the CPU's core number.

    AMD's family 15h lists the two cores of a compute unit as thread siblings;
    hwloc, and with it Slurm, counts two cores.
    """

    def core_id(other: int) -> str:
        try:
            return _text(sysfs / f"devices/system/cpu/cpu{other}/topology/core_id")
        except FileNotFoundError:
            return ""

    own = core_id(cpu)
    return _mask_of(other for other in _bits(siblings) if core_id(other) == own)


def _surroundings(sysfs: Path, cpu: int, online: int) -> _Sets:
    folder = sysfs / f"devices/system/cpu/cpu{cpu}"
    own = 1 << cpu
    topology = folder / "topology"
    package = _first_mask(topology, "package_cpus", "core_siblings") & online | own
    core = _core(sysfs, cpu, _first_mask(topology, "core_cpus", "thread_siblings") & online | own)
    others = [_read_mask(topology / "die_cpus"), _read_mask(topology / "cluster_cpus")]
    for _, index in _numbered(folder / "cache", "index"):
        try:
            level = int(_text(index / "level"))
        except (FileNotFoundError, ValueError):
            continue
        if level == 3:
            others.append(_read_mask(index / "shared_cpu_map"))
    return _Sets(package, core, tuple(mask & online for mask in others))


def _nested(candidates: Iterable[int]) -> list[int]:
    """Those sets, larger ones first, that do not cut across one accepted before.

    As hwloc does with contradicting firmware: what was named first stays.
    """
    kept: list[int] = []
    for mask in dict.fromkeys(candidates):
        if mask and all((mask & other) in (0, mask, other) for other in kept):
            kept.append(mask)
    return sorted(kept, key=lambda mask: (-mask.bit_count(), _lowest(mask)))


def _topology(sysfs: Path, online: int, cell_cpus: dict[int, int]) -> list[HostCpu]:
    """Online CPUs in abstract order; cores and sockets are numbered in that order, host-wide."""
    around = {cpu: _surroundings(sysfs, cpu, online) for cpu in _bits(online)}
    sets = _nested(
        [
            *(sets.package for sets in around.values()),
            *(sets.core for sets in around.values()),
            *cell_cpus.values(),
            *(mask for sets in around.values() for mask in sets.others),
        ]
    )

    def place(cpu: int) -> tuple[int, ...]:
        """Lowest CPU of each set around this one, outermost first."""
        return (*(_lowest(mask) for mask in sets if mask >> cpu & 1), cpu)

    cell_of = {cpu: cell for cell, mask in cell_cpus.items() for cpu in _bits(mask)}
    sockets: dict[int, int] = {}
    cores: dict[int, int] = {}
    ordered = []
    for cpu in sorted(around, key=place):
        socket = sockets.setdefault(around[cpu].package, len(sockets))
        core = cores.setdefault(around[cpu].core, len(cores))
        ordered.append(HostCpu(cpu, core, socket, cell_of.get(cpu, NOWHERE)))
    return ordered


# --- NUMA cells ---------------------------------------------------------------------


def _node_folders(sysfs: Path) -> list[tuple[int, Path]]:
    return _numbered(sysfs / "devices/system/node", "node")


def _cell_cpus(sysfs: Path, online: int) -> dict[int, int]:
    """Online CPUs of each NUMA cell; a kernel without NUMA has one cell, 0, with all of them."""
    cells = {cell: _read_mask(folder / "cpumap") & online for cell, folder in _node_folders(sysfs)}
    return cells or {0: online}


def _cells(sysfs: Path, proc_root: Path, cell_cpus: dict[int, int]) -> tuple[HostCell, ...]:
    folders = dict(_node_folders(sysfs))
    possible = _bits(_read_list(sysfs / "devices/system/node/possible"))
    everything = _memory_mib(proc_root / "meminfo") if len(possible) <= 1 else 0
    if not folders:
        memory = everything
        pages = _hugepages(sysfs / "kernel/mm/hugepages")
        return (HostCell(0, memory, tuple(_bits(cell_cpus[0])), ((0, 10),), pages),)
    return tuple(
        HostCell(
            cell=cell,
            # A lone cell has it all; some kernels leave hot-added memory out of the cell's own count.
            memory_mib=max(_memory_mib(folder / "meminfo"), everything),
            cpus=tuple(_bits(cell_cpus[cell])),
            distances=_distances(cell, folder, list(folders), possible),
            hugepages=_hugepages(folder / "hugepages"),
        )
        for cell, folder in folders.items()
    )


def _distances(
    cell: int, folder: Path, online: list[int], possible: list[int]
) -> tuple[tuple[int, int], ...]:
    """(cell, distance) to each online cell; 10 is local (ACPI SLIT).

    The kernel prints a row with an entry per online cell, some kernels one
    per possible cell.  A row that is neither says nothing about others.
    """
    row = [int(word) for word in _text(folder / "distance").split()]
    for cells in (online, possible):
        if len(row) == len(cells):
            return tuple(
                (other, distance) for other, distance in zip(cells, row, strict=True) if other in online
            )
    return ((cell, 10),)


def _memory_mib(meminfo: Path) -> int:
    """``MemTotal`` of a ``meminfo`` file in MiB, rounded down."""
    if not meminfo.exists():
        return 0
    match = re.search(r"MemTotal:\s*([0-9]+) kB", meminfo.read_text(encoding="ascii"))
    if match is None:
        raise ValueError(f"no MemTotal in {meminfo}")
    return int(match[1]) // 1024


def _hugepages(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """(page size in KiB, total, free) for each size, smallest first."""
    sizes = []
    if folder.is_dir():
        for entry in folder.iterdir():
            match = re.fullmatch(r"hugepages-([0-9]+)kB", entry.name, re.ASCII)
            if match:
                total = int(_text(entry / "nr_hugepages"))
                free = int(_text(entry / "free_hugepages"))
                sizes.append((int(match[1]), total, free))
    return tuple(sorted(sizes))
