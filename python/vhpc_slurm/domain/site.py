# SPDX-License-Identifier: Apache-2.0
"""The guest's interface on the bridge of the site: a tap that the node has made, as for ``nic``."""

from __future__ import annotations

from vhpc_slurm.domain import slots
from vhpc_slurm.domain.nic import NicContext
from vhpc_slurm.domain.spec import DomainSpec


def context(spec: DomainSpec) -> NicContext | None:
    """One interface; None where the job is not on the bridge, or the guest has no port yet."""
    found, port = spec.guest.site, spec.running.site_port
    if found is None or port is None:
        return None
    return NicContext(port.tap, port.mac, found.queues, port.mtu, slots.SITE)
