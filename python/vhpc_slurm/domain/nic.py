# SPDX-License-Identifier: Apache-2.0
"""The guest's interface on the network of its job: a tap that the node has made (``managed="no"``).

No driver is named: with KVM libvirt takes vhost-net where the node has it, else QEMU's own.
No option ROM: guests do not boot from the network, and it costs time at each start.
"""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record


class NicContext(Record, frozen=True):
    """Values of the nic template; an MTU of 0 is left out."""

    tap: str
    mac: str
    queues: int
    mtu: int
    slot: int


def context(spec: DomainSpec) -> NicContext | None:
    """One interface; None where the job has no network."""
    found, mtu = spec.guest.interface, spec.running.mtu
    return None if found is None else NicContext(found.tap, found.mac, found.queues, mtu, slots.NIC)
