# SPDX-License-Identifier: Apache-2.0
"""Drain policy: whether a node with devices in quarantine must be drained.

Slurm allocates GPUs by index, and would allocate a quarantined GPU again.  It
only counts virtual functions: while at least as many usable ones are left as
Slurm counts, every job gets what it was promised.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vhpc_slurm.device import traits_of
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.devices.quarantine import QuarantineRecord
from vhpc_slurm.node.host import inventory
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.devices import pool
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpc")


def must_drain(layout: Layout, slurm: Slurm, node: str, records: Sequence[QuarantineRecord]) -> bool:
    """Whether Slurm may allocate one of these devices again; True when that is unknown."""
    try:
        if any(traits_of(record.device_class).indexed for record in records):
            return True
        resources = slurm.node_resources(node)
        found = assignment.handed_out(layout)
        vfs = pool(inventory.read_inventory(node, layout.config), found)
    except VhpcError as err:
        log.warning("%s", err.line())
        return True
    usable = sum(vf.key not in found.quarantined for vf in vfs)
    expected = next(
        (one.gres_count(layout.config.placement.vf_gres) for one in resources if one.name == node), None
    )
    return expected is None or usable < expected
