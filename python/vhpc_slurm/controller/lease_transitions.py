# SPDX-License-Identifier: Apache-2.0
"""What leases and the fabric have to do with each other: who comes, who goes, and who may go.

Like the service it belongs to, this is for the thread of the database alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vhpc_slurm.controller import leases
from vhpc_slurm.controller.key_lifecycle import STRIPPABLE, KeyLifecycle
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState

if TYPE_CHECKING:
    from vhpc_slurm.controller.store import LeaseStore
    from vhpc_slurm.fabric.backend import ProofResults

log = logging.getLogger("vhpcd")


@dataclass(frozen=True)
class Batch:
    """What a batch of the fabric is about.

    Attributes:
        snapshot: what the fabric shall carry, and what not (any more, or yet).
        coming: generations that shall be READY.
        leaving: generations that shall be RELEASED.
        decided: those of which there is nothing to be done, with what they are, or why not.
    """

    snapshot: KeySnapshot
    coming: tuple[Generation, ...]
    leaving: tuple[Generation, ...]
    decided: dict[Generation, LeaseRecord | FabricError]


class LeaseTransitions:
    """The way of leases to READY and to RELEASED.

    ``leaving`` are generations that no node holds any more, and of which the
    fabric has to be stripped before they are released.
    """

    def __init__(
        self,
        store: LeaseStore,
        keys: KeyLifecycle,
        *,
        lost_after_s: float,
        clock: Callable[[], float],
        steady: Callable[[], float],
    ) -> None:
        """Times in seconds, of the wall's clock and of one that never jumps."""
        self.store = store
        self.leaving: set[Generation] = set()
        self._keys = keys
        self._clock = clock
        self._steady = steady
        self._lost_after_s = lost_after_s
        self._ending: dict[Generation, float] = {}

    def settle(self) -> None:
        """Release what a crash kept from being released; write tombstones for what waits for a lost node."""
        ending = self.store.ending()
        for record in ending:
            if leases.releasable(record):
                self.release(record.lease.generation)
        self._write_lost_tombstones(ending)
        self._keys.age()
        self._keys.write_orphan_tombstones()

    def _write_lost_tombstones(self, ending: tuple[LeaseRecord, ...]) -> None:
        """Tombstones for keys that somebody may still use; time counts while vhpcd lives."""
        now = self._steady()
        self._ending = {
            record.lease.generation: self._ending.get(record.lease.generation, now) for record in ending
        }
        for record in ending:
            generation = record.lease.generation
            silent = sorted(leases.holders(record))
            if silent and now - self._ending[generation] >= self._lost_after_s:
                with self.store.transaction():
                    self._keys.write_tombstone(
                        generation, f"{' '.join(silent)} did not acknowledge within {self._lost_after_s:g} s"
                    )

    def fence(self, node: str, by_uid: int) -> tuple[list[Generation], list[Generation]]:
        """A node is off, says an operator: ended generations wait for it no more.

        Returns them, and those whose jobs still have the node: they end first.

        Raises:
            UserError: no generation has anything to do with that node.
        """
        fenced, in_use = [], []
        assignments = self.store.keys.snapshot().assignments
        with_tombstone = [
            self.store.get(one.generation) for one in assignments if one.state is KeyState.TOMBSTONE
        ]
        records = {
            one.lease.generation: one for one in (*with_tombstone, *self.store.live()) if one is not None
        }
        for generation, record in sorted(records.items()):
            if record.lease.state in leases.USABLE and node in leases.holders(record):
                in_use.append(generation)
            elif node in leases.holders(record) or node in dict(record.unclean):
                fenced.append(generation)
        if not fenced and not in_use:
            raise UserError(
                f"no job that has ended waits for node {node[:80]}", "", "see: vhpc ps, vhpc fabric ls"
            )
        with self.store.transaction():
            for generation in fenced:
                note = f"fenced by uid {by_uid}"
                self.store.acknowledge(generation, node, clean=True, note=note, now=self._clock())
        for generation in fenced:
            log.warning("%s: node %s is off, says uid %d", generation, node, by_uid)
            self.release(generation)
        return fenced, in_use

    def clear(self, generations: Collection[Generation], by_uid: int) -> None:
        """Tombstones may go, says an operator; the next batch looks whether the fabric agrees.

        Raises:
            UserError: a generation has none, or one of its nodes has not let go of it.
        """
        for generation in generations:
            if not self._keys.has_tombstone(generation):
                raise UserError(f"{generation} has no tombstone", "", "see: vhpc fabric ls")
            record = self.store.get(generation)
            held = sorted({*leases.holders(record), *dict(record.unclean)}) if record else []
            if held:
                raise UserError(
                    f"{generation} may still run on {' '.join(held)}",
                    "the node has not said that it is clean",
                    f"run vhpc reconcile there, or when it is off: vhpc fabric fence {held[0]}",
                )
        for generation in generations:
            log.warning("%s: its tombstone may go, says uid %d", generation, by_uid)
            self.leaving.add(generation)

    def snapshot(self) -> KeySnapshot:
        """All assignments: no port may have a key of any other."""
        return self.store.keys.snapshot()

    def begin_batch(self, coming: Collection[Generation] = ()) -> Batch:
        """What the fabric shall carry, so that these come and whatever is to leave does."""
        decided: dict[Generation, LeaseRecord | FabricError] = {}
        mine = []
        for generation in coming:
            record = self.store.get(generation)
            if record is None or record.lease.state not in leases.USABLE:
                decided[generation] = _over(generation)
            elif record.lease.state is not LeaseState.RESERVED:
                decided[generation] = record
            else:
                try:
                    self._keys.must_hold(record)
                    mine.append(generation)
                except FabricError as err:
                    decided[generation] = err
        snapshot = self.store.keys.snapshot()
        self.leaving &= {one.generation for one in snapshot.assignments if one.state in STRIPPABLE}
        leaving = tuple(sorted(self.leaving))
        waiting = {one.generation for one in snapshot.assignments if one.state is KeyState.RESERVED}
        return Batch(snapshot.without({*leaving, *waiting.difference(mine)}), tuple(mine), leaving, decided)

    def applied(self, coming: Collection[Generation]) -> None:
        """The fabric has taken what it was told."""
        self._keys.advance(coming, KeyState.APPLIED)

    def proven(self, found: ProofResults) -> dict[Generation, LeaseRecord | FabricError]:
        """What was read back of those that come; they are READY where it is as it should be."""
        results: dict[Generation, LeaseRecord | FabricError] = {
            generation: one for generation, one in found.items() if isinstance(one, FabricError)
        }
        proven = [generation for generation in found if generation not in results]
        records = []
        for generation in proven:
            record = self.store.get(generation)
            if record is None or record.lease.state is not LeaseState.RESERVED:
                results[generation] = _over(generation)  # ended while the fabric was read
            else:
                records.append(record)
        with self.store.transaction():  # nothing happens outside between the two
            self._keys.advance(proven, KeyState.VERIFIED)
            ready = self.ready(records)
        results |= {record.lease.generation: record for record in ready}
        for generation in (record.lease.generation for record in records):
            log.info("%s ready; %s", generation, found[generation])
        return results

    def stripped(self, found: ProofResults) -> dict[Generation, LeaseRecord | FabricError]:
        """What was read back of those that leave; they are RELEASED where nothing is left of them.

        Returns why others are not.
        """
        for generation, why in found.items():
            if isinstance(why, FabricError):
                log.error("%s stays, its network is still there: %s", generation, why.line())
        gone = [
            generation
            for generation, one in found.items()
            if not isinstance(one, FabricError)
            and ((record := self.store.get(generation)) is None or self._all_nodes_clean(record))
        ]
        with self.store.transaction():
            self._keys.advance(gone, KeyState.STRIPPED)
            self._free(gone)
        return {generation: why for generation, why in found.items() if isinstance(why, FabricError)}

    def ready(self, records: list[LeaseRecord]) -> list[LeaseRecord]:
        """Nothing is missing of these leases any more."""
        now = self._clock()
        ready = [leases.move(record, LeaseState.READY, now) for record in records]
        with self.store.transaction():
            for record in ready:
                self.store.put(record)
            self._keys.activate([record.lease.generation for record in ready])
        return ready

    def release(self, generation: Generation) -> None:
        """Let the fabric be stripped of a generation, or release it, where nothing holds it back."""
        record = self.store.get(generation)
        if record is None or not self._all_nodes_clean(record):
            return
        if self._keys.strippable(generation):
            self.leaving.add(generation)
        elif record.lease.state is LeaseState.ENDING:
            self._free([generation])

    def _all_nodes_clean(self, record: LeaseRecord) -> bool:
        """Whether all nodes of an ended generation have let go of it.

        (One that was released can be held again: a node that was taken for off says that it is not.)
        """
        if record.lease.state is LeaseState.RELEASED:
            return not record.unclean
        return leases.releasable(record) and not self._keys.has_unclean_tombstone(record)

    def _free(self, gone: Collection[Generation]) -> None:
        """Nothing is left of these on the fabric."""
        self._keys.age()  # or the time before this quarantine would count for it
        now = self._clock()
        with self.store.transaction():
            for generation in gone:
                record = self.store.get(generation)
                if record is not None and not self._all_nodes_clean(record):
                    continue
                if not self._keys.quarantine(generation) or record is None:
                    continue
                if record.lease.state is LeaseState.ENDING:
                    self.store.put(leases.move(record, LeaseState.RELEASED, now))
                    log.info("%s released", generation)
        self.leaving.difference_update(gone)


def _over(generation: Generation) -> FabricError:
    return FabricError(f"lease {generation} is over", "the job has ended or was requeued")
