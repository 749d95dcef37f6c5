# SPDX-License-Identifier: Apache-2.0
"""virtiofs devices on daemons that run already, as the job's user.

Never ``<source dir>``: libvirt would run the daemon as root, and guest root
would be root on the shared files.
"""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.spec import DomainSpec, ShareSpec
from vhpc_slurm.record import Record


class SharesContext(Record, frozen=True):
    """Values of the shares template."""

    shares: tuple[ShareSpec, ...]
    slots: tuple[int, ...]


def context(spec: DomainSpec) -> SharesContext | None:
    """One device for each share."""
    places = tuple(slots.share_slot(index) for index in range(len(spec.shares)))
    return SharesContext(spec.shares, places) if spec.shares else None
