# SPDX-License-Identifier: Apache-2.0
"""Starts the process that saves the guests of a job, where checkpoints are on."""

from __future__ import annotations

import logging

from vhpc_slurm.model import NodePlan
from vhpc_slurm.node.boot.attendant import Attendant, NotStartedError
from vhpc_slurm.node.checkpoint.facts import is_saveable
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")
KEEPER = Attendant("keeper", first="run", again="ask")
"""One that takes the place of another asks vhpcd first what the guests shall do."""


def start(layout: Layout, journal: Journal, plan: NodePlan) -> None:
    """Start the keeper of a job whose guests run, if the job can be saved; without it the job runs as well.

    Raises:
        NodeError, FabricError: the journal cannot be written.
        Stopped: the job has ended meanwhile.
    """
    if not is_saveable(layout.config, plan.guests):
        return
    try:
        KEEPER.start(layout, journal, plan.node)
    except NotStartedError as err:
        log.error("the job cannot be saved on this node: %s", err.line())
