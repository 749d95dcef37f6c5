# SPDX-License-Identifier: Apache-2.0
"""Guests with a key on a fabric that does not keep jobs apart: their virtual functions go off, they end.

So do the guests of a job whose ports have lost their key for good: it would
compute on without a network.  vhpcd says both; a node that cannot ask it does
not know, and leaves its guests alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from vhpc_slurm.controller.api.protocol import FabricState
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import LeaseRecord
from vhpc_slurm.node import audit, teardown
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.store import joblock, journal, kinds, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder

KIND, KIND_LOST = "open-fabric", "lost-key"
LOCK_TIMEOUT_S = 30.0


def findings(
    layout: Layout, node: str, records: Sequence[LeaseRecord], fabric: FabricState
) -> Iterator[audit.NodeFinding]:
    """Generations of this node that others can reach, or nobody; the repair ends their guests.

    Args:
        layout: where the node keeps what it has.
        node: its name.
        records: live leases with a part on it.
        fabric: what vhpcd says of the fabric.
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
        if any(entry.kind != kinds.RUN_DIR for entry in journal.read_entries(layout.journals, generation)):
            why = f"the fabric does not keep jobs apart: {fabric.what}"
            kind, what = KIND, f"job {generation.job_id} has a key of a fabric that does not keep jobs apart"
            hint = "submit the job again when it does"
            if fabric.safe:
                why = f"the job's partition key was taken from its port and cannot be given back: {seen}"
                kind, what = KIND_LOST, f"job {generation.job_id} has lost its key on the fabric"
                hint = "submit the job again"
            error = FabricError(f"the guests of job {generation.job_id} were ended on {node}", why, hint)
            yield audit.NodeFinding(kind, what, partial(_end, layout, node, record, error))


def _end(layout: Layout, node: str, record: LeaseRecord, error: FabricError) -> None:
    """End guests and give back what they had; the run folder stays for the Epilog, and says why."""
    generation = record.lease.generation
    with joblock.held(layout, generation.job_id, timeout_s=LOCK_TIMEOUT_S, brief=True):
        journal = Journal(layout.journals, generation)
        try:
            path = layout.state_file(generation.job_id)
            if path.parent.exists():
                fields = statefile.header(generation, str(record.lease.request.image))
                failed = {"status": "failed", "kind": error.kind, "message": error.line()}
                statefile.write_state(path, fields | failed, record.lease.request.uid)
            # Before the guests: one may take its time to end.
            assignment.disconnect(layout, journal.held())
            recorder = Recorder(layout.timeline(generation), generation, node)
            teardown.release_guests(layout, journal, recorder)
        finally:
            journal.close()
    common.log.error("%s", error.line())
