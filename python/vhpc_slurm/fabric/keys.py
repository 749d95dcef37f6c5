# SPDX-License-Identifier: Apache-2.0
"""Partition keys, and segments of other kinds: which generation has which, and until when.  Pure.

A *key assignment* is what one generation has of a key::

    FREE ──> RESERVED ──> APPLIED ──> ACTIVE
                 │           │           │
                 └───────────┴───────────┴──> DRAINING ──> QUARANTINE ──> FREE
                                               │    ^       │
                                               v    │       v
                                               TOMBSTONE <──┘
                                               (leaves like DRAINING)

FREE is the absence of an assignment. RESERVED is durable before the fabric is told.
ACTIVE is written together with the lease's READY, DRAINING together with its ENDING,
QUARANTINE together with its RELEASED and after no port was seen to carry the key. A
TOMBSTONE is an assignment that a node or port may still use: its key is off the
fabric and stays out of use until the node reports that it is clean. Which event
causes which step is in ``controller.leases.transitions``.

Under the policy ``job`` a key has at most one assignment, but the jobs of a cluster share a
key. Under ``user`` all other assignments of one user share his. They never share a GUID: each
has its own range of guest ranks, which stays taken through its quarantine as well.

A quarantine is counted in seconds during which the controller runs, not by the wall
clock: a clock that jumps frees nothing.
"""
# Decision: Members of a cluster share a key, and wait for room on it

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.numbers import MAX_RAILS, MAX_RANKS, MAX_VFS, PKEYS, KeyPool, Space, label, port_guid
from vhpc_slurm.model import Generation


class KeyState(StrEnum):
    """Life of an assignment; FREE has no row."""

    RESERVED = "reserved"
    APPLIED = "applied"
    ACTIVE = "active"
    DRAINING = "draining"
    QUARANTINE = "quarantine"
    TOMBSTONE = "tombstone"


_NEXT: dict[KeyState, frozenset[KeyState]] = {
    KeyState.RESERVED: frozenset({KeyState.APPLIED, KeyState.DRAINING, KeyState.TOMBSTONE}),
    KeyState.APPLIED: frozenset({KeyState.ACTIVE, KeyState.DRAINING, KeyState.TOMBSTONE}),
    KeyState.ACTIVE: frozenset({KeyState.DRAINING, KeyState.TOMBSTONE}),
    KeyState.DRAINING: frozenset({KeyState.QUARANTINE, KeyState.TOMBSTONE}),
    KeyState.QUARANTINE: frozenset({KeyState.TOMBSTONE}),
    KeyState.TOMBSTONE: frozenset({KeyState.QUARANTINE}),
}
CARRIED = frozenset({KeyState.RESERVED, KeyState.APPLIED, KeyState.ACTIVE, KeyState.DRAINING})
"""States whose ports the subnet manager is told of."""
LIVE = CARRIED - {KeyState.DRAINING}
"""States of keys whose generation has not ended."""
_CLUSTER = "cluster "
"""Owners that begin so have one key at a time."""
HOLDING = CARRIED | {KeyState.TOMBSTONE}
"""States in which no other assignment can have the same ports with fixed GUIDs."""


class KeyTransitionError(Exception):
    """A transition that key assignments do not have: a programming error."""


class ExhaustedError(FabricError):
    """No key of the pool is free now."""


@dataclass(frozen=True)
class KeyAssignment:
    """The part of a key that one generation has; ``pkey`` may also be a VLAN, see ``Space``.

    Its guests have the ranks ``first_rank`` to ``first_rank + ranks - 1``, and
    each guest ``vfs`` ports on each of ``rails`` rails.  ``left_s`` is what a
    quarantine still lasts; ``note`` says why there is a tombstone.  ``ports``
    are the GUIDs of these ports where nodes do not set them (``fabric.portmap``),
    guest by guest, rail by rail, VF by VF.
    """

    generation: Generation
    pkey: int
    owner: str
    first_rank: int
    ranks: int
    rails: int
    vfs: int
    state: KeyState = KeyState.RESERVED
    left_s: float = 0.0
    note: str = ""
    ports: tuple[int, ...] = ()

    def port_guids(self) -> Iterator[int]:
        """The GUIDs of all its ports: guest by guest, rail by rail, VF by VF; none off InfiniBand."""
        if self.ports or not PKEYS.has(self.pkey):
            yield from self.ports
            return
        for rank in range(self.first_rank, self.first_rank + self.ranks):
            for rail in range(self.rails):
                for vf in range(self.vfs):
                    yield port_guid(self.pkey, rail, rank, vf)


