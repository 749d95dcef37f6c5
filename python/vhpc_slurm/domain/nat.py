# SPDX-License-Identifier: Apache-2.0
"""The guest's interface to other networks: vhost-user, on the socket of a passt that runs already.

libvirt could start passt itself, but with the rights of QEMU's user and in the host's control
groups; ``vhpc-confine`` starts it with the job user's rights.
"""

# Decision: passt by vhost-user, started by vhpc

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record


class NatContext(Record, frozen=True):
    """Values of the nat template."""

    mac: str
    socket: str
    slot: int


def context(spec: DomainSpec) -> NatContext | None:
    """One interface; None where the job has no nat."""
    found = spec.guest.nat
    return None if found is None else NatContext(found.mac, spec.guest.paths.nat_socket, slots.NAT)
