# SPDX-License-Identifier: Apache-2.0
"""The life of a checkpoint while it is made: pure rules, no clock, no disk, no network.

::

    HOLDING ──all nodes PREPARED, then HELD──> SAVING ──all nodes SAVED──> VALID ──> REMOVED
       └────────────────────────────────────────────┴──────────────────────> FAILED

``react`` says what a keeper's report changes, ``order`` what that keeper has to do.  A keeper that holds
guests repeats its report with each request, and one that repeats none holds none: so a keeper that was
started again, and let its guests continue, is noticed, as a checkpoint of guests that were not stopped at the
same time would be worthless.  An order follows from the state in the database and from what the keeper says
of itself.  So a vhpcd that is started again, or an answer that is lost, changes nothing.
"""

from __future__ import annotations

from vhpc_slurm.model import UNFINISHED, CheckpointState, KeeperState, OrderKind
from vhpc_slurm.record import Record

COMPLETED = (CheckpointState.VALID, CheckpointState.REMOVED)
HOLDS = (KeeperState.PREPARED, KeeperState.HELD, KeeperState.SAVED)
"""Reports of a keeper whose guests are stopped, or prepared for it."""


class Reaction(Record, frozen=True):
    """The changes that follow from a report.

    Attributes:
        store: the report counts from now on as the node's last one.
        state: of the checkpoint; None: it stays.
        error: why the checkpoint has FAILED.
    """

    store: bool = False
    state: CheckpointState | None = None
    error: str = ""


NOTHING = Reaction()


def react(
    state: CheckpointState, known: KeeperState | None, said: KeeperState | None, missing: int, line: str = ""
) -> Reaction:
    """Return the changes that follow from a keeper's report.

    Args:
        state: of the checkpoint.
        known: the last report of this node about it that counts.
        said: the report; None: the keeper reports nothing about this checkpoint.
        missing: how many other nodes have not reported what completes this state: HELD, or SAVED.
        line: the reason of FAILED.
    """
    if state not in UNFINISHED or (said is known and said is not KeeperState.FAILED):
        return NOTHING
    if said is KeeperState.FAILED:
        error = line or "it gives no reason"
    elif said in (None, KeeperState.CONTINUED):
        error = "the guests have continued before they were saved; was their keeper started again?"
    elif (state, known, said) == (CheckpointState.HOLDING, None, KeeperState.PREPARED):
        return Reaction(True)
    elif (state, known, said) == (CheckpointState.HOLDING, KeeperState.PREPARED, KeeperState.HELD):
        return Reaction(True, None if missing else CheckpointState.SAVING)
    elif (state, known, said) == (CheckpointState.SAVING, KeeperState.HELD, KeeperState.SAVED):
        return Reaction(True, None if missing else CheckpointState.VALID)
    else:
        error = f"it reports {said} after {known or 'nothing'}"
    return Reaction(state=CheckpointState.FAILED, error=error)


def order(
    state: CheckpointState | None,
    said: KeeperState | None,
    *,
    stop: bool = False,
    over: bool = False,
    prepared: bool = False,
) -> OrderKind:
    """Return the order for a keeper.

    Args:
        state: of the checkpoint that the report is about, if its guests are stopped for one; else of the
            generation's newest; None if there is none.
        said: the report.
        stop: the job ends with this checkpoint.
        over: the generation has ended.
        prepared: all nodes have reported PREPARED.
    """
    if state in COMPLETED and stop and not (over and said not in HOLDS):
        return OrderKind.END
    if over:
        return OrderKind.OVER
    if said in HOLDS:
        if state is CheckpointState.SAVING and said is KeeperState.HELD:
            return OrderKind.SAVE
        if state is CheckpointState.HOLDING and said is KeeperState.PREPARED and prepared:
            return OrderKind.HOLD
        return OrderKind.WAIT if state in UNFINISHED else OrderKind.CONTINUE
    return OrderKind.PREPARE if state is CheckpointState.HOLDING else OrderKind.WAIT
