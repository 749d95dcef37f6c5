# SPDX-License-Identifier: Apache-2.0
"""Jobs without their keeper: it may have held their guests for a checkpoint before it ended.

A new keeper asks vhpcd first. If the job was ended by a valid checkpoint it ends the guests, otherwise they
continue, also without an answer after a while. So only one program decides what is done with held guests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.boot import keeper
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store import joblock, journal
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")
LOCK_TIMEOUT_S = 10.0
STARTED_S = 15.0
"""How long a keeper may take until it has its lock; Slurm ends a health check after 60 s."""
POLL_S = 0.1


def findings(layout: Layout, node: str) -> Iterator[NodeFinding]:
    """Jobs on this node without their keeper, except those that a Prolog or Epilog works on."""
    for generation in journal.generations(layout.journals):
        if joblock.busy(layout, generation.job_id) or joblock.has_tombstone(layout, generation):
            continue
        try:
            entry = _missing(layout, generation)
        except VhpcError as err:
            log.warning("the keeper of %s: %s", generation, err.line())
            continue
        if entry is not None:
            what = f"the keeper of job {generation.job_id} has ended; it may have held the guests"
            yield NodeFinding(Kind.LOST_KEEPER, what, partial(_start, layout, generation, node))


def _missing(layout: Layout, generation: Generation) -> Entry | None:
    """The entry of a keeper that does not run; None if it runs, or the job has none."""
    entry = keeper.entry_of(journal.read_entries(layout.journals, generation))
    return None if entry is None or keeper.lives(layout, generation, entry) else entry


def _start(layout: Layout, generation: Generation, node: str) -> None:
    """Start a keeper in the place of the one that has ended.

    Raises:
        NodeError: it does not start, or a hook keeps the job's lock.
    """
    with joblock.held(layout, generation.job_id, timeout_s=LOCK_TIMEOUT_S, brief=True):
        entry = _missing(layout, generation)
        if entry is None or joblock.has_tombstone(layout, generation):
            return  # the job has ended meanwhile
        opened = Journal(layout.journals, generation)
        try:
            ref = keeper.start_again(layout, opened, entry, node)
        finally:
            opened.close()
    _await(layout, generation, ref)


def _await(layout: Layout, generation: Generation, ref: ProcessRef) -> None:
    """Wait until a keeper works.

    Raises:
        NodeError: it has ended, or does not begin.
    """
    until = time.monotonic() + STARTED_S
    while not keeper.works(layout, generation):
        if not process.alive(ref) or time.monotonic() >= until:
            raise NodeError(
                f"the keeper of job {generation.job_id} does not start",
                keeper.said(layout, generation),
                "see hooks.log; let the guests continue: virsh resume",
            )
        time.sleep(POLL_S)
