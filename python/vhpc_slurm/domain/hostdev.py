# SPDX-License-Identifier: Apache-2.0
"""Host PCI functions in the guest's ports.

``managed="no"``: binding to vfio-pci and back is ours, with a journal.  No
option ROM: the guest's firmware must not run what a device carries.
"""

from __future__ import annotations

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.hardware import address_key
from vhpc_slurm.record import Record


class Hostdev(Record, frozen=True):
    """A function: its parts of an address as libvirt writes them, and the guest's bus."""

    domain: str
    bus: str
    slot: str
    function: str
    port: str


class HostdevContext(Record, frozen=True):
    """Values of the hostdev template."""

    devices: tuple[Hostdev, ...]


def context(spec: DomainSpec) -> HostdevContext | None:
    """One for each planned device; None without."""
    found = []
    for device in spec.guest.devices:
        domain, bus, slot, function = address_key(device.address)
        found.append(
            Hostdev(
                f"0x{domain:04x}", f"0x{bus:02x}", f"0x{slot:02x}", f"0x{function:x}", f"0x{device.port:02x}"
            )
        )
    return HostdevContext(tuple(found)) if found else None
