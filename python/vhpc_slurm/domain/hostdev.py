# SPDX-License-Identifier: Apache-2.0
"""Devices of the host in the guest's ports, as their classes describe them to libvirt.

No option ROM: the guest's firmware must not run what a device carries.
"""

from __future__ import annotations

from vhpc_slurm.device import HostdevSource
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record


class Hostdev(Record, frozen=True):
    """A device, and the guest's bus for it."""

    source: HostdevSource
    port: str


class HostdevContext(Record, frozen=True):
    """Values of the hostdev template."""

    devices: tuple[Hostdev, ...]


def context(spec: DomainSpec) -> HostdevContext | None:
    """One for each planned device; None without."""
    found = tuple(
        Hostdev(device.traits.source(device.key), f"0x{device.port:02x}") for device in spec.guest.devices
    )
    return HostdevContext(found) if found else None
