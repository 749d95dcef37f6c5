# SPDX-License-Identifier: Apache-2.0
"""Fabric isolation: disconnect and end guests with a key on a fabric that does not keep jobs apart.

The same for the guests of a job whose port has lost its key and cannot get it
back: the job would run on without a network.  vhpcd reports both; a node that
cannot reach vhpcd leaves its guests alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

from vhpc_slurm.controller.api.status_messages import FabricState
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseRecord
from vhpc_slurm.node import teardown
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.store import joblock, journal, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder

log = logging.getLogger("vhpc")
LOCK_TIMEOUT_S = 30.0


def findings(
    layout: Layout, node: str, records: Sequence[LeaseRecord], fabric: FabricState
) -> Iterator[NodeFinding]:
    """Generations whose network is not isolated, or that have lost it; the repair ends their guests.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        records: live leases with a part on this node.
        fabric: the state of the fabric as vhpcd reports it.
    """
    lost = dict(fabric.lost)
    if fabric.safe and not lost:
        return
    known = set(journal.generations(layout.journals))
    for record in records:
        generation = record.lease.generation
        if record.lease.network.kind == "none" or generation not in known:
            continue
        seen = lost.get(str(generation))
        if fabric.safe and seen is None:
            continue
        if any(entry.kind != RunFolder.kind for entry in journal.read_entries(layout.journals, generation)):
            why = f"the fabric does not keep jobs apart: {fabric.what}"
            kind, what = (
                Kind.OPEN_FABRIC,
                f"job {generation.job_id} has a key on a fabric that does not keep jobs apart",
            )
            hint = "submit the job again when the fabric is repaired"
            if fabric.safe:
                why = f"the job's partition key was removed from its port and cannot be restored: {seen}"
                kind, what = Kind.LOST_KEY, f"job {generation.job_id} has lost its key on the fabric"
                hint = "submit the job again"
            error = FabricError(f"the guests of job {generation.job_id} were ended on {node}", why, hint)
            yield NodeFinding(kind, what, partial(_end, layout, node, record, error))


def _end(layout: Layout, node: str, record: LeaseRecord, error: FabricError) -> None:
    """End the guests and release their resources; the run folder stays for the Epilog, with the reason."""
    generation = record.lease.generation
    with joblock.held(layout, generation.job_id, timeout_s=LOCK_TIMEOUT_S, brief=True):
        journal = Journal(layout.journals, generation)
        try:
            path = layout.state_file(generation.job_id)
            if path.parent.exists():
                fields = statefile.header(generation, str(record.lease.request.image))
                failed = {"status": "failed", "kind": error.kind, "message": error.line()}
                statefile.write_state(path, fields | failed, record.lease.request.uid)
            # Before the guests end, which may take a while.
            AssignedDevice().disconnect(layout, journal.held())
            recorder = Recorder(layout.timeline(generation), generation, node)
            teardown.release_guests(layout, journal, recorder)
        finally:
            journal.close()
    log.error("%s", error.line())