@dataclass(frozen=True)
class KeySnapshot:
    """All assignments at one moment, and when each key was last freed.

    ``epoch`` counts the changes ever made, and ``tag`` is a random mark of each:
    a database that was copied back from the past counts the same numbers again,
    with other tags.  ``freed`` maps a key to the epoch at which it became free;
    keys that were never used are not in it.  ``off`` are generations whose keys
    must not be in the fabric now, whatever their state: those that leave it, and
    those that it has not been told yet.
    """

    epoch: int
    assignments: tuple[KeyAssignment, ...] = ()
    freed: Mapping[int, int] = field(default_factory=dict)
    tag: str = ""
    off: frozenset[Generation] = frozenset()

    def of(self, generation: Generation) -> KeyAssignment | None:
        """The assignment of a generation; None when it has none."""
        return self._by_generation.get(generation)

    @cached_property
    def _by_generation(self) -> dict[Generation, KeyAssignment]:
        return {assignment.generation: assignment for assignment in self.assignments}

    def must(self, generation: Generation) -> KeyAssignment:
        """The assignment of a generation; FabricError when it has none."""
        found = self.of(generation)
        if found is None:
            raise FabricError(f"{generation} has no partition key")
        return found

    def ports_held(self) -> frozenset[int]:
        """The ports with fixed GUIDs that assignments hold."""
        return frozenset(
            guid
            for assignment in self.assignments
            if assignment.state in HOLDING
            for guid in assignment.ports
        )

    def carried(self) -> tuple[KeyAssignment, ...]:
        """The assignments that the fabric must have, ordered by key and rank."""
        found = (one for one in self.assignments if one.state in CARRIED and one.generation not in self.off)
        return tuple(sorted(found, key=lambda assignment: (assignment.pkey, assignment.first_rank)))

    def carries_the_same(self, other: KeySnapshot) -> bool:
        """Whether both give the same keys to the same ports; the fabric is not told states."""
        mine, theirs = (
            [replace(one, state=KeyState.RESERVED) for one in snapshot.carried()]
            for snapshot in (self, other)
        )
        return mine == theirs

    def missing(self, had: Collection[int], since: int, max_percent: int) -> frozenset[int]:
        """Keys that the fabric has since the epoch ``since`` and that this snapshot does not know.

        None where they are at most ``max_percent`` of a hundred: but a snapshot
        without assignments cannot be the one that they came from.
        """
        known = {assignment.pkey for assignment in self.assignments}
        known |= {pkey for pkey, freed in self.freed.items() if freed > since}
        found = frozenset(had) - known
        few = len(found) * 100 <= max_percent * len(had)
        return frozenset() if few and self.assignments else found

    def without(self, generations: Iterable[Generation]) -> KeySnapshot:
        """The same, with nothing of these generations on the fabric."""
        return replace(self, off=self.off | frozenset(generations))


def owner_of(generation: Generation, uid: int, cluster: int | None, each: Literal["job", "user"]) -> str:
    """The owner of a generation's key, for the database: its cluster, if it has one, else its job or user."""
    if cluster is not None:
        return f"{_CLUSTER}{cluster}"
    return f"user {uid}" if each == "user" else f"job {generation}"


def assign(
    pool: KeyPool,
    snapshot: KeySnapshot,
    generation: Generation,
    owner: str,
    *,
    ranks: int,
    rails: int,
    vfs: int,
    limit: int = MAX_RANKS,
) -> KeyAssignment:
    """Choose a key and a range of ranks, below ``limit``, for a generation.

    The owner's key is used where he has one in use; else the key that has been free for
    the longest time, unused keys first.

    Raises:
        FabricError: no key or no range is free, or the job is larger than GUIDs can tell apart.
    """
    if not (0 < ranks <= limit <= MAX_RANKS and 0 < rails <= MAX_RAILS and 0 < vfs <= MAX_VFS):
        raise FabricError(
            f"cannot name the ports of {generation}",
            f"{ranks} guests with {vfs} ports on each of {rails} rails",
            f"at most {limit} guests, {MAX_VFS} ports and {MAX_RAILS} rails have GUIDs",
        )
    if snapshot.of(generation) is not None:
        raise KeyTransitionError(f"{generation} has an assignment already")
    holders: dict[int, list[KeyAssignment]] = {}
    for one in snapshot.assignments:
        holders.setdefault(one.pkey, []).append(one)
    if own := _own_key(pool, holders, owner, ranks, limit):
        pkey, first = own
        return KeyAssignment(generation, pkey, owner, first, ranks, rails, vfs)
    free = (pkey for pkey in pool.numbers() if pkey not in holders)
    unused = next((pkey for pkey in free if pkey not in snapshot.freed), None)
    if unused is not None:
        return KeyAssignment(generation, unused, owner, 0, ranks, rails, vfs)
    rested = [(freed, pkey) for pkey, freed in snapshot.freed.items() if pkey not in holders and pkey in pool]
    if not rested:
        raise _exhausted(pool, snapshot)
    return KeyAssignment(generation, min(rested)[1], owner, 0, ranks, rails, vfs)


