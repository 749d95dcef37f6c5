# SPDX-License-Identifier: Apache-2.0
"""Purged jobs: a slurmctld that was killed has no record of them, and their guests still run.

Slurm allocates their resources to the next job at once.  It runs no Epilog for
them, and their extern step may sleep on for hours.  It also allocates at once what it
takes from a running job, while the Epilog of that job runs (``left_nodes``).
"""

from __future__ import annotations

import logging
import time

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import steps
from vhpc_slurm.node.store import joblock, journal, reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import left_nodes
from vhpc_slurm.reconcile.audit import tombstone_and_clear
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpc")
EPILOG_S = 60.0
"""Longest wait for the Epilog of a job that this node has left."""


def is_purged(slurm: Slurm, job_id: int) -> bool:
    """Whether slurmctld answers that it has no record of a job; False when it does not answer."""
    try:
        return not slurm.has_record(job_id)
    except FabricError as err:
        log.info("job %d: %s", job_id, err.line())
    return False


def clear(layout: Layout, slurm: Slurm, node: str, excluding: Generation) -> bool:
    """End the guests of jobs that no longer have this node, and whose resources another job needs.

    These are purged jobs, and jobs that this node has left.  If the Epilog of such a job is running, this
    waits for it.

    Returns whether there were any.

    Raises:
        TeardownError: something of them could not be removed.
    """
    holders = {
        Generation.parse(reservation.generation)
        for reservation in reservations.live(layout, excluding=excluding)
    }
    cleared = False
    for generation in sorted(holders):
        if joblock.has_tombstone(layout, generation) and _epilog_ends(layout, generation):
            cleared = True
        if joblock.busy(layout, generation.job_id) or generation not in journal.generations(layout.journals):
            continue
        if not is_purged(slurm, generation.job_id) and not _has_left(layout, slurm, node, generation):
            continue
        log.warning("clearing generation %s: its job does not have this node any more", generation)
        tombstone_and_clear(layout, generation, node)
        cleared = True
    return cleared


def _has_left(layout: Layout, slurm: Slurm, node: str, generation: Generation) -> bool:
    """Whether a running job no longer has this node; a job with steps here has it."""
    return generation.job_id not in steps.running() and left_nodes.has_left(layout, slurm, node, generation)


def _epilog_ends(layout: Layout, generation: Generation) -> bool:
    """Wait until the Epilog that has begun has removed the journal, or has been killed; whether it did."""
    until = time.monotonic() + EPILOG_S
    while joblock.busy(layout, generation.job_id) and time.monotonic() < until:
        time.sleep(0.1)
    return generation not in journal.generations(layout.journals)
