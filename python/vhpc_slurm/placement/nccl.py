# SPDX-License-Identifier: Apache-2.0
"""What NCCL has to be told where the guest's PCI topology is not the host's.

NCCL reads how near devices are to each other from sysfs: which switches they
share, and by ``numa_node`` which CPUs.  Switches are the same in the guest
(``pci``), but an expander bus has one cell, and it is one of the guest's: a
device of a cell that the guest has no CPUs of is shown at the nearest it has,
where it looks close to devices that on the host are far from it.  Such guests
get a file that says how it is on the host.

Sources: NCCL's environment variables, NCCL_TOPO_FILE ("path to an XML file to load before
detecting the topology"), and what its src/graph/xml.cc and topo.cc (2.28) read: a ``cpu`` for each
NUMA node, below it a ``pci`` for each device, and between them one for each switch, by its
upstream port.  NCCL looks up in the guest what the file leaves out.
"""
# Decision: NCCL gets a file only if a guest hides distances

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.device import PassthroughDevice
from vhpc_slurm.hardware import UNKNOWN_CELL, PciFunction
from vhpc_slurm.model import GuestCell, GuestPlan, HostInventory
from vhpc_slurm.placement.pci import BUSES, SLOTS

SWITCH_CLASS = 0x060400
WORD = 32


def topology(guest: GuestPlan, host: HostInventory) -> str:
    """The XML for a guest; empty where it sees by itself what there is to see."""
    functions = {function.address: function for function in host.pci}
    devices = [device for device in guest.devices if device.traits.nccl and device.function in functions]
    cells = {device.key: _cell(functions[device.function], host) for device in devices}
    if not _matters(devices) or _mirrored(guest, devices, cells):
        return ""
    system = ET.Element("system", version="1")
    numbers = _Numbers(guest, host)
    switches: dict[str, ET.Element] = {}
    for device in devices:
        function = functions[device.function]
        physical = functions.get(function.physfn, function)  # a virtual one has no link of its own
        at = numbers.cpu(system, cells[device.key])
        for port in function.switches:
            if port not in switches:
                bus, slot = divmod(len(switches), SLOTS)  # in a domain that no device of the guest is in
                switches[port] = ET.SubElement(at, "pci", busid=f"ffff:{bus:02x}:{slot:02x}.0")
                _describe(switches[port], SWITCH_CLASS, functions.get(port), physical)
            at = switches[port]
        own = ET.SubElement(at, "pci", busid=guest_address(guest, device))
        _describe(own, function.class_code, physical)
    ET.indent(system)
    return ET.tostring(system, encoding="unicode") + "\n"


def guest_address(guest: GuestPlan, device: PassthroughDevice) -> str:
    """Where the guest sees a device: each controller has the next bus, in the order of their numbers."""
    return f"0000:{BUSES - len(guest.controllers) + device.port - 1:02x}:00.0"


def _matters(devices: Sequence[PassthroughDevice]) -> bool:
    """Whether there is a GPU that could be near to something."""
    return len(devices) > 1 and any(device.traits.indexed for device in devices)


def _cell(function: PciFunction, host: HostInventory) -> int:
    """Its NUMA cell; where the host has only one it can be no other."""
    if function.cell == UNKNOWN_CELL and len(host.cells) == 1:
        return host.cells[0].cell
    return function.cell


def _mirrored(guest: GuestPlan, devices: Sequence[PassthroughDevice], cells: Mapping[str, int]) -> bool:
    """Whether each device is at a cell of its own host cell's, and its root complex at no other."""
    there = {cell.host_cell for cell in guest.cells}
    complexes: dict[str, set[int]] = {}
    for device in devices:
        complexes.setdefault(device.root_complex, set()).add(cells[device.key])
    return all(len(found) == 1 and found <= there for found in complexes.values())


class _Numbers:
    """The file's NUMA nodes: the guest's own, and behind them those that it has not."""

    def __init__(self, guest: GuestPlan, host: HostInventory) -> None:
        self._guest = guest
        self._arch = of_machine(host.arch).nccl
        self._far = {cell.cell: dict(cell.distances) for cell in host.cells}
        self._known = {cell.host_cell: cell.cell for cell in guest.cells}
        self._made: dict[int, ET.Element] = {}

    def cpu(self, system: ET.Element, cell: int) -> ET.Element:
        """The element of a host cell."""
        if cell not in self._made:
            number = self._known.setdefault(cell, len(self._known))
            vcpus = self._nearest(cell).vcpus
            mask = format(sum(1 << vcpu for vcpu in vcpus), "x")
            mask = mask.zfill(-(-len(mask) * 4 // WORD) * WORD // 4)
            words = [mask[at : at + WORD // 4] for at in range(0, len(mask), WORD // 4)]
            self._made[cell] = ET.SubElement(
                system, "cpu", numaid=str(number), affinity=",".join(words), arch=self._arch
            )
        return self._made[cell]

    def _nearest(self, cell: int) -> GuestCell:
        far = self._far.get(cell, {})
        return min(
            self._guest.cells,
            key=lambda own: (own.host_cell != cell, far.get(own.host_cell, 1 << 16), own.cell),
        )


def _describe(element: ET.Element, class_code: int, *functions: PciFunction | None) -> None:
    """Class, and the link as trained: of the first of these that has one."""
    element.set("class", f"0x{class_code:06x}")
    links = (function.link for function in functions if function and function.link)
    link = next((link for link in links if link.speed_gts and link.width), None)
    if link:
        element.set("link_speed", f"{link.speed_gts:.1f} GT/s PCIe")
        element.set("link_width", str(link.width))
