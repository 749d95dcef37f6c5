# SPDX-License-Identifier: Apache-2.0
"""The port on which the guest's broker asks for locks on shared files: QEMU connects to the lock daemon."""

from __future__ import annotations

from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

PORT_NAME = "org.vhpc.locks.0"


class LocksContext(Record, frozen=True):
    """Values of the locks template."""

    socket: str
    port_name: str


def context(spec: DomainSpec) -> LocksContext | None:
    """One port; None for a guest whose locks hold within it alone."""
    return LocksContext(spec.guest.paths.locks_socket, PORT_NAME) if spec.running.has_locks else None
