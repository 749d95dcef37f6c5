# SPDX-License-Identifier: Apache-2.0
"""QEMU under a uid of this guest alone, so that an escape finds no neighbour's files or processes.

libvirt gives sockets, kernel and initrd to that uid (relabel); seccomp and the
mount namespace are set for all guests in qemu.conf.
"""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain.spec import DomainSpec


@dataclass(frozen=True)
class SecurityContext:
    """Values of the security template: numeric ids, which need no passwd entry."""

    uid: int
    gid: int


def context(spec: DomainSpec) -> SecurityContext:
    """A static DAC label."""
    return SecurityContext(spec.uid, spec.gid)
