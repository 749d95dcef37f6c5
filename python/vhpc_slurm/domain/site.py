# SPDX-License-Identifier: Apache-2.0
"""The guest's interface on the bridge of the site: a tap that the node has made, as for ``nic``."""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.nic import NicContext
from vhpc_slurm.domain.spec import DomainSpec


def context(spec: DomainSpec) -> NicContext | None:
    """One interface; None where the job is not on the bridge, or the guest has no slot yet."""
    found = spec.guest.site
    if found is None or not found.tap:
        return None
    return NicContext(found.tap, found.mac, found.queues, found.mtu, slots.SITE)
