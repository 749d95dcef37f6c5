# SPDX-License-Identifier: Apache-2.0
"""What is done to the fabric: batches of changes, and audits.  One at a time, in a thread of their own.

A batch takes all generations that come and go by then, and costs the fabric
one change::

    RESERVED ─ apply ─> APPLIED ─ verify ─> VERIFIED ─> ACTIVE     (lease READY)
    DRAINING ─ apply ───────────── strip ─> STRIPPED ─> QUARANTINE (lease RELEASED)

Each step is durable before the next begins.  Whoever is killed in between finds
assignments that are behind the fabric, never before it, and does the step again.
The database belongs to another thread: what touches it goes through ``submit``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vhpc_slurm.controller.isolation import IsolationWatch
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import FabricFinding, FabricRefusedError, NetworkBackend, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.model import Generation, LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.lease_transitions import LeaseTransitions

log = logging.getLogger("vhpcd")

Result = TypeVar("Result")
Results = dict[Generation, LeaseRecord | FabricError]


class Submit(Protocol):
    """Has something run where the database may be changed."""

    def __call__(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """What the call returns, or raises, when that is durable."""


def call_directly(call: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """The ``submit`` of whoever has the database to himself."""
    future: Future[Result] = Future()
    future.set_result(call(*arguments))
    return future


class FabricSync:
    """Batches and audits."""

    def __init__(
        self,
        transitions: LeaseTransitions,
        network: NetworkBackend,
        submit: Submit = call_directly,
        *,
        open_deadline_s: float = 60.0,
        unread_deadline_s: float = 300.0,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """A fabric that is open, or cannot be read, for so long is not safe."""
        self.watch = IsolationWatch(open_deadline_s, unread_deadline_s, steady)
        self._transitions = transitions
        self.network = network
        self._submit = submit
        self.changes = 0
        """How often the fabric was told something."""
        self._told: KeySnapshot | None = None
        """What the fabric was told last, and took; None when that is not certain."""

    def run_batch(
        self, coming: Collection[Generation] = (), *, anew: bool = False, force: bool = False
    ) -> Results:
        """Bring those that come to READY and those that go to RELEASED; what became of each.

        ``anew`` tells the fabric also what it was told already, ``force`` also
        what would take keys away that this database does not know.

        Raises:
            FabricError: nothing could be changed; each may be asked for again.
        """
        batch = self._write(self._transitions.begin_batch, coming)
        results: Results = dict(batch.decided)
        snapshot = batch.snapshot
        told = self._told is not None and self._told.carried() == snapshot.carried() and not anew
        if told and not batch.coming and not batch.leaving:
            return results
        self._told = None
        self.changes += 1
        try:
            if anew and not force:
                self.network.repair(snapshot)
            else:
                self.network.apply(snapshot, force=force)
        except FabricRefusedError as err:
            if len(batch.coming) < 2:
                raise
            # One of them is the reason, and the others must not suffer for it.
            log.warning("a batch of %d jobs is split: %s", len(batch.coming), err.line())
            return results | self._split_batch(batch.coming)
        # The disk may write this while the fabric is read; what is proven comes after it.
        applied = self._submit(self._transitions.applied, batch.coming)
        self._told = snapshot
        if batch.coming:
            found = self.network.verify(batch.coming, snapshot)
            results |= self._write(self._transitions.proven, found)
        applied.result()
        if batch.leaving:
            results |= self._write(self._transitions.stripped, self._strip(batch.leaving, snapshot))
        return results

    def _write(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return self._submit(call, *arguments).result()

    def _split_batch(self, coming: tuple[Generation, ...]) -> Results:
        results: Results = {}
        middle = len(coming) // 2
        for part in ((), coming[:middle], coming[middle:]):
            try:
                results |= self.run_batch(part)
            except FabricError as err:
                results |= dict.fromkeys(part, err)
        return results

    def _strip(self, leaving: tuple[Generation, ...], snapshot: KeySnapshot) -> ProofResults:
        try:
            return self.network.strip(leaving, snapshot)
        except FabricError as err:  # whatever came with them is READY all the same
            return dict.fromkeys(leaving, err)

    def audit(self) -> bool:
        """Compare the fabric with what it was told, say what is wrong, and have it put right.

        The ports' tables are read whatever else fails.  Returns whether something was wrong.

        Raises:
            FabricError: a part of the fabric cannot be told what it should be.
        """
        trouble = _failure(self.run_batch) if self._told is None else None
        wrong = False
        for attempt in ("found", "still there after a repair"):
            snapshot, found = self._look()
            wrong = wrong or bool(found)
            self.watch.saw(found, trouble, _holders(snapshot))
            if not found:
                break
            for one in found[:20]:
                log.error("the fabric is not as it should be (%s): %s", attempt, one.what)
            if all(one.unread and not one.open for one in found):
                break  # nothing that could be told would make it readable
            log.error("%d findings: the fabric is told once more what it should be", len(found))
            trouble = _failure(partial(self.run_batch, anew=True))
        if trouble is not None:
            raise trouble
        return wrong

    def _look(self) -> tuple[KeySnapshot, tuple[FabricFinding, ...]]:
        """What the fabric should carry, and what is seen to be wrong."""
        if self._told is not None:
            return self._told, self.network.audit(self._told)
        # A change broke off.  What ports lack may not have been given; but ACTIVE jobs had their keys.
        snapshot = self._write(self._transitions.snapshot)
        found, holders = self.network.audit(snapshot, unsure=True), _holders(snapshot)
        certain = tuple(
            one for one in found if one.open or one.unread or (one.lost and one.port_guid in holders)
        )
        return snapshot, certain


def _failure(call: Callable[[], object]) -> FabricError | None:
    try:
        call()
    except FabricError as err:
        return err
    return None


def _holders(snapshot: KeySnapshot) -> dict[int, Generation]:
    """Whose a port is, by its GUID; only of generations that were told that they have their keys."""
    active = (assignment for assignment in snapshot.carried() if assignment.state is KeyState.ACTIVE)
    return {guid: assignment.generation for assignment in active for guid in assignment.port_guids()}
