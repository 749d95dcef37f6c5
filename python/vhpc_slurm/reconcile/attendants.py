# SPDX-License-Identifier: Apache-2.0
"""Jobs without one of their attendants, which is started again.

A keeper may have held the guests for a checkpoint before it ended. A new one asks vhpcd first: if the job was
ended by a valid checkpoint it ends the guests, otherwise they continue, also without an answer after a while.
So only one program decides what is done with held guests.

Without a follower the guests of a cluster's member do not learn who joins and who leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.boot.attendant import Attendant
from vhpc_slurm.node.boot.follower import FOLLOWER
from vhpc_slurm.node.boot.keeper import KEEPER
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store import joblock, journal
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
LOCK_TIMEOUT_S = 10.0
STARTED_S = 15.0
"""How long an attendant may take until it has its lock; Slurm ends a health check after 60 s."""
POLL_S = 0.1


class _Lost(Record, frozen=True):
    """The report of a lost attendant.

    Attributes:
        attendant: its kind.
        kind: of the finding.
        effect: what it may mean for the job.
        hint: what to do if it does not start again.
    """

    attendant: Attendant
    kind: Kind
    effect: str
    hint: str


_ALL = (
    _Lost(
        KEEPER,
        Kind.LOST_KEEPER,
        "it may have held the guests",
        "see hooks.log; let the guests continue: virsh resume",
    ),
    _Lost(
        FOLLOWER,
        Kind.LOST_FOLLOWER,
        "its guests do not see who joins or leaves their cluster",
        "see hooks.log; the job runs on without changes of its cluster",
    ),
)


def findings(layout: Layout, node: str) -> Iterator[NodeFinding]:
    """Jobs on this node without an attendant of theirs, except those that a Prolog or Epilog works on."""
    for generation in journal.generations(layout.journals):
        if joblock.busy(layout, generation.job_id) or joblock.has_tombstone(layout, generation):
            continue
        for one in _ALL:
            role = one.attendant.role
            try:
                entry = _missing(layout, generation, one)
            except VhpcError as err:
                log.warning("the %s of %s: %s", role, generation, err.line())
                continue
            if entry is not None:
                what = f"the {role} of job {generation.job_id} has ended; {one.effect}"
                yield NodeFinding(one.kind, what, partial(_start, layout, generation, node, one))


def _missing(layout: Layout, generation: Generation, one: _Lost) -> Entry | None:
    """The entry of an attendant that does not run; None if it runs, or the job has none."""
    entry = one.attendant.entry_of(journal.read_entries(layout.journals, generation))
    return None if entry is None or one.attendant.lives(layout, generation, entry) else entry


def _start(layout: Layout, generation: Generation, node: str, one: _Lost) -> None:
    """Start an attendant in the place of the one that has ended.

    Raises:
        NodeError: it does not start, or a hook keeps the job's lock.
    """
    with joblock.held(layout, generation.job_id, timeout_s=LOCK_TIMEOUT_S, brief=True):
        entry = _missing(layout, generation, one)
        if entry is None or joblock.has_tombstone(layout, generation):
            return  # the job has ended meanwhile
        opened = Journal(layout.journals, generation)
        try:
            ref = one.attendant.start_again(layout, opened, entry, node)
        finally:
            opened.close()
    _await(layout, generation, one, ref)


def _await(layout: Layout, generation: Generation, one: _Lost, ref: ProcessRef) -> None:
    """Wait until the attendant works.

    Raises:
        NodeError: it has ended, or does not begin.
    """
    until = time.monotonic() + STARTED_S
    while not one.attendant.works(layout, generation):
        if not process.alive(ref) or time.monotonic() >= until:
            what = f"the {one.attendant.role} of job {generation.job_id} does not start"
            raise NodeError(what, one.attendant.said(layout, generation), one.hint)
        time.sleep(POLL_S)
