# SPDX-License-Identifier: Apache-2.0
"""libvirt's view of the host: its capabilities XML, and its differences from the kernel's view.

libvirt pins and binds by its own picture of the host, which it makes when it
starts.  One that was made before CPUs went offline refuses a plan that is right.

Source: https://libvirt.org/formatcaps.html
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from vhpc_slurm.cpulist import format_cpu_list, parse_cpu_list
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostInventory
from vhpc_slurm.record import Record

UNITS_KIB = {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20, "TiB": 1 << 30}


class CapabilityCell(Record, frozen=True):
    """A NUMA cell: memory in MiB, thread siblings of each CPU, distances, (page size in KiB, pages)."""

    cell: int
    memory_mib: int
    siblings: tuple[tuple[int, tuple[int, ...]], ...]
    distances: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """OS CPUs of the cell, ascending."""
        return tuple(cpu for cpu, _ in self.siblings)


class Capabilities(Record, frozen=True):
    """The host part; ``iommu`` is None where libvirt does not say, ``address_bits`` 0."""

    arch: str
    vendor: str
    address_bits: int
    iommu: bool | None
    cells: tuple[CapabilityCell, ...]


def parse(xml: str) -> Capabilities:
    """Read capabilities XML.

    Raises:
        NodeError: it is not a capabilities document.
    """
    try:
        host = ET.fromstring(xml).find("host")  # noqa: S314 - libvirt's own answer, to root
        if host is None:
            raise ValueError("no <host>")
        bits, iommu = host.find("cpu/maxphysaddr"), host.find("iommu")
        return Capabilities(
            arch=host.findtext("cpu/arch", ""),
            vendor=host.findtext("cpu/vendor", ""),
            address_bits=int(bits.get("bits", "0")) if bits is not None else 0,
            iommu=None if iommu is None else iommu.get("support") == "yes",
            cells=tuple(_cell(cell) for cell in host.iterfind("topology/cells/cell")),
        )
    except (ET.ParseError, ValueError, KeyError) as err:
        raise NodeError(
            "libvirt's capabilities cannot be read", repr(err), "see: virsh capabilities"
        ) from err


def _cell(element: ET.Element) -> CapabilityCell:
    memory = element.find("memory")
    return CapabilityCell(
        cell=int(element.attrib["id"]),
        memory_mib=_kib(memory) // 1024 if memory is not None else 0,
        siblings=tuple(
            sorted(
                (int(cpu.attrib["id"]), parse_cpu_list(cpu.get("siblings", cpu.attrib["id"])))
                for cpu in element.iterfind("cpus/cpu")
            )
        ),
        distances=tuple(
            (int(other.attrib["id"]), int(other.attrib["value"]))
            for other in element.iterfind("distances/sibling")
        ),
        pages=tuple(
            (int(pages.attrib["size"]) * UNITS_KIB[pages.get("unit", "KiB")], int(pages.text or "0"))
            for pages in element.iterfind("pages")
        ),
    )


def _kib(element: ET.Element) -> int:
    return int(element.text or "0") * UNITS_KIB[element.get("unit", "KiB")]


def differences(host: HostInventory, found: Capabilities) -> tuple[str, ...]:
    """Where libvirt's picture is not the kernel's, a line each; empty where they agree."""
    ours = {cell.cell: cell for cell in host.cells}
    theirs = {cell.cell: cell for cell in found.cells}
    core_of = {cpu.os_cpu: cpu.core for cpu in host.cpus if cpu.online}
    threads: dict[int, set[int]] = {}
    for cpu, core in core_of.items():
        threads.setdefault(core, set()).add(cpu)
    lines = []
    if set(ours) != set(theirs):
        lines.append(f"libvirt has NUMA cells {_list(theirs)}, the kernel {_list(ours)}")
    for cell in sorted(set(ours) & set(theirs)):
        mine, its = ours[cell], theirs[cell]
        if set(mine.cpus) != set(its.cpus):
            lines.append(f"libvirt has CPUs {_list(its.cpus)} in cell {cell}, the kernel {_list(mine.cpus)}")
        odd = [
            cpu for cpu, siblings in its.siblings if threads.get(core_of.get(cpu, -1), {cpu}) != {*siblings}
        ]
        if odd:
            lines.append(f"libvirt has other thread siblings than the kernel for CPUs {_list(odd)}")
        if its.distances and dict(its.distances) != dict(mine.distances):
            lines.append(f"libvirt has other distances than the kernel for cell {cell}")
        pools = {size: total for size, total, _ in mine.hugepages}
        for size, total in its.pages:
            if size in pools and pools[size] != total:
                lines.append(
                    f"libvirt has {total} pages of {size} KiB in cell {cell}, the kernel {pools[size]}"
                )
    return tuple(lines)


def _list(numbers: Iterable[int]) -> str:
    return format_cpu_list(numbers) or "none"
