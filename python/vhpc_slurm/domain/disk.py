# SPDX-License-Identifier: Apache-2.0
"""The disks of a guest: the root, its own disk, if it has one, and snapshots of shared folders.

The root is one raw, read-only file for all guests of an image.  Cached in the
host (writeback): the next job's guest boots from memory.

The guest's own disk ends with the job, so nothing on it must survive a crash of the
node: QEMU does not flush (unsafe).  Its file keeps the space that it has
(discard="ignore"), so that only the guest's own file system can be full; an error of
the host's is one in the guest, and does not stop it.

Neither is relabelled: libvirt would make a shared file the property of one guest's
uid, and vhpc owns the disk until QEMU gets it.
"""

from __future__ import annotations

from string import ascii_lowercase

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.cputune import IOTHREADS
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record

LETTERS = ascii_lowercase
QUEUES_MAX = 4  # enough to boot from; QEMU's default is a queue, and an interrupt vector, per vCPU


class Disk(Record, frozen=True):
    """One disk; ``shared``: with other guests, so never written.

    ``slot`` 0: any. ``serial`` is the tag of a share, by which the guest finds its snapshot.
    """

    file: str
    target: str
    slot: int
    shared: bool
    serial: str = ""


class DiskContext(Record, frozen=True):
    """Values of the disk template."""

    disks: tuple[Disk, ...]
    queues: int
    iothread: int


def context(spec: DomainSpec) -> DiskContext:
    """The virtio disks; the kernel numbers them in the order of their slots.

    ``vda`` is the root, ``vdb`` the guest's own disk, if it has one.
    """
    paths = spec.guest.paths
    disks = [Disk(paths.root, "vda", slots.DISK, shared=True)]
    if paths.disk:
        disks.append(Disk(paths.disk, "vdb", slots.OWN_DISK, shared=False))
    for index, share in enumerate(spec.running.shares):
        if share.snapshot:
            target = f"vd{LETTERS[len(disks)]}"
            disks.append(Disk(share.snapshot, target, slots.share_slot(index), shared=True, serial=share.tag))
    return DiskContext(tuple(disks), min(QUEUES_MAX, len(spec.guest.pins)), IOTHREADS)
