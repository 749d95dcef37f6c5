# SPDX-License-Identifier: Apache-2.0
"""virtiofs devices on daemons that run already, as the job's user.

Never ``<source dir>``: libvirt would run the daemon as root, and guest root
would be root on the shared files.
"""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.record import Record


class Filesystem(Record, frozen=True):
    """A virtiofs device: the tag that the guest mounts, its daemon's socket, and its slot; 0: any."""

    tag: str
    socket: str
    slot: int


class SharesContext(Record, frozen=True):
    """Values of the shares template."""

    shares: tuple[Filesystem, ...]


def context(spec: DomainSpec) -> SharesContext | None:
    """One device for each share that has a daemon."""
    found = tuple(
        Filesystem(share.tag, spec.guest.paths.share_socket(share.tag), slots.share_slot(index))
        for index, share in enumerate(spec.running.shares)
        if not share.snapshot
    )
    return SharesContext(found) if found else None
