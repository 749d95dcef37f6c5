# SPDX-License-Identifier: Apache-2.0
"""Trees of machines that were not captured, written as the kernel writes them.

Sources: Documentation/admin-guide/cputopology.rst, Documentation/ABI/stable/sysfs-devices-node,
Documentation/ABI/testing/sysfs-bus-pci, Documentation/PCI/pci-iov-howto.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BRIDGE = 0x060400
GPU = 0x030200
INFINIBAND = 0x020700
NVME = 0x010802
MEM64_PREFETCH = 0x0014_220C  # IORESOURCE_MEM | PREFETCH | MEM_64 and the type bits of the BAR itself


@dataclass(frozen=True)
class Function:
    """A PCI function to write; ``bars`` are sizes in bytes, ``buses`` the first and last behind a bridge."""

    address: str
    class_code: int
    vendor: int = 0x8086
    device: int = 0x1
    driver: str = ""
    bars: Sequence[int] = ()
    group: int | None = None
    resets: str | None = None
    link: tuple[str, int] | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    children: Sequence[str] = ()
    buses: tuple[int, int] = (0, 0)


class MachineTree:
    """A host of equal cells; CPU numbers count cores first, then their further threads."""

    def __init__(
        self,
        root: Path,
        *,
        sockets: int = 1,
        cells_per_socket: int = 1,
        cores: int = 2,
        threads: int = 1,
        cell_mib: int = 8192,
    ) -> None:
        self.root = root
        self.sys = root / "sys"
        self._made: set[str] = set()
        cells, total = sockets * cells_per_socket, sockets * cells_per_socket * cores
        self.cell_cpus = [
            [
                core + thread * total
                for thread in range(threads)
                for core in range(cell * cores, (cell + 1) * cores)
            ]
            for cell in range(cells)
        ]
        for core in range(total):
            cell = core // cores
            socket = cell // cells_per_socket
            package = [
                cpu
                for other in range(socket * cells_per_socket, (socket + 1) * cells_per_socket)
                for cpu in self.cell_cpus[other]
            ]
            siblings = [core + thread * total for thread in range(threads)]
            for cpu in siblings:
                self._cpu(
                    cpu, core % (cores * cells_per_socket), socket, siblings, package, self.cell_cpus[cell]
                )
        everyone = f"0-{total * threads - 1}"
        for name in ("online", "present", "possible"):
            self.write(f"devices/system/cpu/{name}", everyone)
        for name in ("online", "possible"):
            self.write(f"devices/system/node/{name}", f"0-{cells - 1}")
        for cell, cpus in enumerate(self.cell_cpus):
            node = f"devices/system/node/node{cell}"
            self.write(f"{node}/cpumap", mask(cpus))
            row = (
                10 if other == cell else 12 if self._together(cell, other, cells_per_socket) else 32
                for other in range(cells)
            )
            self.write(f"{node}/distance", " ".join(map(str, row)))
            self.write(f"{node}/meminfo", f"Node {cell} MemTotal:       {cell_mib * 1024} kB")
            for size, total_pages in ((2048, 512), (1048576, 0)):
                pool = f"{node}/hugepages/hugepages-{size}kB"
                self.write(f"{pool}/nr_hugepages", str(total_pages))
                self.write(f"{pool}/free_hugepages", str(total_pages))
        proc = root / "proc"
        proc.mkdir()
        (proc / "cpuinfo").write_text(
            "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme\n"
            "address sizes\t: 46 bits physical, 48 bits virtual\n"
        )
        (proc / "meminfo").write_text(f"MemTotal: {cell_mib * 1024 * cells} kB\n")

    @staticmethod
    def _together(cell: int, other: int, cells_per_socket: int) -> bool:
        return cell // cells_per_socket == other // cells_per_socket

    def write(self, name: str, text: str) -> None:
        """Write one attribute below ``/sys``."""
        path = f"{self.sys}/{name}"
        folder = path.rpartition("/")[0]
        if folder not in self._made:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - thousands of them
            self._made.add(folder)
        with open(path, "w") as out:  # noqa: PTH123
            out.write(text + "\n")

    def _cpu(
        self, cpu: int, core_id: int, socket: int, siblings: list[int], package: list[int], cell: list[int]
    ) -> None:
        folder = f"devices/system/cpu/cpu{cpu}"
        self.write(f"{folder}/topology/core_id", str(core_id))
        self.write(f"{folder}/topology/physical_package_id", str(socket))
        for names, cpus in (
            (("core_cpus", "thread_siblings"), siblings),
            (("package_cpus", "core_siblings"), package),
        ):
            for name in names:
                self.write(f"{folder}/topology/{name}", mask(cpus))
        caches = (
            (1, "Data", "48K", siblings),
            (1, "Instruction", "32K", siblings),
            (2, "Unified", "2048K", siblings),
            (3, "Unified", "32768K", cell),
        )
        for index, (level, kind, size, cpus) in enumerate(caches):
            for name, text in (
                ("level", str(level)),
                ("type", kind),
                ("size", size),
                ("shared_cpu_map", mask(cpus)),
            ):
                self.write(f"{folder}/cache/index{index}/{name}", text)

    def pci(self, root_complex: str, cell: int, bridges: Sequence[str], function: Function) -> str:
        """Write a function below its root complex and bridges; returns where, below ``/sys``."""
        chain = "/".join([f"devices/{root_complex}", *bridges, function.address])
        cpus = self.cell_cpus[cell] if cell >= 0 else [cpu for cpus in self.cell_cpus for cpu in cpus]
        resource = ["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13
        for bar, size in enumerate(function.bars):
            start = 1 << 46
            resource[2 * bar] = f"0x{start:016x} 0x{start + size - 1:016x} 0x{MEM64_PREFETCH:016x}"
        attributes = {
            "class": f"0x{function.class_code:06x}",
            "vendor": f"0x{function.vendor:04x}",
            "device": f"0x{function.device:04x}",
            "numa_node": str(cell),
            "local_cpus": mask(cpus),
            "local_cpulist": ",".join(map(str, cpus)),
            "resource": "\n".join(resource),
        }
        if function.link is not None:
            speed, width = function.link
            for which in ("current", "max"):
                attributes |= {f"{which}_link_speed": speed, f"{which}_link_width": str(width)}
        if function.resets is not None:
            attributes["reset_method"] = function.resets
        for name, text in (attributes | dict(function.attributes)).items():
            self.write(f"{chain}/{name}", text)
        # what hwloc reads: type 0 or 1 header, secondary bus of a bridge
        config = bytearray(64)
        config[0:2], config[2:4] = (
            function.vendor.to_bytes(2, "little"),
            function.device.to_bytes(2, "little"),
        )
        config[9:12] = function.class_code.to_bytes(3, "little")
        if function.class_code == BRIDGE:
            config[0x0E] = 1
            config[0x18:0x1B] = bytes((int(function.address.split(":")[1], 16), *function.buses))
        (self.sys / chain / "config").write_bytes(bytes(config))
        if function.driver:
            self._link(f"{chain}/driver", f"bus/pci/drivers/{function.driver}")
        if function.group is not None:
            self._link(f"{chain}/iommu_group", f"kernel/iommu_groups/{function.group}")
        for child in function.children:
            (self.sys / chain / child).mkdir(parents=True)
        self._link(f"bus/pci/devices/{function.address}", chain)
        return chain

    def vfs(
        self, root_complex: str, cell: int, bridges: Sequence[str], pf: Function, vfs: Iterable[Function]
    ) -> None:
        """Write a physical function and its virtual functions."""
        chain = self.pci(root_complex, cell, bridges, pf)
        for number, vf in enumerate(vfs):
            where = self.pci(root_complex, cell, bridges, vf)
            self._link(f"{where}/physfn", chain)
            self._link(f"{chain}/virtfn{number}", where)

    def memory_cell(self, mib: int, distance: int = 80) -> int:
        """A further cell, with memory and without CPUs; returns its number."""
        number = len(self.cell_cpus)
        self.cell_cpus.append([])
        node = f"devices/system/node/node{number}"
        self.write(f"{node}/cpumap", mask(()))
        self.write(f"{node}/meminfo", f"Node {number} MemTotal:       {mib * 1024} kB")
        for cell in range(number):
            path = self.sys / f"devices/system/node/node{cell}/distance"
            path.write_text(f"{path.read_text().strip()} {distance}\n")
        self.write(f"{node}/distance", " ".join([str(distance)] * number + ["10"]))
        for name in ("online", "possible"):
            self.write(f"devices/system/node/{name}", f"0-{number}")
        return number

    def gpu_memory(self, address: str, cell: int) -> None:
        """NVIDIA's driver on a GPU whose memory is that cell; -1 for a GPU without a cell."""
        folder = self.root / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        state = "online" if cell >= 0 else "disabled"
        (folder / "numa_status").write_text(f"Node:            {cell}\nStatus:          {state}\n")

    def _link(self, name: str, target: str) -> None:
        path = self.sys / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.sys / target, path.parent))


