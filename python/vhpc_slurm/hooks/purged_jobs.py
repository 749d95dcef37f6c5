# SPDX-License-Identifier: Apache-2.0
"""Purged jobs: a slurmctld that was killed has no record of them, and their guests still run.

Slurm gives what they had to the next job at once; their own end is told to
nobody, and the step of their allocation may sleep on for hours.
"""

from __future__ import annotations

from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation
from vhpc_slurm.node import audit, joblock, reservations
from vhpc_slurm.node.layout import Layout
from vhpc_slurm.slurm.port import Slurm


def is_purged(slurm: Slurm, job_id: int) -> bool:
    """Whether slurmctld answers that it has no record of a job; False when it does not answer."""
    try:
        return not slurm.has_record(job_id)
    except FabricError as err:
        common.log.info("job %d: %s", job_id, err.line())
    return False


def clear(layout: Layout, slurm: Slurm, node: str, excluding: Generation) -> bool:
    """End the guests of purged jobs on this node, when they are in the way of another's.

    Returns whether there were any.

    Raises:
        TeardownError: they could not be ended.
    """
    holders = {
        Generation.parse(reservation.generation)
        for reservation in reservations.live(layout, excluding=excluding)
    }
    cleared = False
    for generation in sorted(holders):
        if joblock.busy(layout, generation.job_id) or not is_purged(slurm, generation.job_id):
            continue
        common.log.warning("clearing generation %s: slurmctld has no record of its job", generation)
        audit.tombstone_and_clear(layout, generation, node)
        cleared = True
    return cleared
