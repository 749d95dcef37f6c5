# SPDX-License-Identifier: Apache-2.0
"""What a Prolog tells the owner of its job through vhpcd: where the guests run, and every line that was said.

Only the node knows it, and only while the job is there.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.model import Generation, GuestPlacement, HostInventory, NodePlan, NodeReport

MAX_BYTES = 192 << 10
"""Longest report in bytes of JSON; without the host it is sent where it would be longer."""
MAX_LINES, MAX_LINE = 32, 2000


class Told:
    """Collects it while the guests boot."""

    def __init__(self, generation: Generation, node: str) -> None:
        self._generation, self._node = generation, node
        self._host: HostInventory | None = None
        self._guests: tuple[GuestPlacement, ...] = ()
        self._lines: list[str] = []

    def say(self, *lines: str) -> None:
        """Add lines, if they are not empty and not there yet."""
        for line in lines:
            text = line[:MAX_LINE]
            if text and text not in self._lines and len(self._lines) < MAX_LINES:
                self._lines.append(text)

    def place(self, host: HostInventory, plan: NodePlan) -> None:
        """Set where the guests of a plan run; replaces an earlier plan."""
        self._guests = tuple(
            GuestPlacement(
                index=guest.index,
                hostname=guest.hostname,
                cpus=tuple(pin.os_cpu for pin in sorted(guest.pins, key=lambda pin: pin.vcpu)),
                cells=tuple((cell.host_cell, cell.memory_mib) for cell in guest.cells),
                hugepage_kib=guest.hugepage_kib,
                devices=tuple((device.key, device.device_class) for device in guest.devices),
                disk_mib=guest.disk_mib,
            )
            for guest in plan.guests
        )
        self._host = _around(host, {device.function for guest in plan.guests for device in guest.devices})

    def report(self) -> NodeReport:
        """What was collected, short enough for one message."""
        found = NodeReport(self._generation, self._node, self._host, self._guests, tuple(self._lines))
        if len(msgspec.json.encode(found)) <= MAX_BYTES:
            return found
        return replace(found, host=None)


def _around(host: HostInventory, devices: set[str]) -> HostInventory:
    """A host with its CPUs, cells and L3 caches, and of its PCI functions those of guests and those above."""
    functions = {function.address: function for function in host.pci}
    held = [functions[address] for address in devices if address in functions]
    above = {function.physfn for function in held}
    shown = devices | above
    shown |= {bridge for address in shown & set(functions) for bridge in functions[address].bridges}
    return replace(
        host,
        abstract=(),
        caches=tuple(cache for cache in host.caches if cache.level == 3),
        pci=tuple(_without_others(function, shown) for function in host.pci if function.address in shown),
        remarks=(),
    )


def _without_others(function: PciFunction, shown: set[str]) -> PciFunction:
    virtual = tuple(address for address in function.virtfns if address in shown)
    return replace(function, virtfns=virtual, cpus=(), bars=(), reset_methods=None)
