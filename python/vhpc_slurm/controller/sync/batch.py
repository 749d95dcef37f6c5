# SPDX-License-Identifier: Apache-2.0
"""One batch of changes to the fabric: told once, read back, and durable step by step.

A batch contains all generations that wait for their keys and all that wait for
their release, and costs the fabric one change::

    begin_batch ─> apply ─> applied ─> verify ─> proven     (RESERVED ─> APPLIED ─> ACTIVE)
                                   └─> strip ──> stripped   (DRAINING ─> QUARANTINE)

``apply``, ``verify`` and ``strip`` are calls of the network backend, the others are
calls of a ``BatchLedger``, each durable before the next backend call that depends on
it. After a crash the database is therefore behind the fabric, never ahead of it, and
the next batch repeats the step.
"""
# Decision: Many starts, one sweep

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.fabric.backend import FabricRefusedError, NetworkBackend, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.model import Generation, LeaseRecord

log = logging.getLogger("vhpcd")

Result = TypeVar("Result")
Results = dict[Generation, LeaseRecord | FabricError]


@dataclass(frozen=True)
class Batch:
    """The work of one batch.

    Attributes:
        snapshot: the keys that the fabric must have after this batch.
        coming: generations that must become READY.
        leaving: generations whose key must be removed from all ports.
        decided: generations that were asked for and need no work, each with its lease or with the reason
            why it gets none.
    """

    snapshot: KeySnapshot
    coming: tuple[Generation, ...]
    leaving: tuple[Generation, ...]
    decided: Results


class BatchLedger(Protocol):
    """Records what a batch has done; each method runs in the database thread, in one transaction."""

    def snapshot(self) -> KeySnapshot:
        """All key assignments."""

    def begin_batch(self, coming: Collection[Generation] = ()) -> Batch:
        """The batch that makes these generations ready and strips all that may leave."""

    def applied(self, coming: Collection[Generation]) -> None:
        """The fabric has accepted the configuration with the keys of these generations."""

    def proven(self, found: ProofResults) -> Results:
        """Generations were read back: those without an error become READY."""

    def stripped(self, found: ProofResults) -> Results:
        """Generations were looked for: those that are gone are released. Returns the errors of the others."""


class Submit(Protocol):
    """Has a call run in the database thread."""

    def __call__(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """A future with what the call returns or raises, completed when that is durable."""


def call_directly(call: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """A ``Submit`` for a process whose only thread is the database thread."""
    future: Future[Result] = Future()
    future.set_result(call(*arguments))
    return future


class FabricBatches:
    """Runs batches, one at a time, in one thread."""

    def __init__(self, ledger: BatchLedger, network: NetworkBackend, submit: Submit = call_directly) -> None:
        """``submit`` runs the methods of ``ledger``."""
        self._ledger = ledger
        self._network = network
        self._submit = submit
        self._told: KeySnapshot | None = None
        self._changes = 0

    @property
    def told(self) -> KeySnapshot | None:
        """The keys that the fabric last accepted; None if that is uncertain."""
        return self._told

    @property
    def changes(self) -> int:
        """How often the fabric was told something."""
        return self._changes

    def run(
        self, coming: Collection[Generation] = (), *, repeat: bool = False, force: bool = False
    ) -> Results:
        """Make generations ready, and release those that may leave.

        Args:
            coming: generations that must become READY.
            repeat: tell the fabric also keys that it has accepted already.
            force: tell the fabric also what would remove keys that this database does not know.

        Returns:
            For each generation its lease, or the reason why it did not get there.

        Raises:
            FabricError: no generation got there; the caller may try again.
        """
        batch = self._write(self._ledger.begin_batch, coming)
        results: Results = dict(batch.decided)
        try:
            self._carry_out(batch, results, repeat=repeat, force=force)
        except Exception as err:
            if not results:
                raise
            # Those that have an answer keep it: they are READY, and durable.
            if isinstance(err, FabricError):
                log.error("the fabric was not changed or read: %s", err.line())
            else:
                log.exception("internal error")
            why = as_fabric(err)
            for generation in batch.coming:
                results.setdefault(generation, why)
        return results

    def _carry_out(self, batch: Batch, results: Results, *, repeat: bool, force: bool) -> None:
        """Do the work of a batch; each answer is in ``results`` as soon as it is durable."""
        snapshot = batch.snapshot
        told = self._told is not None and self._told.carries_the_same(snapshot) and not repeat
        if told and not batch.coming and not batch.leaving:
            return
        self._told = None
        self._changes += 1
        try:
            if repeat and not force:
                self._network.repair(snapshot)
            else:
                self._network.apply(snapshot, force=force)
        except FabricRefusedError as err:
            if len(batch.coming) < 2:
                raise
            # One of them is the cause; the others must not fail with it.
            log.warning(
                "the fabric refused a batch of %d jobs, it is split: %s", len(batch.coming), err.line()
            )
            results |= self._split(batch.coming)
            return
        # The disk writes this while the fabric is read; ``proven`` is queued after it.
        applied = self._submit(self._ledger.applied, batch.coming)
        self._told = snapshot
        if batch.coming:
            found = _each(self._network.verify, batch.coming, snapshot)
            results |= self._write(self._ledger.proven, found)
        applied.result()
        if batch.leaving:
            results |= self._write(self._ledger.stripped, self._strip(batch.leaving, snapshot))

    def _write(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return self._submit(call, *arguments).result()

    def _split(self, coming: tuple[Generation, ...]) -> Results:
        results: Results = {}
        middle = len(coming) // 2
        for part in ((), coming[:middle], coming[middle:]):
            try:
                results |= self.run(part)
            except FabricError as err:
                results |= dict.fromkeys(part, err)
            except Exception as err:
                log.exception("internal error")
                results |= dict.fromkeys(part, as_fabric(err))
        return results

    def _strip(self, leaving: tuple[Generation, ...], snapshot: KeySnapshot) -> ProofResults:
        try:
            return _each(self._network.strip, leaving, snapshot)
        except FabricError as err:  # the generations that came in this batch stay READY
            return dict.fromkeys(leaving, err)


def as_fabric(err: Exception) -> FabricError:
    """Any error as one that a request can be answered with."""
    if isinstance(err, FabricError):
        return err
    if isinstance(err, VhpcError):
        return FabricError(err.what, err.why, err.hint)
    return FabricError("vhpcd failed", f"internal error: {err!r}", "see the log of vhpcd")


def _each(
    call: Callable[[Collection[Generation], KeySnapshot], ProofResults],
    generations: tuple[Generation, ...],
    snapshot: KeySnapshot,
) -> ProofResults:
    """The results of ``call``; an unexpected error about one generation does not concern the others.

    Raises:
        FabricError: the fabric cannot be read at all.
    """
    try:
        return call(generations, snapshot)
    except FabricError:
        raise
    except Exception as err:
        if len(generations) == 1:
            log.exception("internal error: %s", generations[0])
            return {generations[0]: as_fabric(err)}
        log.warning("internal error in a batch of %d jobs, it is split: %r", len(generations), err)
    results: ProofResults = {}
    for one in generations:
        results |= _each(call, (one,), snapshot)
    return results
