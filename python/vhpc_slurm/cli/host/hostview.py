# SPDX-License-Identifier: Apache-2.0
"""A host arranged for display: sockets, their cells, and the PCI functions below their root complexes.

Pure; the tree on a terminal and the picture are both drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.hardware import UNKNOWN_CELL, HostCache, PciFunction, PciLink, Reservation, address_key
from vhpc_slurm.model import HostCell, HostCpu, HostInventory

# PCI Code and ID Assignment Specification: base class and subclass
CLASSES = {
    0x0100: "SCSI",
    0x0101: "IDE",
    0x0104: "RAID",
    0x0106: "SATA",
    0x0107: "SAS",
    0x0108: "NVMe",
    0x0200: "Ethernet",
    0x0207: "InfiniBand",
    0x0208: "fabric",
    0x0280: "network",
    0x0300: "VGA",
    0x0302: "GPU",
    0x0380: "display",
    0x0403: "audio",
    0x0600: "host bridge",
    0x0601: "ISA bridge",
    0x0604: "bridge",
    0x0680: "bridge",
    0x0880: "system",
    0x0B40: "co-processor",
    0x0C03: "USB",
    0x0C06: "InfiniBand",
    0x0C05: "SMBus",
    0x1000: "crypto",
    0x1180: "signal processing",
    0x1200: "accelerator",
}
VENDORS = {
    0x1002: "AMD",
    0x1022: "AMD",
    0x10B5: "PLX",
    0x10DE: "NVIDIA",
    0x11F8: "Microchip",
    0x14E4: "Broadcom",
    0x1000: "Broadcom",
    0x102B: "Matrox",
    0x1077: "QLogic",
    0x144D: "Samsung",
    0x15B3: "Mellanox",
    0x1A03: "ASPEED",
    0x1AF4: "virtio",
    0x1BCF: "NEC",
    0x1DD8: "Pensando",
    0x8086: "Intel",
}
GPU_VENDORS = frozenset((0x1002, 0x10DE, 0x8086))
GPU_KINDS = frozenset((0x0380, 0x1200))
"""Classes of GPUs without a display: AMD's are display controllers until MI250X, then accelerators."""
MODELS = {
    (0x1002, 0x738C): "MI100",
    (0x1002, 0x7408): "MI250X",
    (0x1002, 0x740C): "MI250X",
    (0x1002, 0x740F): "MI210",
    (0x1002, 0x74A0): "MI300A",
    (0x1002, 0x74A1): "MI300X",
    (0x1002, 0x74A2): "MI308X",
    (0x1002, 0x74A5): "MI325X",
    (0x1002, 0x74B5): "MI300X",
    (0x1002, 0x75A0): "MI350X",
    (0x1002, 0x75A3): "MI355X",
    (0x8086, 0x0B69): "Max 1450",
    (0x8086, 0x0BD5): "Max 1550",
    (0x8086, 0x0BD6): "Max 1550",
    (0x8086, 0x0BD7): "Max 1350",
    (0x8086, 0x0BD9): "Max 1100",
    (0x8086, 0x0BDA): "Max 1100",
    (0x8086, 0x0BDB): "Max 1100",
    (0x8086, 0x56C0): "Flex 170",
    (0x8086, 0x56C1): "Flex 140",
}
"""Data-centre GPUs of AMD and Intel, by their ids; 74b5 is a virtual function.

Sources: pci.ids, AMD's guide to Instinct systems, Intel's resource drivers for Kubernetes.
"""
DULL = frozenset((0x05, 0x06, 0x08, 0x11))
"""Base classes of the platform's own functions; a bridge is shown only if a shown function is below."""
DULL_CLASSES = frozenset((0x0C05, 0x0780, 0x0B00))


@dataclass(frozen=True)
class FunctionTree:
    """A PCI function and the functions below it; virtual functions are listed with their physical one."""

    function: PciFunction
    below: tuple[FunctionTree, ...]
    vfs: tuple[PciFunction, ...]


@dataclass(frozen=True)
class Complex:
    """A root complex; ``cell`` is -1 if its functions have none or several."""

    name: str
    cell: int
    ports: tuple[FunctionTree, ...]


