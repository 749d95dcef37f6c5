# SPDX-License-Identifier: Apache-2.0
"""PCI functions as the kernel describes them.

Everything except a function's class and ids may be absent: kernels and devices
differ.  A function that disappears while it is read is omitted; one that
remains but whose class and ids cannot be read is omitted with a remark.

Sources: Documentation/ABI/testing/sysfs-bus-pci, Documentation/PCI/sysfs-pci.rst;
flags of ``resource``: include/linux/ioport.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vhpc_slurm.hardware import PCI_ADDRESS, UNKNOWN_CELL, PciBar, PciFunction, PciLink, address_key
from vhpc_slurm.node.host import sysfs
from vhpc_slurm.node.host.sysfs import bits, mask_of

_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) GT/s", re.ASCII)
_VIRTFN = re.compile(r"virtfn([0-9]{1,5})", re.ASCII)
BARS = 6  # the first lines of `resource`; ROM, VF BARs and bridge windows follow
IO, MEMORY, PREFETCHABLE, WIDE = 0x100, 0x200, 0x2000, 0x0010_0000
NAMED = ("net", "infiniband", "nvme")
_VIRTIO = re.compile(r"virtio[0-9]{1,6}", re.ASCII)
HEADER_BYTES = 64  # of the configuration space: the part that every user may read
NOBODY = 0xFFFF
"""The vendor id that is read if no function answers."""
WIDTHS = frozenset((1, 2, 4, 8, 12, 16, 32))  # the kernel prints 0, 63 or 255 for a link that is down


def read_functions(
    sysfs_root: str, cell_cpus: dict[int, int], online: int
) -> tuple[tuple[PciFunction, ...], tuple[str, ...]]:
    """All PCI functions of a host by their addresses (empty without PCI), and remarks.

    Args:
        sysfs_root: path of sysfs.
        cell_cpus: mask of the online CPUs of each NUMA cell.
        online: mask of the online CPUs.

    Raises:
        OSError: the folder of PCI devices exists and cannot be read.
    """
    folder = f"{sysfs_root}/bus/pci/devices"
    known: dict[str, tuple[int, ...]] = {}
    found, remarks = [], []
    for name in sorted(filter(PCI_ADDRESS.fullmatch, sysfs.listing(folder)), key=address_key):
        function = _function(folder, name, cell_cpus, online, known)
        if function is not None:
            found.append(function)
        elif sysfs.listing(f"{folder}/{name}"):
            remarks.append(f"PCI function {name} is omitted: neither its ids nor its header can be read")
    return tuple(found), tuple(remarks)


def _function(
    folder: str, address: str, cell_cpus: dict[int, int], online: int, known: dict[str, tuple[int, ...]]
) -> PciFunction | None:
    path = f"{folder}/{address}"
    try:
        entries = set(sysfs.listing(path))
        identity = _identity(path)
        root_complex, bridges = place(sysfs.link(path))
    except (OSError, ValueError):
        return None  # gone, or not readable

    def maybe(name: str) -> str:
        return sysfs.text_or_empty(f"{path}/{name}") if name in entries else ""

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
        virtfns=tuple(filter(PCI_ADDRESS.fullmatch, (points(name) for _, name in virtual))),
        vfs_max=_number(maybe("sriov_totalvfs")),
        link=_link(maybe),
        names=tuple(name for place in _named(path, entries) for name in sysfs.listing(f"{path}/{place}")),
    )


def _identity(path: str) -> tuple[int, int, int]:
    """Class, vendor and device: from the kernel, else from the header of the configuration space.

    Raises:
        OSError, ValueError: neither is available.
    """
    words = [sysfs.text_or_empty(f"{path}/{name}") for name in ("class", "vendor", "device")]
    if all(words):
        kind, vendor, device = (int(word, 16) for word in words)
        return kind, vendor, device
    with open(f"{path}/config", "rb", buffering=0) as file:  # noqa: PTH123 - a path object takes longer
        header = file.read(HEADER_BYTES)
    vendor, device = (int.from_bytes(header[at : at + 2], "little") for at in (0, 2))
    if len(header) < HEADER_BYTES or vendor == NOBODY:
        raise ValueError(f"no PCI header in {path}/config")
    return int.from_bytes(header[9:12], "little"), vendor, device


def _named(path: str, entries: set[str]) -> list[str]:
    """Folders in a function's entry with the names of the interfaces that its driver created."""
    found = [kind for kind in NAMED if kind in entries]
    for name in sorted(filter(_VIRTIO.fullmatch, entries)):
        # a virtio device has its own entry, which contains its interface
        found += [f"{name}/{kind}" for kind in NAMED if kind in sysfs.listing(f"{path}/{name}")]
    return found


def place(target: str) -> tuple[str, tuple[str, ...]]:
    """Root complex and bridges, from the target of the link in ``/sys/bus/pci/devices``.

    A VMD controller is a PCI function with its own root complex below it: the
    innermost one counts.
    """
    parts = target.split("/")
    roots = [at for at, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not roots:
        return "", ()
    return parts[roots[-1]], tuple(part for part in parts[roots[-1] + 1 : -1] if PCI_ADDRESS.fullmatch(part))


def _local(text: str, online: int) -> tuple[int, ...]:
    try:
        return tuple(bits(int(text.replace(",", "") or "0", 16) & online))
    except ValueError:
        return ()


def _cell(text: str, local: int, cell_cpus: dict[int, int]) -> int:
    """The cell by its number, else the cell that has all local CPUs."""
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