def mask(cpus: Iterable[int]) -> str:
    """A cpumask as the kernel prints it: words of 32 bits."""
    value = sum(1 << cpu for cpu in cpus)
    words: list[str] = []
    while value or not words:
        words.append(f"{value & 0xFFFFFFFF:08x}")
        value >>= 32
    return ",".join(reversed(words))


def gpu_node(
    root: Path,
    *,
    sockets: int = 2,
    cells_per_socket: int = 1,
    cores: int = 8,
    threads: int = 2,
    complexes: int = 2,
    gpus: int = 2,
    vfs: int = 4,
    cell_mib: int = 262144,
    gpu_bar: int = 1 << 37,
) -> MachineTree:
    """A node as it is bought for GPUs: below each root complex a switch with GPUs and one HCA.

    Args:
        root: an empty folder.
        sockets, cells_per_socket, cores, threads, cell_mib: CPUs and memory; ``cores`` per cell.
        complexes: such root complexes in each socket, spread over its cells.
        gpus: on each switch.
        vfs: virtual functions of each HCA.
        gpu_bar: bytes of a GPU's largest BAR.
    """
    tree = MachineTree(
        root,
        sockets=sockets,
        cells_per_socket=cells_per_socket,
        cores=cores,
        threads=threads,
        cell_mib=cell_mib,
    )
    group = iter(range(1, 1 << 16))
    total = sockets * complexes
    for number in range(total):
        bus = 8 + number * (240 // total)
        cell = number // complexes * cells_per_socket + number % complexes * cells_per_socket // complexes
        for slot, (bridges, place) in enumerate(_switch(tree, cell, bus, gpus + 1, group)):
            if slot < gpus:
                tree.pci(f"pci0000:{bus:02x}", cell, bridges, _gpu(place, gpu_bar, next(group)))
            else:
                _hca(tree, cell, bus, bridges, place, number, vfs, group)
    return tree


def _switch(
    tree: MachineTree, cell: int, bus: int, slots: int, group: Iterator[int]
) -> Iterator[tuple[list[str], str]]:
    """A root port and a PCIe switch below it; yields (bridges above the slot, its domain and bus) by slot."""
    home, last = f"pci0000:{bus:02x}", bus + 2 + slots
    port, up = f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"
    root_port = Function(port, BRIDGE, driver="pcieport", group=next(group), buses=(bus + 1, last))
    tree.pci(home, cell, [], root_port)
    upstream = Function(up, BRIDGE, 0x10B5, driver="pcieport", group=next(group), buses=(bus + 2, last))
    tree.pci(home, cell, [port], upstream)
    for slot in range(slots):
        down, below = f"0000:{bus + 2:02x}:{slot:02x}.0", bus + 3 + slot
        bridge = Function(down, BRIDGE, 0x10B5, driver="pcieport", group=next(group), buses=(below, below))
        tree.pci(home, cell, [port, up], bridge)
        yield [port, up, down], f"0000:{below:02x}"


def _gpu(place: str, bar: int, group: int) -> Function:
    bars, link = (1 << 24, bar, 1 << 25), ("32.0 GT/s PCIe", 16)
    return Function(f"{place}:00.0", GPU, 0x10DE, 0x2330, "vfio-pci", bars, group, "flr bus", link)


def _hca(
    tree: MachineTree,
    cell: int,
    bus: int,
    bridges: list[str],
    place: str,
    number: int,
    vfs: int,
    group: Iterator[int],
) -> None:
    """An HCA in a slot, with its virtual functions."""
    link, own = ("32.0 GT/s PCIe", 16), next(group)
    sriov = {"sriov_totalvfs": str(max(vfs, 8)), "sriov_numvfs": str(vfs)}
    names = (f"infiniband/mlx5_{number}", f"net/ib{number}")
    pf = Function(
        *(f"{place}:00.0", INFINIBAND, 0x15B3, 0x1021, "mlx5_core", (1 << 25,), own),
        *("flr bus", link, sriov, names),
    )
    virtual = [
        Function(
            *(f"{place}:{vf >> 3:02x}.{vf & 7}", INFINIBAND, 0x15B3, 0x101E, "vfio-pci", (1 << 20,)),
            *(next(group), "flr"),
        )
        for vf in range(1, vfs + 1)
    ]
    tree.vfs(f"pci0000:{bus:02x}", cell, bridges, pf, virtual)
