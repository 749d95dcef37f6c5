# SPDX-License-Identifier: Apache-2.0
"""The root disk: one raw, read-only file for all guests of an image.

Cached in the host (writeback): the next job's guest boots from memory.  Never
relabelled: libvirt would make a shared file the property of one guest's uid.
"""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.cputune import IOTHREADS
from vhpc_slurm.domain.spec import DomainSpec

QUEUES_MAX = 4  # enough to boot from; QEMU's default is a queue, and an interrupt vector, per vCPU


@dataclass(frozen=True)
class DiskContext:
    """Values of the disk template."""

    file: str
    queues: int
    iothread: int
    slot: int


def context(spec: DomainSpec) -> DiskContext:
    """The first virtio disk, ``vda``."""
    return DiskContext(spec.root, min(QUEUES_MAX, len(spec.guest.pins)), IOTHREADS, slots.DISK)
