# SPDX-License-Identifier: Apache-2.0
"""Jobs that have ended for slurmctld, while their guests still run here, and for which Slurm runs no Epilog.

A slurmctld that was killed has no record of a job.  A node that registers within MessageTimeout
after its job has ended, because it did not answer before, is not told to end the job until it
registers again, which may take half an hour (validate_jobs_on_node in slurmctld/job_mgr.c).
Slurm allocates the resources of such a job to the next job at once, and its steps may run on.
Slurm also allocates at once what it takes from a running job, while the Epilog of that
job runs (``left_nodes``).
"""

from __future__ import annotations

import logging
import time

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import steps
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store import joblock, journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import left_nodes
from vhpc_slurm.reconcile.audit import tombstone_and_clear
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpc")
EPILOG_S = 60.0
"""Longest wait for the Epilog of a job that this node has left."""


def has_ended(slurm: Slurm, job_id: int) -> bool:
    """Whether slurmctld waits for no Epilog of a job, or does not know it; False when it does not answer."""
    try:
        return not slurm.knows(job_id)
    except FabricError as err:
        log.info("job %d: %s", job_id, err.line())
    return False


def clear(layout: Layout, slurm: Slurm, node: str, excluding: Generation) -> bool:
    """End the guests of jobs that no longer have this node, and whose resources another job needs.

    These are jobs that have ended, and jobs that this node has left.  If the Epilog of such a job is
    running, this waits for it.

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
        if not (
            joblock.has_tombstone(layout, generation)
            or has_ended(slurm, generation.job_id)
            or _has_left(slurm, node, generation)
        ):
            continue
        log.warning("clearing generation %s: its job does not have this node any more", generation)
        tombstone_and_clear(layout, generation, node)
        cleared = True
    return cleared


def _has_left(slurm: Slurm, node: str, generation: Generation) -> bool:
    """Whether a running job no longer has this node; a job with steps here has it."""
    return generation.job_id not in steps.running() and left_nodes.has_left(slurm, node, generation)


def _epilog_ends(layout: Layout, generation: Generation) -> bool:
    """Wait until the Epilog that has begun has removed the journal, or has been killed; whether it did."""
    until = time.monotonic() + EPILOG_S
    while joblock.busy(layout, generation.job_id) and time.monotonic() < until:
        time.sleep(0.1)
    return generation not in journal.generations(layout.journals)
