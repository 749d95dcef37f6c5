# SPDX-License-Identifier: Apache-2.0
"""The guest's PCI Express topology: the host's, as far as it matters to those who read it.

One expander bus for each host root complex in use, at the guest cell of that
complex's NUMA cell; a root port for each device; below a root port a switch
where devices share one on the host, so that NCCL and UCX see in the guest
which GPU and which HCA can talk without the root complex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vhpc_slurm.architecture import Architecture
from vhpc_slurm.device import HostDevice, PassthroughDevice
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.hardware import PciController
from vhpc_slurm.model import HostInventory
from vhpc_slurm.record import Record

EXPANDER, ROOT_PORT = "pcie-expander-bus", "pcie-root-port"
UPSTREAM, DOWNSTREAM = "pcie-switch-upstream-port", "pcie-switch-downstream-port"
SLOTS = 32
BUSES = 256
OWN_BUSES = 48  # for ports of what finds no slot on the root bus: libvirt makes them, numbered from 1
BELOW_4G = 4 << 30
TCG_BITS = 40


class PciLayout(Record, frozen=True):
    """Controllers by their index, and devices with the port that each sits in."""

    controllers: tuple[PciController, ...]
    devices: tuple[PassthroughDevice, ...]


class _Switch(Record, frozen=True):
    """A host switch with at least two of the guest's devices below."""

    below: tuple[_Switch | HostDevice, ...]


def lay_out(
    devices: Sequence[HostDevice], guest_cell: Callable[[int], int], reasons: list[VhpcError]
) -> PciLayout | None:
    """Controllers and devices of a guest; None if they are not possible.

    Args:
        devices: in the order in which the guest shall count them within a root complex.
        guest_cell: guest cell of a host cell, or the one nearest to it.
        reasons: the reason against the layout is added.
    """
    complexes: dict[str, list[HostDevice]] = {}
    for device in devices:
        complexes.setdefault(device.place.root_complex, []).append(device)
    made = _Maker()
    for members in complexes.values():
        made.expander(_tree(members, 0), guest_cell(members[0].place.cell))
    if len(made.controllers) > BUSES - OWN_BUSES or made.crowded:
        reasons.append(
            NodeError(
                f"{len(devices)} devices do not fit the guest's PCI Express buses",
                f"{len(made.controllers)} buses are needed of {BUSES - OWN_BUSES}, a bus has {SLOTS} slots",
                "give the job fewer devices, or more guests on the node",
            )
        )
        return None
    return PciLayout(made.numbered(), tuple(made.devices))


def hole_bytes(devices: Sequence[HostDevice], architecture: Architecture) -> int:
    """Address space for the 64-bit BARs: a power of two, or 0 where QEMU's own (32 GiB on a PC) will do.

    A port's window is a multiple of its largest BAR, and begins at one.
    """
    needed = 0
    for device in devices:
        bars = [bar.size for bar in device.bars if bar.memory and bar.wide]
        if bars:
            needed += -(-sum(bars) // max(bars)) * max(bars)
    return 0 if needed <= architecture.pci_hole_gib << 30 else 1 << (needed - 1).bit_length()


def address_bits(memory_mib: int, hole: int, architecture: Architecture) -> int:
    """How wide physical addresses must be for memory, what lies below 4 GiB, and the hole behind them."""
    hole = hole or architecture.pci_hole_gib << 30
    end = -(-((memory_mib << 20) + BELOW_4G) // hole) * hole + hole
    return (end - 1).bit_length()


def check_bits(
    memory_mib: int, hole: int, host: HostInventory, architecture: Architecture
) -> list[VhpcError]:
    """Whether the machine has room for it, and the guest's CPU can address all of it."""
    if hole and architecture.pci_hole_fixed:
        return [
            NodeError(
                f"the BARs of the job's devices need {hole >> 30} GiB of addresses on {host.node}",
                f"libvirt gives a machine of {architecture.name} {architecture.pci_hole_gib} GiB",
                "give the job fewer GPUs on a node, or more guests: --vhpc-guests-per-node",
            )
        ]
    node, kvm = host.node, host.kvm
    needed = address_bits(memory_mib, hole, architecture)
    has = host.address_bits if kvm else TCG_BITS if architecture.is_pc else 0
    if not has or needed <= has:
        return []
    whose = f"the CPU of {node}" if kvm else "QEMU's software emulation"
    return [
        NodeError(
            f"{memory_mib} MiB of memory and {hole >> 30} GiB of device BARs need {needed} address bits",
            f"{whose} has {has}",
            "give the job less memory or fewer GPUs on a node",
        )
    ]


def _tree(members: Sequence[HostDevice], depth: int) -> tuple[_Switch | HostDevice, ...]:
    """Devices below the switches that at least two of them share; a switch of one device is left out."""
    groups: dict[str, list[HostDevice]] = {}
    for device in members:
        switches = device.place.switches
        name = switches[depth] if depth < len(switches) else f"device {device.key}"
        groups.setdefault(name, []).append(device)
    found: list[_Switch | HostDevice] = []
    for group in groups.values():
        if len(group) == 1:
            found.append(group[0])
            continue
        below = _tree(group, depth + 1)
        found += below if len(below) == 1 else [_Switch(below)]
    return tuple(found)


class _Maker:
    """Numbers controllers in the order of their making, which is the order of the guest's buses.

    So the guest counts devices in the order of ``devices``.
    """

    def __init__(self) -> None:
        self.controllers: list[PciController] = []
        self.devices: list[PassthroughDevice] = []
        self.crowded = False

    def expander(self, below: Sequence[_Switch | HostDevice], cell: int) -> None:
        """A root complex with all that is below it."""
        index = self._add(EXPANDER, 0, 0)
        self.controllers[-1] = replace(self.controllers[-1], cell=cell)
        self._ports(ROOT_PORT, index, below)

    def numbered(self) -> tuple[PciController, ...]:
        """Controllers, with the last buses for the expanders: each port has one, the expander its own."""
        first = BUSES - len(self.controllers)
        return tuple(
            replace(made, bus_nr=first + at) if made.model == EXPANDER else made
            for at, made in enumerate(self.controllers)
        )

    def _ports(self, model: str, parent: int, below: Sequence[_Switch | HostDevice]) -> None:
        self.crowded |= len(below) > SLOTS
        for slot, child in enumerate(below):
            port = self._add(model, parent, slot)
            if isinstance(child, _Switch):
                self._ports(DOWNSTREAM, self._add(UPSTREAM, port, 0), child.below)
            else:
                self.devices.append(_plugged(child, port))

    def _add(self, model: str, parent: int, slot: int) -> int:
        index = len(self.controllers) + 1
        self.controllers.append(PciController(index, model, parent, slot))
        return index


def _plugged(device: HostDevice, port: int) -> PassthroughDevice:
    place = device.place
    parent = "" if place.address == device.key else place.address
    return PassthroughDevice(
        device.key, device.device_class, place.cell, place.root_complex, port, parent=parent
    )
