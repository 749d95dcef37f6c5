"""The backend ``ufm-rest``: UFM's partitions follow the book of claims.

UFM belongs to the site, so only ports of our own naming (``02cc``, then the key)
on keys of the pool are ever added or taken away.  Others on such a key are left
alone, and no job begins on a key that has one.

A *mark* says which database of vhpcd has changed UFM last: a member of a key of
its own whose GUID is made of epoch and tag.  A database that does not know the
mark was copied back from the past or is another's, and changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import Finding, KeyPolicy, Proof
from vhpc_slurm.fabric.keys import PORT_PREFIX, Book, Claim
from vhpc_slurm.fabric.partitions import Partition
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.ufm_client import UfmBusyError, UfmClient
from vhpc_slurm.model import Allocation, Generation, JobRequest, NetworkIdentity

log = logging.getLogger("vhpcd")

MARK_PREFIX = 0x02CE
"""Upper 16 bits of a mark; no port has such a GUID."""
POLL_S = 0.2
AGAIN_S = 2.0
"""After so long without effect a change that UFM has accepted is asked for once more."""
SHOWN = 3

Members = dict[int, dict[int, bool]]
"""By key, by port GUID: whether it is a full member."""


@dataclass(frozen=True)
class Change:
    """What UFM has to do to one key."""

    pkey: int
    add: tuple[int, ...] = ()
    remove: tuple[int, ...] = ()
    delete: bool = False

    def line(self) -> str:
        """What is still to be done, in words."""
        words = [
            f"lacks {len(self.add)} ports" if self.add else "",
            f"has {len(self.remove)} too many" if self.remove else "",
            "is there without ports" if self.delete else "",
        ]
        return f"{self.pkey:#06x} {' and '.join(word for word in words if word)}"


class UfmRest:
    """Tells UFM, polls it, and reads the fabric where that can be read."""

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
        """``knows`` says whether an epoch was this database's; without ``readback`` UFM's word is all.

        Raises:
            FabricError: the mark's key is one of the pool, or none.
        """
        self._policy = policy
        self._ufm = ufm
        self._readback = readback
        self._knows = knows
        self._mark_pkey = mark_pkey
        self._ipoib = ipoib
        self._timeout_s = timeout_s
        self._max_lost_percent = max_lost_percent
        self._pool = frozenset(policy.pool.numbers())
        if mark_pkey in self._pool:
            raise FabricError(
                f"fabric.ufm_mark_pkey {mark_pkey:#06x} is a key for jobs", "it has to be outside of the pool"
            )

    def validate(self, book: Book) -> None:
        """Whether UFM lets us in, and was changed last by this database."""
        self._ufm.version()
        self._guard(self._ufm.partitions(), book, frozenset())

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, book: Book
    ) -> tuple[NetworkIdentity, Claim | None]:
        """Choose a key."""
        return self._policy.plan(generation, request, allocation, book)

    def apply(self, book: Book, *, force: bool = False) -> None:
        """Have UFM carry what the book carries, and wait until it says so.

        ``force`` takes keys away also where the book seems to have lost them.
        """
        self._bring(book, frozenset(), force=force)

    def verify(self, generation: Generation, book: Book) -> Proof:
        """Read back that the generation's ports have their key in UFM and on the fabric, and nobody else."""
        claim = book.must(generation)
        have = self._ufm.partitions()
        foreign = sorted(guid for guid in have.get(claim.pkey, {}) if not _ours(claim.pkey, guid))
        if foreign:
            raise FabricError(
                f"key {claim.pkey:#06x} of {generation} has a port in UFM that is none of vhpcd's",
                f"the first is {foreign[0]:#018x}",
                "take it out, or name the key in fabric.pkey_reserved",
            )
        for one in self._todo(have, _meant(book)):
            if one.pkey == claim.pkey:
                raise FabricError(f"UFM does not carry the key of {generation}", one.line())
        if self._readback is None:
            return Proof(book.epoch, absent=sum(1 for _ in claim.port_guids()))
        return self._readback.carried(claim, self._partitions(have, book), book)

    def strip(self, generation: Generation, book: Book) -> Proof:
        """Take the generation out of UFM, and read back that no port has its key any more."""
        claim, rest = book.must(generation), book.without(generation)
        have = self._bring(rest, frozenset({claim.pkey}), force=False)
        if self._readback is None:
            return Proof(book.epoch)
        return self._readback.gone(claim, self._partitions(have, rest), book)

    def audit(self, book: Book) -> tuple[Finding, ...]:
        """Compare UFM and the fabric with the book."""
        have = self._ufm.partitions()
        found = [Finding(0, f"UFM: key {one.line()}") for one in self._todo(have, _meant(book))]
        found += [
            Finding(
                guid, f"UFM: port {guid:#018x}, which is none of vhpcd's, is on key {pkey:#06x} of the pool"
            )
            for pkey in sorted(self._pool & have.keys())
            for guid in sorted(have[pkey])
            if not _ours(pkey, guid)
        ]
        if self._readback is not None:
            found += self._readback.findings(self._partitions(have, book))
        return tuple(found)

    def cure(self, book: Book) -> None:
        """Tell UFM once more."""
        self._bring(book, frozenset(), force=False)

    # --- what there is to do --------------------------------------------------------

    def _bring(self, book: Book, leaving: frozenset[int], *, force: bool) -> Members:
        """Have UFM show what is meant; what it shows then.

        Whatever broke off, here or in an earlier life of vhpcd, shows in what UFM
        has, and only the rest is asked for.
        """
        meant = _meant(book)
        asked: dict[int, float] = {}
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                have = self._ufm.partitions()
                if not force:
                    self._guard(have, book, leaving)
                todo = self._todo(have, meant)
                if not todo:
                    self._tidy(have, book)
                    return have
                why = "; ".join(one.line() for one in todo[:SHOWN])
                if _mark(book) not in self._marks(have):
                    self._ufm.add(self._mark_pkey, [_mark(book)], ipoib=False)
                for one in todo:
                    if time.monotonic() - asked.get(one.pkey, -AGAIN_S) >= AGAIN_S:
                        self._change(one)
                        asked[one.pkey] = time.monotonic()
            except UfmBusyError as err:
                why = err.line()
            if time.monotonic() >= deadline:
                raise FabricError(
                    f"UFM did not apply a change within {self._timeout_s:g} s",
                    why,
                    "see UFM's log; fabric.apply_timeout_s is how long it may take",
                )
            time.sleep(POLL_S)

    def _todo(self, have: Members, meant: dict[int, frozenset[int]]) -> list[Change]:
        found = []
        for pkey in sorted((self._pool & have.keys()) | meant.keys()):
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

    def _change(self, one: Change) -> None:
        if one.remove:
            self._ufm.remove(one.pkey, list(one.remove))
        if one.add:
            self._ufm.add(one.pkey, list(one.add), ipoib=self._ipoib)
        if one.delete:
            self._ufm.delete(one.pkey)

    def _partitions(self, have: Members, book: Book) -> tuple[Partition, ...]:
        """What ports should have: our claims, and all else that UFM has."""
        ours = partitions.of_book(book, ipoib=self._ipoib)
        known = {one.pkey for one in ours}
        others = (
            Partition(
                f"ufm_{pkey:04x}", pkey, tuple((f"{guid:#018x}", full) for guid, full in members.items())
            )
            for pkey, members in have.items()
            if pkey not in known and pkey not in self._pool
        )
        return (*ours, *others)

    # --- whose UFM it is -------------------------------------------------------------

    def _guard(self, have: Members, book: Book, leaving: frozenset[int]) -> None:
        """FabricError when this book may not be the one that the keys in UFM came from."""
        ours = {pkey for pkey in self._pool & have.keys() if any(_ours(pkey, guid) for guid in have[pkey])}
        marks = self._marks(have)
        if not marks:
            if ours:
                raise FabricError(
                    f"UFM has {len(ours)} keys of jobs, and no mark of a database of vhpcd",
                    f"the first is {min(ours):#06x}; the mark belongs on key {self._mark_pkey:#06x}",
                    "when no job with guests is left, delete these keys in UFM",
                )
            return
        origins = [self._origin(mark, book) for mark in marks]
        if None in origins:
            raise FabricError(
                "UFM was not changed last by this database of vhpcd",
                f"it has the mark {marks[origins.index(None)]:#018x} on key {self._mark_pkey:#06x}",
                "was the database restored from a copy? when no job with guests is left, "
                "delete that key and those of jobs in UFM",
            )
        since = min(origin for origin in origins if origin is not None)
        known = {one.pkey for one in book.claims} | leaving
        known |= {pkey for pkey, freed in book.freed.items() if freed > since}
        lost = ours - known
        if lost and (len(lost) * 100 > self._max_lost_percent * len(ours) or not book.claims):
            raise FabricError(
                f"vhpcd does not know {len(lost)} keys of jobs in UFM",
                f"the first is {min(lost):#06x}; to take them away would take them from their jobs",
                "is the database damaged? see fabric.max_lost_percent in vhpc.toml(5)",
            )

    def _marks(self, have: Members) -> list[int]:
        return sorted(guid for guid in have.get(self._mark_pkey, {}) if guid >> 48 == MARK_PREFIX)

    def _origin(self, mark: int, book: Book) -> int | None:
        """The epoch of a mark, which has only its lower 16 bits; None when it was another database's."""
        low, tag = mark >> 32 & 0xFFFF, f"{mark & 0xFFFFFFFF:08x}"
        newest = book.epoch - (book.epoch - low) % (1 << 16)
        for epoch in (newest, newest - (1 << 16)):
            if epoch >= 0 and self._knows(epoch, tag):
                return epoch
        return None

    def _tidy(self, have: Members, book: Book) -> None:
        """Take away older marks, once UFM shows ours: whatever breaks off, one is left, and it is ours."""
        marks = self._marks(have)
        stale = [one for one in marks if one != _mark(book)]
        if stale and len(stale) < len(marks):
            self._ufm.remove(self._mark_pkey, stale)


def _mark(book: Book) -> int:
    return MARK_PREFIX << 48 | (book.epoch & 0xFFFF) << 32 | int(book.tag or "0", 16) & 0xFFFFFFFF


def _meant(book: Book) -> dict[int, frozenset[int]]:
    found: dict[int, frozenset[int]] = {}
    for claim in book.carried():
        found[claim.pkey] = found.get(claim.pkey, frozenset()) | frozenset(claim.port_guids())
    return found


def _ours(pkey: int, guid: int) -> bool:
    """Whether a port's GUID is one that we would give to a port of that key."""
    return guid >> 32 == PORT_PREFIX << 16 | pkey
