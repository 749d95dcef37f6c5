# SPDX-License-Identifier: Apache-2.0
"""The work of a fabric batch, and the effect of its results on leases: the ledger of ``controller.sync``."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.transitions import Applied, Proven
from vhpc_slurm.controller.sync.batch import Batch, Results
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore
    from vhpc_slurm.fabric.backend import ProofResults

log = logging.getLogger("vhpcd")


class LeaseBatches:
    """A ``BatchLedger``; for the database thread only."""

    def __init__(self, store: LeaseStore, lifecycle: Lifecycle) -> None:
        self._store = store
        self._lifecycle = lifecycle

    def snapshot(self) -> KeySnapshot:
        """All key assignments; no port may have a key that is not among them."""
        return self._store.keys.snapshot()

    def begin_batch(self, coming: Collection[Generation] = ()) -> Batch:
        """The batch that makes these generations ready and strips the fabric of all that may leave."""
        decided: Results = {}
        mine = []
        for generation in coming:
            record = self._store.get(generation)
            if record is None or record.lease.state not in rules.USABLE:
                decided[generation] = _over(generation)
            elif record.lease.state is not LeaseState.RESERVED:
                decided[generation] = record
            elif (why := self._lacks_key(generation)) is not None:
                decided[generation] = why
            else:
                mine.append(generation)
        leaving = self._lifecycle.leaving()
        snapshot = self._store.keys.snapshot()
        waiting = {one.generation for one in snapshot.assignments if one.state is KeyState.RESERVED}
        return Batch(snapshot.without({*leaving, *waiting.difference(mine)}), tuple(mine), leaving, decided)

    def _lacks_key(self, generation: Generation) -> FabricError | None:
        assignment = self._store.keys.snapshot().of(generation)
        if assignment is not None and assignment.state in keys.CARRIED:
            return None
        return FabricError(
            f"lease {generation} has no assignment of its key",
            f"the assignment is {assignment.state if assignment else 'absent'}",
            "was the database of vhpcd restored from a copy?",
        )

    def applied(self, coming: Collection[Generation]) -> None:
        """The fabric has accepted the configuration with the keys of these generations."""
        self._lifecycle.apply(coming, Applied())

    def proven(self, found: ProofResults) -> Results:
        """Generations were read back: those without an error become READY, unless they ended meanwhile."""
        results: Results = {
            generation: one for generation, one in found.items() if isinstance(one, FabricError)
        }
        proven = [generation for generation in found if generation not in results]
        for generation, held in self._lifecycle.apply(proven, Proven()).items():
            if held.record is None or held.state is not LeaseState.READY:
                results[generation] = _over(generation)
            else:
                results[generation] = held.record
                log.info("%s ready; %s", generation, found[generation])
        return results

    def stripped(self, found: ProofResults) -> Results:
        """Generations were looked for: those that are gone are released. Returns the errors of the others."""
        stay: dict[Generation, LeaseRecord | FabricError] = {
            generation: why for generation, why in found.items() if isinstance(why, FabricError)
        }
        for generation, why in stay.items():
            if isinstance(why, FabricError):
                log.error("%s is not released, its network is still there: %s", generation, why.line())
        self._lifecycle.stripped([generation for generation in found if generation not in stay])
        return stay


def _over(generation: Generation) -> FabricError:
    return FabricError(f"lease {generation} is over", "the job has ended or was requeued")
