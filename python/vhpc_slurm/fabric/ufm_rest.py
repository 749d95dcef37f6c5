# SPDX-License-Identifier: Apache-2.0
"""The backend ``ufm-rest``: UFM's partitions follow the key assignments.

UFM belongs to the site, so vhpcd adds and removes only ports with GUIDs of its own
(``02cc``, then the key) on keys of the pool, and on keys that an assignment has although
they are no longer in the pool. It leaves other ports on such a key alone, and starts no
job on a key that has one.

A *mark* shows which database of vhpcd last changed UFM: a member of a separate key,
whose GUID consists of epoch and tag. A database that does not know the mark is an old
copy or belongs to another cluster, and changes nothing.
"""
# Decision: UFM's partitions belong to the site

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers, partitions
from vhpc_slurm.fabric.backend import (
    ByPolicy,
    FabricFinding,
    FabricRefusedError,
    KeyPolicy,
    Proof,
    ProofResults,
)
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot
from vhpc_slurm.fabric.numbers import PORT_PREFIX
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.ufm_client import UfmBusyError, UfmClient
from vhpc_slurm.model import Generation

log = logging.getLogger("vhpcd")

MARK_PREFIX = 0x02CE
"""Upper 16 bits of a mark; no port has such a GUID."""
POLL_S = 0.2
AGAIN_S = 2.0
"""Seconds after which a change that UFM accepted is requested again where it had no effect."""
SHOWN = 3

Members = dict[int, dict[int, bool]]
"""By key, by port GUID: whether it is a full member."""


@dataclass(frozen=True)
class Change:
    """A change of one key in UFM."""

    pkey: int
    add: tuple[int, ...] = ()
    remove: tuple[int, ...] = ()
    delete: bool = False

    def line(self) -> str:
        """The open changes as text."""
        words = [
            f"lacks {len(self.add)} ports" if self.add else "",
            f"has {len(self.remove)} too many" if self.remove else "",
            "is there without ports" if self.delete else "",
        ]
        return f"{self.pkey:#06x} {' and '.join(word for word in words if word)}"


