# SPDX-License-Identifier: Apache-2.0
"""Slots of the virtio devices: on bus 0, integrated in the root complex, not behind root ports.

Left to itself libvirt gives each a root port, for hotplug, which no guest of
ours has: firmware and kernel scan each of them, a tenth of an emulated boot.
"""

from __future__ import annotations

SERIAL = 0x01
DISK = 0x02
OWN_DISK = 0x03  # before the disks of snapshots, which have the slots of shares: it is always /dev/vdb
SITE = 0x1A
RNG = 0x1B
NAT = 0x1C
NIC = 0x1D
PANIC = 0x1E  # only where it is a PCI device
_SHARES = range(0x04, SITE)  # the end of the bus has q35's own devices


def share_slot(index: int) -> int:
    """Slot of a share; 0: none is left, and libvirt shall find a place."""
    return _SHARES[index] if index < len(_SHARES) else 0
