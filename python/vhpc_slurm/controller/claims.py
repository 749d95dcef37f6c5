"""How the claims of partition keys follow the leases they belong to.

Whatever a lease does to its claim happens in the transaction in which the lease
is written; a lease without a claim (there is no network, or it was refused)
makes all of it do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys
from vhpc_slurm.fabric.keys import Book, KeyState
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState

if TYPE_CHECKING:
    from vhpc_slurm.controller.store import LeaseStore

log = logging.getLogger("vhpcd")

_FORWARD = (
    KeyState.RESERVED,
    KeyState.APPLIED,
    KeyState.VERIFIED,
    KeyState.ACTIVE,
    KeyState.DRAINING,
    KeyState.STRIPPED,
    KeyState.QUARANTINE,
)


class ClaimKeeper:
    """The claims of all leases."""

    def __init__(self, store: LeaseStore, quarantine_s: float, steady: Callable[[], float]) -> None:
        """``steady`` is a clock that never jumps; downtime of vhpcd shortens no quarantine."""
        self._store = store
        self._quarantine_s = quarantine_s
        self._steady = steady
        self._aged = steady()

    def must_hold(self, record: LeaseRecord) -> Book:
        """The book, with a claim for this lease in it; FabricError when the two do not fit."""
        book = self._store.keys.book()
        lease = record.lease
        claim = book.of(lease.generation)
        if lease.network.kind == "ib" and (claim is None or claim.state not in keys.CARRIED):
            raise FabricError(
                f"lease {lease.generation} has no claim of its key",
                f"the claim is {claim.state if claim else 'absent'}",
                "was the database of vhpcd restored from a copy?",
            )
        return book

    def advance(self, generation: Generation, state: KeyState) -> None:
        """Note that the claim has come as far as ``state``; one that is further stays."""
        claim = self._store.keys.book().of(generation)
        if claim is not None and _FORWARD.index(claim.state) < _FORWARD.index(state):
            with self._store.transaction():
                self._store.keys.update(keys.move(claim, state))

    def activate(self, generation: Generation) -> None:
        """The lease is READY."""
        claim = self._store.keys.book().of(generation)
        if claim is not None:
            self._store.keys.update(keys.move(claim, KeyState.ACTIVE))

    def end(self, record: LeaseRecord) -> None:
        """The lease is ENDING; a tombstone at once where a node has said that it is not clean."""
        claim = self._store.keys.book().of(record.lease.generation)
        if claim is not None:
            self._store.keys.update(keys.end(claim))
            for node, note in record.unclean:
                self.doubt(claim.generation, f"{node}: {note}")

    def doubt(self, generation: Generation, why: str) -> None:
        """Somebody cannot say that nothing is left of an ending generation: nobody else gets its key."""
        claim = self._store.keys.book().of(generation)
        if claim is not None and claim.state is KeyState.DRAINING:
            self._store.keys.update(keys.move(claim, KeyState.TOMBSTONE, note=why[:1000]))
            log.error("%s leaves a tombstone on key %#06x: %s", generation, claim.pkey, why)

    def doubted(self, record: LeaseRecord) -> bool:
        """Whether a tombstone stands, and a node's last word is still that it is not clean."""
        claim = self._store.keys.book().of(record.lease.generation)
        return claim is not None and claim.state is KeyState.TOMBSTONE and bool(record.unclean)

    def strippable(self, generation: Generation) -> bool:
        """Whether the fabric still has to be stripped of a generation that no node holds any more.

        All its nodes have said so by now, which also lifts a tombstone.
        """
        claim = self._store.keys.book().of(generation)
        if claim is None:
            return True
        if claim.state is KeyState.TOMBSTONE:
            with self._store.transaction():
                self._store.keys.update(keys.move(claim, KeyState.DRAINING))
            return True
        return claim.state is KeyState.DRAINING

    def rest(self, generation: Generation) -> None:
        """The lease is RELEASED."""
        claim = self._store.keys.book().of(generation)
        if claim is not None:
            self._store.keys.update(keys.move(claim, KeyState.QUARANTINE, quarantine_s=self._quarantine_s))

    def age(self) -> None:
        """Let the time that has gone by count, and free what has rested long enough."""
        now = self._steady()
        elapsed_s, self._aged = now - self._aged, now
        resting = [one for one in self._store.keys.book().claims if one.state is KeyState.QUARANTINE]
        if not resting:
            return
        with self._store.transaction():
            for claim in resting:
                older = keys.age(claim, elapsed_s)
                if older is None:
                    self._store.keys.free(claim.generation)
                    log.info("key %#06x is free of %s", claim.pkey, claim.generation)
                else:
                    self._store.keys.update(older)

    def bury_orphans(self) -> None:
        """A claim whose lease is not there cannot be judged by anybody: a tombstone."""
        for claim in self._store.keys.book().claims:
            if claim.state in (KeyState.QUARANTINE, KeyState.TOMBSTONE):
                continue
            record = self._store.get(claim.generation)
            if record is None or record.lease.state is LeaseState.RELEASED:
                with self._store.transaction():
                    self._store.keys.update(
                        keys.move(claim, KeyState.TOMBSTONE, note="it has no lease any more")
                    )
                log.error("%s has no lease any more: tombstone on key %#06x", claim.generation, claim.pkey)
