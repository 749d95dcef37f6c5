"""PCI functions as the kernel describes them.

Everything but a function's class and ids may be absent: kernels differ, and
so do devices.  A function that disappears while it is read is left out.

Sources: Documentation/ABI/testing/sysfs-bus-pci, Documentation/PCI/sysfs-pci.rst;
flags of ``resource``: include/linux/ioport.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vhpc_slurm.hardware import UNKNOWN_CELL, PciBar, PciFunction, PciLink, address_key
from vhpc_slurm.node import sysfs
from vhpc_slurm.node.sysfs import bits, mask_of

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) GT/s", re.ASCII)
_VIRTFN = re.compile(r"virtfn([0-9]{1,5})", re.ASCII)
BARS = 6  # the first lines of `resource`; ROM, VF BARs and bridge windows follow
IO, MEMORY, PREFETCHABLE, WIDE = 0x100, 0x200, 0x2000, 0x0010_0000
NAMED = ("net", "infiniband", "nvme")
WIDTHS = frozenset((1, 2, 4, 8, 12, 16, 32))  # the kernel prints 0, 63 or 255 for a link that is down


def read(sysfs_root: str, cell_cpus: dict[int, int], online: int) -> tuple[PciFunction, ...]:
    """All PCI functions of a host, by their addresses; none where it has no PCI.

    Args:
        sysfs_root: where sysfs is.
        cell_cpus: mask of the online CPUs of each NUMA cell.
        online: mask of the online CPUs.

    Raises:
        OSError: the folder of PCI devices is there and cannot be read.
    """
    folder = f"{sysfs_root}/bus/pci/devices"
    known: dict[str, tuple[int, ...]] = {}
    found = []
    for name in sorted(filter(ADDRESS.fullmatch, sysfs.listing(folder)), key=address_key):
        function = _function(folder, name, cell_cpus, online, known)
        if function is not None:
            found.append(function)
    return tuple(found)


def _function(
    folder: str, address: str, cell_cpus: dict[int, int], online: int, known: dict[str, tuple[int, ...]]
) -> PciFunction | None:
    path = f"{folder}/{address}"
    try:
        entries = set(sysfs.listing(path))
        identity = [int(sysfs.hint(f"{path}/{name}"), 16) for name in ("class", "vendor", "device")]
        root_complex, bridges = _place(sysfs.link(path))
    except (OSError, ValueError):
        return None  # gone, or not yet all there

    def maybe(name: str) -> str:
        return sysfs.hint(f"{path}/{name}") if name in entries else ""

    def points(name: str) -> str:
        return sysfs.link(f"{path}/{name}").rpartition("/")[2] if name in entries else ""

    local = maybe("local_cpus")
    if local not in known:
        known[local] = _local(local, online)
    cpus = known[local]
    group = points("iommu_group")
    virtual = sorted((int(match[1]), match[0]) for match in map(_VIRTFN.fullmatch, entries) if match)
    methods = maybe("reset_method")
    return PciFunction(
        address=address,
        class_code=identity[0],
        vendor=identity[1],
        device=identity[2],
        driver=points("driver"),
        cell=_cell(maybe("numa_node"), mask_of(cpus), cell_cpus),
        cpus=cpus,
        root_complex=root_complex,
        bridges=bridges,
        iommu_group=int(group) if group.isdecimal() else None,
        reset_methods=tuple(methods.split()) if "reset_method" in entries else None,
        bars=_bars(maybe("resource")),
        physfn=points("physfn"),
        virtfns=tuple(filter(ADDRESS.fullmatch, (points(name) for _, name in virtual))),
        vfs_max=_number(maybe("sriov_totalvfs")),
        link=_link(maybe),
        names=tuple(name for kind in NAMED if kind in entries for name in sysfs.listing(f"{path}/{kind}")),
    )


def _place(target: str) -> tuple[str, tuple[str, ...]]:
    """Root complex and bridges, from where the entry of ``/sys/bus/pci/devices`` points to.

    A VMD controller is a PCI function with a root complex of its own below it:
    the innermost one counts.
    """
    parts = target.split("/")
    roots = [at for at, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not roots:
        return "", ()
    return parts[roots[-1]], tuple(part for part in parts[roots[-1] + 1 : -1] if ADDRESS.fullmatch(part))


def _local(text: str, online: int) -> tuple[int, ...]:
    try:
        return tuple(bits(int(text.replace(",", "") or "0", 16) & online))
    except ValueError:
        return ()


def _cell(text: str, local: int, cell_cpus: dict[int, int]) -> int:
    """The cell by its number, else the one that has all local CPUs."""
    if text.isdecimal():
        return int(text)
    near = [cell for cell, mask in cell_cpus.items() if local and local & ~mask == 0]
    return near[0] if len(near) == 1 else UNKNOWN_CELL


def _bars(resource: str) -> tuple[PciBar, ...]:
    bars = []
    for index, line in enumerate(resource.splitlines()[:BARS]):
        try:
            start, end, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if end > start and flags & (IO | MEMORY):
            bars.append(
                PciBar(
                    index,
                    end - start + 1,
                    memory=bool(flags & MEMORY),
                    wide=bool(flags & WIDE),
                    prefetchable=bool(flags & PREFETCHABLE),
                )
            )
    return tuple(bars)


def _link(maybe: Callable[[str], str]) -> PciLink | None:
    speeds = [maybe(f"{which}_link_speed") for which in ("current", "max")]
    widths = [maybe(f"{which}_link_width") for which in ("current", "max")]
    if not any((*speeds, *widths)):
        return None
    (now, best), (lanes, most) = map(_speed, speeds), map(_width, widths)
    return PciLink(now, lanes, best, most)


def _speed(text: str) -> float:
    match = _SPEED.match(text)
    return float(match[1]) if match else 0.0


def _width(text: str) -> int:
    lanes = _number(text)
    return lanes if lanes in WIDTHS else 0


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
