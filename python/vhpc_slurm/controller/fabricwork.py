"""What is done to the fabric: rounds of changes, and audits.  One at a time, in a thread of their own.

A round takes all generations that come and go by then, and costs the fabric
one change::

    RESERVED ─ apply ─> APPLIED ─ verify ─> VERIFIED ─> ACTIVE     (lease READY)
    DRAINING ─ apply ───────────── strip ─> STRIPPED ─> QUARANTINE (lease RELEASED)

Each step is durable before the next begins.  Whoever is killed in between finds
claims that are behind the fabric, never before it, and does the step again.
The database belongs to another thread: what touches it goes through ``write``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import NetworkBackend, Outcomes, RefusedError
from vhpc_slurm.fabric.keys import Book
from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.service import LeaseService

log = logging.getLogger("vhpcd")

Result = TypeVar("Result")
Results = dict[Generation, LeaseRecord | FabricError]


class Write(Protocol):
    """Runs something where the database may be changed, and waits for it."""

    def __call__(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """What the call returns, or raises."""


def here(call: Callable[..., Result], *arguments: Any) -> Result:
    """The ``write`` of whoever has the database to himself."""
    return call(*arguments)


class FabricWork:
    """Rounds and audits."""

    def __init__(self, service: LeaseService, network: NetworkBackend, write: Write = here) -> None:
        self._service = service
        self._network = network
        self._write = write
        self._told: Book | None = None
        """What the fabric was told last, and took; None when that is not certain."""

    def round(self, coming: Collection[Generation] = (), *, force: bool = False) -> Results:
        """Bring those that come to READY and those that go to RELEASED; what became of those that come.

        Raises:
            FabricError: nothing could be changed; each may be asked for again.
        """
        begun = self._write(self._service.begin_round, coming)
        results = dict(begun.decided)
        book = begun.book
        unchanged = self._told is not None and self._told.carried() == book.carried()
        if not begun.coming and not begun.leaving and unchanged and not force:
            return results
        self._told = None
        try:
            self._network.apply(book, force=force)
        except RefusedError as err:
            if len(begun.coming) < 2:
                raise
            # One of them is the reason, and the others must not suffer for it.
            log.warning("a round of %d jobs is taken apart: %s", len(begun.coming), err.line())
            return results | self._apart(begun.coming)
        self._write(self._service.applied, begun.coming)
        self._told = book
        if begun.coming:
            found = self._network.verify(begun.coming, book)
            results |= self._write(self._service.proven, found)
        if begun.leaving:
            self._strip(begun.leaving, book)
        return results

    def _apart(self, coming: tuple[Generation, ...]) -> Results:
        results: Results = {}
        middle = len(coming) // 2
        for part in ((), coming[:middle], coming[middle:]):
            try:
                results |= self.round(part)
            except FabricError as err:
                results |= dict.fromkeys(part, err)
        return results

    def _strip(self, leaving: tuple[Generation, ...], book: Book) -> None:
        try:
            found: Outcomes = self._network.strip(leaving, book)
        except FabricError as err:
            log.error("%d generations stay, nobody can see that they are gone: %s", len(leaving), err.line())
            return
        self._write(self._service.stripped, found)

    def audit(self) -> None:
        """Compare the fabric with what it was told, say what is wrong, and have it put right.

        Raises:
            FabricError: the fabric cannot be read, or not be put right.
        """
        if self._told is None:
            self.round()
        if self._told is None:
            return
        found = self._network.audit(self._told)
        if not found:
            return
        for one in found[:20]:
            log.error("the fabric is not as it should be: %s", one.what)
        book = self._write(self._service.begin_round, ()).book
        self._told = None
        self._network.cure(book)
        self._told = book
        log.error("%d findings on the fabric: it was told once more what it should be", len(found))