def move(
    assignment: KeyAssignment, state: KeyState, *, note: str = "", quarantine_s: float = 0.0
) -> KeyAssignment:
    """The assignment in another state; KeyTransitionError when that transition does not exist."""
    if state not in _NEXT[assignment.state]:
        raise KeyTransitionError(f"{assignment.generation}: {assignment.state} -> {state}")
    left_s = quarantine_s if state is KeyState.QUARANTINE else 0.0
    return replace(assignment, state=state, left_s=left_s, note=note)


def age(assignment: KeyAssignment, elapsed_s: float) -> KeyAssignment | None:
    """The assignment after so many seconds of a steady clock; None when it is FREE now."""
    if assignment.state is not KeyState.QUARANTINE:
        return assignment
    left_s = assignment.left_s - max(0.0, elapsed_s)
    return replace(assignment, left_s=left_s) if left_s > 0 else None


def overlap(one: KeyAssignment, other: KeyAssignment) -> bool:
    """Whether the two could have a GUID in common, or have a port in common."""
    held = one.ports and other.ports and {one.state, other.state} <= HOLDING
    if held and not set(one.ports).isdisjoint(other.ports):
        return True
    return (
        one.pkey == other.pkey
        and one.first_rank < other.first_rank + other.ranks
        and other.first_rank < one.first_rank + one.ranks
    )


def foreign_assignment(assignment: KeyAssignment) -> FabricError:
    """The error for an assignment that was made under another backend."""
    return FabricError(
        f"{label(assignment.pkey)} of {assignment.generation} cannot be verified",
        "it was assigned under another fabric.backend",
        "go back to that backend until the job has ended",
    )


def refuse_other_spaces(space: Space, snapshot: KeySnapshot) -> None:
    """FabricError when assignments of other kinds are in use: a backend could not take them off."""
    held = [
        one
        for one in snapshot.assignments
        if one.state is not KeyState.QUARANTINE and not space.has(one.pkey)
    ]
    if held:
        raise FabricError(
            f"{len(held)} assignments in use are not {space.name}s",
            f"the first is {label(held[0].pkey)} of {held[0].generation}",
            "let these jobs end under the backend that they began with",
        )


def _free_range(holders: list[KeyAssignment], ranks: int, limit: int) -> int | None:
    """The lowest rank at which so many are free; None when there is none."""
    first = 0
    for one in sorted(holders, key=lambda one: one.first_rank):
        if one.first_rank - first >= ranks:
            break
        first = max(first, one.first_rank + one.ranks)
    return first if first + ranks <= limit else None


def _own_key(
    pool: KeyPool, holders: Mapping[int, list[KeyAssignment]], owner: str, ranks: int, limit: int
) -> tuple[int, int] | None:
    """A key that the owner has, and the first of the free ranks on it; None: he needs a further key.

    Raises:
        ExhaustedError: the owner is a cluster, and the key of its jobs has no room. They may not have two.
    """
    for pkey, theirs in sorted(holders.items()):
        if any(one.owner != owner for one in theirs):
            continue
        cluster = owner.startswith(_CLUSTER)
        if cluster and not any(one.state in LIVE for one in theirs):
            continue
        first = _free_range(theirs, ranks, limit)
        # A tombstone blocks the whole key: a guest may still use it.
        blocking = next((one for one in theirs if one.state is KeyState.TOMBSTONE), None)
        if blocking is not None:
            why = f"a guest of {blocking.generation} may still use it: {blocking.note}"
        elif pkey not in pool:
            why = "the site has taken it out of the pool"
        elif first is None:
            held = sum(one.ranks for one in theirs)
            why = f"{held} of {limit} guests have it or had it until a moment ago, and the job has {ranks}"
        else:
            return pkey, first
        if cluster:
            what = f"the key {label(pkey)} of the job's cluster takes no further guests"
            raise ExhaustedError(what, why)
    return None


def _exhausted(pool: KeyPool, snapshot: KeySnapshot) -> ExhaustedError:
    snapshot = replace(
        snapshot, assignments=tuple(one for one in snapshot.assignments if pool.space.has(one.pkey))
    )
    resting = [one for one in snapshot.assignments if one.state is KeyState.QUARANTINE]
    with_tombstone = {one.pkey for one in snapshot.assignments if one.state is KeyState.TOMBSTONE}
    used = {one.pkey for one in snapshot.assignments} - {one.pkey for one in resting} - with_tombstone
    why = f"{len(used)} are in use, {len({one.pkey for one in resting})} in quarantine"
    if resting:
        why += f" (the next for {min(one.left_s for one in resting):.0f} s)"
    if with_tombstone:
        why += f", {len(with_tombstone)} tombstones"
    return ExhaustedError(
        f"no {pool.space.name} is free", why, "a Slurm license as large as the pool lets jobs wait instead"
    )
