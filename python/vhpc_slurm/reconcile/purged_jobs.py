# SPDX-License-Identifier: Apache-2.0
"""Purged jobs: a slurmctld that was killed has no record of them, and their guests still run.

Slurm allocates their resources to the next job at once.  It runs no Epilog for
them, and their extern step may sleep on for hours.
"""

from __future__ import annotations

import logging

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store import joblock, reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile.audit import tombstone_and_clear
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpc")


def is_purged(slurm: Slurm, job_id: int) -> bool:
    """Whether slurmctld answers that it has no record of a job; False when it does not answer."""
    try:
        return not slurm.has_record(job_id)
    except FabricError as err:
        log.info("job %d: %s", job_id, err.line())
    return False


def clear(layout: Layout, slurm: Slurm, node: str, excluding: Generation) -> bool:
    """End the guests of purged jobs on this node, whose resources another job needs.

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
        if joblock.busy(layout, generation.job_id) or not is_purged(slurm, generation.job_id):
            continue
        log.warning("clearing generation %s: slurmctld has no record of its job", generation)
        tombstone_and_clear(layout, generation, node)
        cleared = True
    return cleared
