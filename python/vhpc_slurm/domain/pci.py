# SPDX-License-Identifier: Apache-2.0
"""The guest's PCI Express buses: expander buses, ports and switches as planned, and room for large BARs.

The virtual devices sit on the root bus (slots.py) and need no ports; so the
planned ports stay those of the planned devices.
"""

from __future__ import annotations

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.hardware import PciController
from vhpc_slurm.record import Record


class PciContext(Record, frozen=True):
    """Values of the pci template; 0 GiB leaves the 64-bit window to QEMU."""

    pcihole64_gib: int
    controllers: tuple[PciController, ...]


def context(spec: DomainSpec) -> PciContext | None:
    """As planned; None without devices."""
    guest = spec.guest
    hole = 0 if spec.architecture.pci_hole_fixed else guest.pcihole64_gib
    return PciContext(hole, guest.controllers) if guest.controllers else None