@dataclass(frozen=True)
class CellView:
    """A NUMA cell, or, with None, the CPUs and devices of no cell; cores in Slurm's order."""

    cell: HostCell | None
    cores: tuple[tuple[HostCpu, ...], ...]
    complexes: tuple[Complex, ...]
    caches: tuple[HostCache, ...]


@dataclass(frozen=True)
class CellGroup:
    """Cells that share sockets: usually one socket and its cells, or all sockets and one cell."""

    sockets: tuple[int, ...]
    cells: tuple[CellView, ...]

    @property
    def title(self) -> str:
        """``socket 0``, ``sockets 0, 1``."""
        if not self.sockets:
            return "host"
        return ("socket " if len(self.sockets) == 1 else "sockets ") + ", ".join(map(str, self.sockets))


@dataclass(frozen=True)
class HostView:
    """All groups; ``hidden`` counts PCI functions that are not shown."""

    groups: tuple[CellGroup, ...]
    offline: tuple[int, ...]
    hidden: int


def arrange(host: HostInventory) -> HostView:
    """Arrange a host in groups."""
    complexes, shown = _complexes(host.pci)
    known = {cell.cell for cell in host.cells}
    views = [
        CellView(
            cell,
            _cores(host, cell.cell),
            tuple(c for c in complexes if c.cell == cell.cell),
            _caches_of(host, set(cell.cpus)),
        )
        for cell in host.cells
    ]
    groups = _groups(views)
    unplaced = tuple(c for c in complexes if c.cell not in known)
    unplaced_cores = _cores(host, UNKNOWN_CELL)
    if unplaced or unplaced_cores:
        cpus = {cpu.os_cpu for core in unplaced_cores for cpu in core}
        sockets = tuple(sorted({cpu.socket for core in unplaced_cores for cpu in core}))
        groups.append(CellGroup(sockets, (CellView(None, unplaced_cores, unplaced, _caches_of(host, cpus)),)))
    offline = tuple(cpu.os_cpu for cpu in host.cpus if not cpu.online)
    return HostView(tuple(groups), offline, len(host.pci) - shown)


def kind(function: PciFunction) -> str:
    """The kind of function, in one or two words."""
    if function.vendor in GPU_VENDORS and function.class_code >> 8 in GPU_KINDS:
        return "GPU"
    return CLASSES.get(function.class_code >> 8, f"class {function.class_code >> 8:04x}")


def maker(function: PciFunction) -> str:
    """Vendor's name, if it is a common one, and the model of some GPUs, with both ids."""
    names = (VENDORS.get(function.vendor, ""), MODELS.get((function.vendor, function.device), ""))
    return " ".join([*filter(None, names), f"{function.vendor:04x}:{function.device:04x}"])


def short(address: str) -> str:
    """A PCI address without domain 0."""
    return address.removeprefix("0000:")


def link(found: PciLink | None) -> str:
    """``x16 32 GT/s``, with the maximum if it is higher; empty if the kernel does not know."""
    if found is None or not found.width or not found.speed_gts:
        return ""
    text = f"x{found.width} {found.speed_gts:g} GT/s"
    best = (found.max_width or found.width, found.max_speed_gts or found.speed_gts)
    if best != (found.width, found.speed_gts):
        text += f" of x{best[0]} {best[1]:g}"
    return text


def mib(number: int) -> str:
    """Memory in the largest binary unit that keeps three digits."""
    if number < 10240:
        return f"{number} MiB"
    return f"{number / 1024:.0f} GiB" if number < 10240 * 1024 else f"{number / 1024 / 1024:.1f} TiB"


def kib(number: int) -> str:
    """A page or cache size: ``64 KiB``, ``2 MiB``, ``1 GiB``."""
    for unit, size in (("GiB", 1 << 20), ("MiB", 1 << 10)):
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g} {unit}"
    return f"{number} KiB"


def _cores(host: HostInventory, cell: int) -> tuple[tuple[HostCpu, ...], ...]:
    cores: dict[int, list[HostCpu]] = {}
    for cpu in host.cpus:
        if cpu.online and cpu.cell == cell:
            cores.setdefault(cpu.core, []).append(cpu)
    return tuple(tuple(cores[core]) for core in sorted(cores))


