# SPDX-License-Identifier: Apache-2.0
"""The state machine of a generation: its lease and its key assignment, which change together.  Pure.

========  ==============================  =======================================
lease     key                             meaning
========  ==============================  =======================================
RESERVED  RESERVED, APPLIED               the fabric must be told, or was told
READY     ACTIVE, or none                 nodes may take it
REFUSED   none                            the job fails with the refusal
ENDING    DRAINING, TOMBSTONE, or none    nodes hold it, or the fabric carries it
RELEASED  QUARANTINE, TOMBSTONE, or none  over
no lease  QUARANTINE, TOMBSTONE           the lease was pruned or lost
========  ==============================  =======================================

::

    RESERVED ──Applied──> APPLIED ──Proven──> ACTIVE
       └─────────────────────┴──────Ended───────┴──> DRAINING ──Stripped──> QUARANTINE ──Aged──> no key
                                                      │      ^               │
                                                   Unclean   └─ (Stripped) ─ TOMBSTONE <──Unclean──┘

A lease with a key is READY exactly when the key is ACTIVE, and RELEASED exactly when
the key has left the fabric. ``transition`` is the only function that computes a new
state; ``lifecycle`` writes lease and key of its result in one transaction, so every
state in the database is one of the table above. An event that comes too late (the
job has ended while the fabric was being changed) changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.fabric import keys
from vhpc_slurm.fabric.keys import KeyAssignment, KeyState
from vhpc_slurm.model import LeaseRecord, LeaseState

STATES: dict[LeaseState | None, frozenset[KeyState | None]] = {
    LeaseState.RESERVED: frozenset({KeyState.RESERVED, KeyState.APPLIED}),
    LeaseState.READY: frozenset({KeyState.ACTIVE, None}),
    LeaseState.REFUSED: frozenset({None}),
    LeaseState.ENDING: frozenset({KeyState.DRAINING, KeyState.TOMBSTONE, None}),
    LeaseState.RELEASED: frozenset({KeyState.QUARANTINE, KeyState.TOMBSTONE, None}),
    None: frozenset({KeyState.QUARANTINE, KeyState.TOMBSTONE, None}),
}
"""The states in which a lease and its key are together; None: there is no lease, or no key."""
STRIPPABLE = frozenset({KeyState.DRAINING, KeyState.TOMBSTONE})
"""States of keys that can be removed from the fabric."""
OFF_FABRIC = frozenset({KeyState.QUARANTINE, KeyState.TOMBSTONE, None})
"""States of keys that the fabric is never told."""
ENDED_KEYS = STRIPPABLE | {KeyState.QUARANTINE}


@dataclass(frozen=True)
class Holding:
    """The lease and the key of one generation in the database, each None if there is none."""

    record: LeaseRecord | None
    key: KeyAssignment | None

    @property
    def state(self) -> LeaseState | None:
        """State of the lease."""
        return self.record.lease.state if self.record else None

    @property
    def key_state(self) -> KeyState | None:
        """State of the key."""
        return self.key.state if self.key else None

    def nodes_are_clean(self) -> bool:
        """Whether every node that took the ended generation has reported that it holds nothing.

        (A released generation can be held again: a node that was fenced reports that it is not clean.)
        """
        if self.record is None:
            return True
        if self.record.lease.state is LeaseState.RELEASED:
            return not self.record.unclean
        if not rules.releasable(self.record):
            return False
        return not (self.key_state is KeyState.TOMBSTONE and self.record.unclean)


@dataclass(frozen=True)
class Applied:
    """The fabric accepted the configuration with this key."""


@dataclass(frozen=True)
class Proven:
    """All ports of the generation were seen to have the key."""


@dataclass(frozen=True)
class Ended:
    """The job has ended, was requeued, or has a newer generation."""


@dataclass(frozen=True)
class Unclean:
    """A node reports, or by its silence leaves open, that it may still use the key; ``why`` says which."""

    why: str


@dataclass(frozen=True)
class LostLease:
    """The key has no lease that is not released: no node can be asked about it."""


@dataclass(frozen=True)
class Stripped:
    """No port has the key, or there is no key; it may be another's after ``quarantine_s`` seconds."""

    quarantine_s: float


@dataclass(frozen=True)
class Aged:
    """Seconds have passed of a clock that never jumps."""

    elapsed_s: float


Event = Applied | Proven | Ended | Unclean | LostLease | Stripped | Aged


def transition(held: Holding, event: Event, now: float) -> Holding:
    """The state after an event; ``held`` itself where the event changes nothing.

    Args:
        held: lease and key before.
        event: what happened.
        now: seconds since the epoch, for the lease's record.
    """
    state, after = held.key_state, held
    match event:
        case Applied() if state is KeyState.RESERVED:
            after = _moved(held, key=KeyState.APPLIED)
        case Proven() if held.state is LeaseState.RESERVED and state is KeyState.APPLIED:
            after = _moved(held, now, lease=LeaseState.READY, key=KeyState.ACTIVE)
        case Ended() if held.state in rules.USABLE:
            after = _ended(held, now)
        case Unclean(why) if state in (KeyState.DRAINING, KeyState.QUARANTINE):
            after = _moved(held, key=KeyState.TOMBSTONE, note=why)
        case LostLease() if held.state in (None, LeaseState.RELEASED) and state not in OFF_FABRIC:
            after = _moved(held, key=KeyState.TOMBSTONE, note="it has no lease any more")
        case Stripped(quarantine_s):
            after = _stripped(held, quarantine_s, now)
        case Aged(elapsed_s) if held.key and state is KeyState.QUARANTINE:
            after = replace(held, key=keys.age(held.key, elapsed_s))
    return after


def _ended(held: Holding, now: float) -> Holding:
    """ENDING; with a tombstone at once where a node has reported that it is not clean."""
    assert held.record is not None
    after = _moved(held, now, lease=LeaseState.ENDING)
    if held.key is not None and held.key_state not in ENDED_KEYS:
        after = _moved(after, key=KeyState.DRAINING)
    if held.record.unclean:
        node, note = held.record.unclean[0]
        after = transition(after, Unclean(f"{node}: {note}"), now)
    return after


def _stripped(held: Holding, quarantine_s: float, now: float) -> Holding:
    """RELEASED with the key in QUARANTINE, unless a node may still hold the generation."""
    if not held.nodes_are_clean() or (held.key and held.key_state not in STRIPPABLE):
        return held
    lease = LeaseState.RELEASED if held.state is LeaseState.ENDING else None
    if held.key is None:
        return _moved(held, now, lease=lease) if lease else held
    return _moved(held, now, lease=lease, key=KeyState.QUARANTINE, quarantine_s=quarantine_s)


def _moved(
    held: Holding,
    now: float = 0.0,
    *,
    lease: LeaseState | None = None,
    key: KeyState | None = None,
    note: str = "",
    quarantine_s: float = 0.0,
) -> Holding:
    record, assignment = held.record, held.key
    if lease is not None and record is not None:
        record = rules.move(record, lease, now)
    if key is not None and assignment is not None:
        assignment = keys.move(assignment, key, note=note[:1000], quarantine_s=quarantine_s)
    return Holding(record, assignment)
