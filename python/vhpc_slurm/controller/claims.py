"""How the claims of partition keys follow the leases they belong to.

Whatever a lease does to its claim happens in the transaction in which the lease
is written; a lease without a claim (there is no network, or it was refused)
makes all of it do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.store import LeaseStore

log = logging.getLogger("vhpcd")

STRIPPABLE = (KeyState.DRAINING, KeyState.TOMBSTONE)
_BEFORE = {
    KeyState.APPLIED: (KeyState.RESERVED,),
    KeyState.VERIFIED: (KeyState.APPLIED,),
    KeyState.STRIPPED: STRIPPABLE,
}


_MAY_BE_UNCLEAN = (KeyState.DRAINING, KeyState.STRIPPED, KeyState.QUARANTINE)


class ClaimKeeper:
    """The claims of all leases."""

    def __init__(self, store: LeaseStore, quarantine_s: float, steady: Callable[[], float]) -> None:
        """``steady`` is a clock that never jumps; downtime of vhpcd shortens no quarantine."""
        self._store = store
        self._quarantine_s = quarantine_s
        self._steady = steady
        self._aged = steady()

    def wants_fabric(self, record: LeaseRecord) -> bool:
        """Whether the fabric has to be told before this lease can be READY."""
        return record.lease.network.kind != "none"

    def must_hold(self, record: LeaseRecord) -> None:
        """FabricError when there is no claim for this lease that the fabric could carry."""
        lease = record.lease
        claim = self._store.keys.book().of(lease.generation)
        if claim is None or claim.state not in keys.CARRIED:
            raise FabricError(
                f"lease {lease.generation} has no claim of its key",
                f"the claim is {claim.state if claim else 'absent'}",
                "was the database of vhpcd restored from a copy?",
            )

    def advance(self, generations: Collection[Generation], state: KeyState) -> None:
        """Note that these claims have come to ``state``; what is not just before it stays as it is.

        (One may have ended, or got a tombstone, while the fabric was at work.)
        """
        book = self._store.keys.book()
        claims = [claim for claim in map(book.of, generations) if claim and claim.state in _BEFORE[state]]
        if claims:
            with self._store.transaction():
                self._store.keys.update([keys.move(claim, state) for claim in claims])

    def activate(self, generations: Collection[Generation]) -> None:
        """The leases are READY."""
        book = self._store.keys.book()
        claims = [claim for claim in map(book.of, generations) if claim]
        self._store.keys.update([keys.move(claim, KeyState.ACTIVE) for claim in claims])

    def end(self, record: LeaseRecord) -> None:
        """The lease is ENDING; a tombstone at once where a node has said that it is not clean."""
        claim = self._store.keys.book().of(record.lease.generation)
        if claim is not None:
            self._store.keys.update([keys.end(claim)])
            for node, note in record.unclean:
                self.write_tombstone(claim.generation, f"{node}: {note}")

    def write_tombstone(self, generation: Generation, why: str) -> None:
        """Somebody cannot say that nothing is left of an ending generation: nobody else gets its key."""
        claim = self._store.keys.book().of(generation)
        if claim is not None and claim.state in _MAY_BE_UNCLEAN:
            self._store.keys.update([keys.move(claim, KeyState.TOMBSTONE, note=why[:1000])])
            log.error("%s leaves a tombstone on key %s: %s", generation, numbers.label(claim.pkey), why)

    def has_tombstone(self, generation: Generation) -> bool:
        """Whether a generation has left one."""
        claim = self._store.keys.book().of(generation)
        return claim is not None and claim.state is KeyState.TOMBSTONE

    def has_unclean_tombstone(self, record: LeaseRecord) -> bool:
        """Whether a tombstone stands, and a node's last word is still that it is not clean."""
        claim = self._store.keys.book().of(record.lease.generation)
        return claim is not None and claim.state is KeyState.TOMBSTONE and bool(record.unclean)

    def strippable(self, generation: Generation) -> bool:
        """Whether the fabric has to be stripped of a generation that no node holds any more.

        (All its nodes have said so by now, so a tombstone goes the same way.)
        """
        claim = self._store.keys.book().of(generation)
        return claim is not None and claim.state in STRIPPABLE

    def quarantine(self, generation: Generation) -> bool:
        """The lease is to be RELEASED; False when its claim is not so far."""
        claim = self._store.keys.book().of(generation)
        if claim is not None:
            if claim.state is not KeyState.STRIPPED:
                return False
            resting = keys.move(claim, KeyState.QUARANTINE, quarantine_s=self._quarantine_s)
            self._store.keys.update([resting])
        return True

    def age(self) -> None:
        """Let the time that has gone by count, and free what has rested long enough."""
        now = self._steady()
        elapsed_s, self._aged = now - self._aged, now
        resting = [one for one in self._store.keys.book().claims if one.state is KeyState.QUARANTINE]
        if not resting:
            return
        older = [keys.age(claim, elapsed_s) for claim in resting]
        over = [claim for claim, one in zip(resting, older, strict=True) if one is None]
        with self._store.transaction():
            self._store.keys.update([one for one in older if one is not None])
            self._store.keys.free([claim.generation for claim in over])
        for claim in over:
            log.info("key %s is free of %s", numbers.label(claim.pkey), claim.generation)

    def write_orphan_tombstones(self) -> None:
        """A claim whose lease is not there cannot be judged by anybody: a tombstone."""
        live = self._store.states()
        for claim in self._store.keys.book().claims:
            if claim.state in (KeyState.QUARANTINE, KeyState.TOMBSTONE):
                continue
            if claim.generation not in live:
                with self._store.transaction():
                    self._store.keys.update(
                        [keys.move(claim, KeyState.TOMBSTONE, note="it has no lease any more")]
                    )
                log.error(
                    "%s has no lease any more: tombstone on key %s",
                    claim.generation,
                    numbers.label(claim.pkey),
                )
