# SPDX-License-Identifier: Apache-2.0
"""Whether a node with devices in quarantine may go on working.

Slurm hands out GPUs by their indexes, and would hand out that very one again.
Virtual functions it only counts: as long as there are as many good ones as it
counts, none of its jobs goes without.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hardware import VF
from vhpc_slurm.hooks import common
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.devices.quarantine import QuarantineRecord
from vhpc_slurm.node.host import inventory
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.devices import pool


def must_drain(layout: Layout, node: str, records: Sequence[QuarantineRecord]) -> bool:
    """Whether Slurm would miss one of these devices; True when that cannot be told."""
    if any(record.role != VF for record in records):
        return True
    expected = gres_count(common.scontrol_says("-o", "show", "node", node), layout.config.placement.vf_gres)
    try:
        found = assignment.handed_out(layout)
        vfs = pool(inventory.read_inventory(node, layout.config), found)
    except VhpcError as err:
        common.log.warning("%s", err.line())
        return True
    good = sum(vf.address not in found.quarantined for vf in vfs)
    return expected is None or good < expected


def gres_count(text: str | None, name: str) -> int | None:
    """How many of a generic resource Slurm believes a node to have; None when it does not say."""
    gres = re.search(r"(?:^|\s)Gres=(\S+)", text or "")
    if gres is None:
        return None
    # ibvf:8, ibvf:hdr:8(S:0-1), gpu:h200:4,ibvf:8
    counts = re.findall(rf"(?:^|,){re.escape(name)}(?::[^:,()]+)??:([0-9]+)", gres[1])
    return sum(map(int, counts)) if counts else None