def _caches_of(host: HostInventory, cpus: set[int]) -> tuple[HostCache, ...]:
    return tuple(cache for cache in host.caches if set(cache.cpus) & cpus)


def _groups(views: list[CellView]) -> list[CellGroup]:
    """Cells by the sockets of their CPUs; a cell without CPUs is grouped with the nearest that has some."""
    sockets = {view: frozenset(cpu.socket for core in view.cores for cpu in core) for view in views}
    joined: list[tuple[set[int], list[CellView]]] = []
    for view in (view for view in views if sockets[view]):
        same = [entry for entry in joined if entry[0] & sockets[view]]
        merged = ({*sockets[view]}.union(*(s for s, _ in same)), [v for _, vs in same for v in vs] + [view])
        joined = [entry for entry in joined if entry not in same] + [merged]
    for view in (view for view in views if not sockets[view]):
        assert view.cell is not None
        near = dict(view.cell.distances)
        home = min(
            (entry for entry in joined if any(v.cell and v.cell.cell in near for v in entry[1])),
            key=lambda entry: min(near.get(v.cell.cell, 1 << 16) for v in entry[1] if v.cell),
            default=None,
        )
        if home is None:
            joined.append((set(), [view]))
        else:
            home[1].append(view)
    found = [CellGroup(tuple(sorted(s)), tuple(vs)) for s, vs in joined]
    return sorted(found, key=lambda group: group.sockets or (1 << 16,))


# --- PCI ----------------------------------------------------------------------------


def _complexes(functions: Sequence[PciFunction]) -> tuple[list[Complex], int]:
    """Root complexes with visible functions, by their numbers, and the number of shown functions."""
    by_root: dict[str, list[PciFunction]] = {}
    for function in functions:
        by_root.setdefault(function.root_complex, []).append(function)
    found, shown = [], 0
    for name, members in sorted(by_root.items(), key=lambda item: address_key(item[1][0].address)):
        ports = _ports(members)
        seen = list(_all(ports))
        if not seen:
            continue
        shown += len(seen)
        cells = {function.cell for function in seen} - {UNKNOWN_CELL}
        found.append(Complex(name, cells.pop() if len(cells) == 1 else UNKNOWN_CELL, ports))
    return found, shown


def _ports(members: list[PciFunction]) -> tuple[FunctionTree, ...]:
    here = {function.address: function for function in members}
    below: dict[str, list[PciFunction]] = {}
    vfs: dict[str, list[PciFunction]] = {}
    for function in members:
        if function.physfn in here:
            vfs.setdefault(function.physfn, []).append(function)
        else:
            above = [bridge for bridge in function.bridges if bridge in here]
            below.setdefault(above[-1] if above else "", []).append(function)

    def build(parent: str) -> tuple[FunctionTree, ...]:
        ports = []
        for function in below.get(parent, ()):
            inner = build(function.address)
            if inner or not _dull(function):
                ports.append(FunctionTree(function, inner, tuple(vfs.get(function.address, ()))))
        return tuple(ports)

    return build("")


def _dull(function: PciFunction) -> bool:
    code = function.class_code >> 8
    return code >> 8 in DULL or code in DULL_CLASSES


def _all(ports: Iterable[FunctionTree]) -> Iterable[PciFunction]:
    for port in ports:
        yield port.function
        yield from port.vfs
        yield from _all(port.below)


def holder(reservation: Reservation) -> str:
    """A guest's short name."""
    return f"{reservation.generation} g{reservation.guest}"


def describe(reservation: Reservation) -> str:
    """The resources that a guest holds, in one line."""
    parts = [f"CPUs {format_cpu_list(reservation.cpus)}"]
    pages = f" in pages of {kib(reservation.hugepage_kib)}" if reservation.hugepage_kib else ""
    for cell, size in reservation.cells:
        parts.append(f"{mib(size)}{pages}" + (f" of cell {cell}" if cell >= 0 else ""))
    parts += [short(address) for address in reservation.devices]
    return ", ".join(parts)