class UfmRest(ByPolicy):
    """Changes UFM, polls it, and reads the fabric where it can be read."""

    def __init__(
        self,
        policy: KeyPolicy,
        ufm: UfmClient,
        readback: Readback | None,
        knows: Callable[[int, str], bool],
        *,
        mark_pkey: int,
        ipoib: bool = True,
        timeout_s: float = 10.0,
        max_lost_percent: int = 0,
    ) -> None:
        """``knows`` says whether this database had an epoch; without ``readback`` only UFM's answers count.

        Raises:
            FabricError: the mark's key is in the pool.
        """
        super().__init__(policy)
        self._ufm = ufm
        self._readback = readback
        self._knows = knows
        self._mark_pkey = mark_pkey
        self._ipoib = ipoib
        self._timeout_s = timeout_s
        self._max_lost_percent = max_lost_percent
        self._pool = frozenset(policy.pool.numbers())
        self._seen: Members | None = None  # what UFM showed last
        self._late: dict[int, str] = {}  # by key: why UFM did not do what it was asked for last
        if mark_pkey in self._pool:
            raise FabricError(
                f"fabric.ufm_mark_pkey {mark_pkey:#06x} is a key for jobs", "it has to be outside of the pool"
            )

    def validate(self, snapshot: KeySnapshot) -> None:
        """FabricError unless UFM grants access, and this database changed it last."""
        keys.refuse_other_spaces(numbers.PKEYS, snapshot)
        self._ufm.version()
        self._guard(self._ufm.partitions(), snapshot)

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Have UFM carry what the snapshot carries, and wait until UFM shows it.

        ``verify`` and ``strip`` report a key that UFM does not show in time. ``force`` also
        removes keys that the snapshot seems to have lost.

        Raises:
            FabricError: UFM cannot be reached, denies access, or was changed by another database.
        """
        late: dict[int, str] = {}
        asked: dict[int, float] = {}
        deadline = time.monotonic() + self._timeout_s
        while True:
            have = self._look(deadline)
            if not force:
                self._guard(have, snapshot)
            todo = self._todo(have, snapshot)
            if not todo:
                self._tidy(have, snapshot)
                return
            if time.monotonic() >= deadline:
                break
            late = {one.pkey: late.get(one.pkey, "") for one in todo}
            marked = self._marked(have, snapshot, late)
            for one in todo:
                if marked and time.monotonic() - asked.get(one.pkey, -AGAIN_S) >= AGAIN_S:
                    asked[one.pkey] = time.monotonic()
                    late[one.pkey] = self._change(one)
                    if late[one.pkey]:
                        asked[one.pkey] -= AGAIN_S - POLL_S
            time.sleep(POLL_S)
        self._late = {pkey: why or "UFM has accepted it" for pkey, why in late.items()}
        log.error("UFM did not apply within %g s: %s", self._timeout_s, _some(todo))

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that the generations' ports, and no others, have their keys in UFM and on the fabric."""
        have = self._look(time.monotonic() + self._timeout_s)
        todo = {one.pkey: one for one in self._todo(have, snapshot)}
        outcomes: ProofResults = {}
        good = []
        for assignment in map(snapshot.must, generations):
            pkey = assignment.pkey
            if not numbers.PKEYS.has(pkey):
                outcomes[assignment.generation] = keys.foreign_assignment(assignment)
                continue
            foreign = sorted(guid for guid in have.get(pkey, {}) if not _ours(pkey, guid))
            if foreign:
                outcomes[assignment.generation] = FabricError(
                    f"key {pkey:#06x} of {assignment.generation} has a port in UFM that vhpcd did not add",
                    f"the first is {foreign[0]:#018x}",
                    "remove it, or add the key to fabric.pkey_reserved",
                )
            elif pkey in todo:
                outcomes[assignment.generation] = self._undone(assignment, todo[pkey])
            else:
                good.append(assignment)
                unseen = sum(1 for _ in assignment.port_guids())
                outcomes[assignment.generation] = Proof(snapshot.epoch, absent=unseen)
        if self._readback is not None and good:
            outcomes |= self._readback.carried(good, self._partitions(have, snapshot), snapshot)
        return outcomes

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back that no port has the generations' keys any more, in UFM and on the fabric."""
        have = self._look(time.monotonic() + self._timeout_s)
        todo = {one.pkey: one for one in self._todo(have, snapshot)}
        outcomes: ProofResults = {}
        good = []
        for assignment in map(snapshot.must, generations):
            if not numbers.PKEYS.has(assignment.pkey):
                outcomes[assignment.generation] = keys.foreign_assignment(assignment)
            elif left := have.get(assignment.pkey, {}).keys() & frozenset(assignment.port_guids()):
                change = todo.get(assignment.pkey, Change(assignment.pkey, remove=tuple(sorted(left))))
                outcomes[assignment.generation] = self._undone(assignment, change)
            else:
                good.append(assignment)
                outcomes[assignment.generation] = Proof(snapshot.epoch)
        if self._readback is not None and good:
            outcomes |= self._readback.gone(good, self._partitions(have, snapshot), snapshot)
        return outcomes

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Compare UFM and the fabric with the snapshot."""
        try:
            have = self._look(time.monotonic() + self._timeout_s)
        except FabricError as err:
            return (FabricFinding(0, err.line(), unread=True), *self._port_findings(snapshot))
        if unsure:
            return self._port_findings(snapshot)
        carried = _carried_keys(snapshot)
        found = [
            FabricFinding(0, f"UFM: key {one.line()}", bool(one.remove)) for one in self._todo(have, snapshot)
        ]
        found += [
            FabricFinding(
                guid,
                f"UFM: port {guid:#018x}, which vhpcd did not add, is on key {pkey:#06x} of "
                + ("the pool" if pkey in self._pool else "a job"),
                open=pkey in carried,
            )
            for pkey in sorted((self._pool | carried) & have.keys())
            for guid in sorted(have[pkey])
            if not _ours(pkey, guid)
        ]
        return (*found, *self._port_findings(snapshot))

    def _port_findings(self, snapshot: KeySnapshot) -> tuple[FabricFinding, ...]:
        """Compare the fabric with the snapshot, and with the site's own keys as UFM last showed them.

        Before UFM has shown anything, keys outside the pool that no job has are not compared.
        """
        if self._readback is None:
            return ()
        only = None if self._seen is not None else self._pool | _carried_keys(snapshot)
        return tuple(self._readback.findings(self._partitions(self._seen or {}, snapshot), only))

    def repair(self, snapshot: KeySnapshot) -> None:
        """Apply again."""
        self.apply(snapshot)

    # --- open changes ---------------------------------------------------------------

    def _look(self, deadline: float) -> Members:
        """The partitions that UFM shows; repeats the request while UFM is busy and there is time."""
        while True:
            try:
                self._seen = self._ufm.partitions()
                return self._seen
            except UfmBusyError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_S)

    def _undone(self, assignment: KeyAssignment, change: Change) -> FabricError:
        why = self._late.get(assignment.pkey, "UFM showed the key earlier but no longer does")
        return FabricError(
            f"UFM did not apply the key of {assignment.generation} within {self._timeout_s:g} s",
            f"{change.line()}: {why}",
            "see UFM's log; fabric.apply_timeout_s is how long it may take",
        )

    def _managed(self, snapshot: KeySnapshot) -> frozenset[int]:
        """The keys whose ports vhpcd changes.

        The site may take a key out of the pool while a job has it: the key stays vhpcd's until its
        assignment has ended.
        """
        return self._pool | {one.pkey for one in snapshot.assignments if numbers.PKEYS.has(one.pkey)}

    def _todo(self, have: Members, snapshot: KeySnapshot) -> list[Change]:
        meant = _meant(snapshot)
        found = []
        for pkey in sorted((self._managed(snapshot) & have.keys()) | meant.keys()):
            wanted, members = meant.get(pkey, frozenset()), have.get(pkey, {})
            one = Change(
                pkey,
                tuple(sorted(guid for guid in wanted if not members.get(guid, False))),
                tuple(sorted(guid for guid in members if guid not in wanted and _ours(pkey, guid))),
                delete=pkey in have and not members and not wanted,
            )
            if one.add or one.remove or one.delete:
                found.append(one)
        return found

    def _change(self, one: Change) -> str:
        """Request a change; returns why UFM did not accept it, empty when it did.

        After an interruption, also by a restart of vhpcd, the state of UFM shows what is
        left to do, and only that is requested again.
        """
        try:
            if one.remove:
                self._ufm.remove(one.pkey, list(one.remove))
            if one.add:
                self._ufm.add(one.pkey, list(one.add), ipoib=self._ipoib)
            if one.delete:
                self._ufm.delete(one.pkey)
        except (UfmBusyError, FabricRefusedError) as err:
            return err.line()
        return ""

    def _marked(self, have: Members, snapshot: KeySnapshot, late: dict[int, str]) -> bool:
        """Set our mark before any change; returns whether UFM has accepted it."""
        if _mark(snapshot) in self._marks(have):
            return True
        why = self._change(Change(self._mark_pkey, add=(_mark(snapshot),)))
        if why:
            late.update(dict.fromkeys(late, why))
        return not why

    def _partitions(self, have: Members, snapshot: KeySnapshot) -> tuple[IbPartition, ...]:
        """The partitions that ports must have: our assignments, and all other keys of UFM.

        A key that the site took out of the pool has ports of the site and those that a job leaves.
        """
        ours = partitions.of_snapshot(snapshot, ipoib=self._ipoib)
        known = {one.pkey for one in ours}
        managed = self._managed(snapshot)
        others = {
            pkey: tuple(
                (f"{guid:#018x}", full)
                for guid, full in members.items()
                if pkey not in managed or not _ours(pkey, guid)
            )
            for pkey, members in have.items()
            if pkey not in known and pkey not in self._pool
        }
        return (*ours, *(IbPartition(f"ufm_{pkey:04x}", pkey, members) for pkey, members in others.items()))

    # --- whose UFM it is -------------------------------------------------------------

    def _guard(self, have: Members, snapshot: KeySnapshot) -> None:
        """FabricError when the keys in UFM may come from another database."""
        managed = self._managed(snapshot) & have.keys()
        ours = {pkey for pkey in managed if any(_ours(pkey, guid) for guid in have[pkey])}
        marks = self._marks(have)
        if not marks:
            if ours:
                raise FabricError(
                    f"UFM has {len(ours)} keys of jobs, and no mark of a database of vhpcd",
                    f"the first is {min(ours):#06x}; the mark belongs on key {self._mark_pkey:#06x}",
                    "when no job with guests is left, delete these keys in UFM",
                )
            return
        origins = [self._origin(mark, snapshot) for mark in marks]
        if None in origins:
            raise FabricError(
                "UFM was not changed last by this database of vhpcd",
                f"it has the mark {marks[origins.index(None)]:#018x} on key {self._mark_pkey:#06x}",
                "was the database restored from a copy? when no job with guests is left, "
                "delete that key and those of jobs in UFM",
            )
        since = min(origin for origin in origins if origin is not None)
        lost = snapshot.missing(ours, since, self._max_lost_percent)
        if lost:
            raise FabricError(
                f"vhpcd does not know {len(lost)} keys of jobs in UFM",
                f"the first is {min(lost):#06x}; removing them would take them from their jobs",
                "is the database damaged? see fabric.max_lost_percent in vhpc.toml(5)",
            )

    def _marks(self, have: Members) -> list[int]:
        return sorted(guid for guid in have.get(self._mark_pkey, {}) if guid >> 48 == MARK_PREFIX)

    def _origin(self, mark: int, snapshot: KeySnapshot) -> int | None:
        """The epoch of a mark, which has only its lower 16 bits; None when another database set it."""
        low, tag = mark >> 32 & 0xFFFF, f"{mark & 0xFFFFFFFF:08x}"
        newest = snapshot.epoch - (snapshot.epoch - low) % (1 << 16)
        for epoch in (newest, newest - (1 << 16)):
            if epoch >= 0 and self._knows(epoch, tag):
                return epoch
        return None

    def _tidy(self, have: Members, snapshot: KeySnapshot) -> None:
        """Remove older marks once UFM shows ours, so that at any moment a mark of ours is left."""
        marks = self._marks(have)
        stale = tuple(one for one in marks if one != _mark(snapshot))
        if stale and len(stale) < len(marks):
            self._change(Change(self._mark_pkey, remove=stale))


def _some(todo: list[Change]) -> str:
    more = f"; and {len(todo) - SHOWN} more" if len(todo) > SHOWN else ""
    return "; ".join(one.line() for one in todo[:SHOWN]) + more


def _mark(snapshot: KeySnapshot) -> int:
    return MARK_PREFIX << 48 | (snapshot.epoch & 0xFFFF) << 32 | int(snapshot.tag or "0", 16) & 0xFFFFFFFF


def _meant(snapshot: KeySnapshot) -> dict[int, frozenset[int]]:
    found: dict[int, frozenset[int]] = {}
    for assignment in snapshot.carried():
        if numbers.PKEYS.has(assignment.pkey):
            found[assignment.pkey] = found.get(assignment.pkey, frozenset()) | frozenset(
                assignment.port_guids()
            )
    return found


def _carried_keys(snapshot: KeySnapshot) -> frozenset[int]:
    return frozenset(one.pkey for one in snapshot.carried())


def _ours(pkey: int, guid: int) -> bool:
    """Whether vhpcd would give this GUID to a port of that key."""
    return guid >> 32 == PORT_PREFIX << 16 | pkey
