# SPDX-License-Identifier: Apache-2.0
"""Caches and PCI functions of a host, and what guests hold of it: frozen values.

PCI addresses are written as the kernel writes them, ``0000:1b:00.0``; the
domain has four hexadecimal digits or more (Intel's VMD counts from 10000).
"""

from __future__ import annotations

import re

from vhpc_slurm.record import Record

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
UNKNOWN_CELL = -1
NO_CLUSTER = -1


class HostCache(Record, frozen=True):
    """A cache and the online CPUs that share it; ``kind`` is data, instruction or unified."""

    level: int
    kind: str
    size_kib: int
    cpus: tuple[int, ...]


class PciBar(Record, frozen=True):
    """A base address register that is in use; ``size`` in bytes."""

    index: int
    size: int
    memory: bool
    wide: bool
    prefetchable: bool


class PciLink(Record, frozen=True):
    """A PCI Express link: transfers in GT/s and lanes, as trained and as the function could at best.

    0 if the kernel does not know.
    """

    speed_gts: float
    width: int
    max_speed_gts: float
    max_width: int


class PciFunction(Record, frozen=True):
    """One PCI function.

    Attributes:
        address: ``DDDD:BB:SS.F``.
        class_code: base class, subclass and programming interface: 24 bits.
        vendor: vendor id; ``device`` is the vendor's own number.
        driver: the kernel driver that has it, empty for none.
        cell: NUMA cell that it is attached to, -1 where the host does not say or names several.
        cpus: online CPUs that the kernel calls local to it.
        root_complex: the host bridge it hangs from, ``pci0000:17``.
        bridges: addresses of the bridges between, from the root port down.
        iommu_group: None where the IOMMU is off.
        reset_methods: as the kernel would try them; None where it does not say (before Linux 5.15).
        bars: base address registers that are in use.
        physfn: address of the physical function whose virtual function this is, else empty.
        virtfns: addresses of its virtual functions, by their number.
        vfs_max: how many virtual functions it could have.
        link: None for what has no PCI Express link.
        names: network interfaces, InfiniBand and NVMe devices of its driver.
    """

    address: str
    class_code: int
    vendor: int
    device: int
    driver: str
    cell: int
    cpus: tuple[int, ...]
    root_complex: str
    bridges: tuple[str, ...] = ()
    iommu_group: int | None = None
    reset_methods: tuple[str, ...] | None = None
    bars: tuple[PciBar, ...] = ()
    physfn: str = ""
    virtfns: tuple[str, ...] = ()
    vfs_max: int = 0
    link: PciLink | None = None
    names: tuple[str, ...] = ()

    @property
    def bridge(self) -> bool:
        """Whether it leads to another bus (PCI to PCI)."""
        return self.class_code >> 8 == 0x0604

    @property
    def switches(self) -> tuple[str, ...]:
        """Upstream ports of the PCI Express switches above it, outermost first.

        Below a root port, bridges alternate: the upstream port of a switch, one
        of its downstream ports.  A bridge to conventional PCI has nothing below.
        """
        return tuple(port for at, port in enumerate(self.bridges[:-1]) if at % 2 == 1)

    @property
    def slot(self) -> str:
        """Address without the function number: what is in one slot travels together."""
        return self.address.rpartition(".")[0]


def address_key(address: str) -> tuple[int, int, int, int]:
    """Domain, bus, slot and function as numbers, for sorting; ValueError when it is not a PCI address."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(slot, 16), int(function, 16)


class Reservation(Record, frozen=True):
    """What one live guest holds of its node.

    Attributes:
        generation: whose guest.
        guest: its index within the generation.
        cpus: OS CPUs that its vCPUs are pinned to.
        cells: (host cell, MiB): where its memory was planned; cell -1 is no cell in particular.
        hugepage_kib: size of the huge pages that back it, 0 for ordinary pages.
        devices: keys of its devices.
    """

    generation: str
    guest: int
    cpus: tuple[int, ...]
    cells: tuple[tuple[int, int], ...]
    hugepage_kib: int = 0
    devices: tuple[str, ...] = ()


class PciController(Record, frozen=True):
    """A bus or a port of the guest, in libvirt's terms.

    Attributes:
        index: its number.
        model: ``pcie-expander-bus``, ``pcie-root-port``, ``pcie-switch-upstream-port`` or
            ``pcie-switch-downstream-port``.
        parent: index of the controller it sits in; 0 for the guest's own root.
        slot: where in that.
        bus_nr: of an expander bus: the number that its bus begins at.
        cell: of an expander bus: the guest cell it belongs to.
    """

    index: int
    model: str
    parent: int = 0
    slot: int = 0
    bus_nr: int = 0
    cell: int = 0
