# SPDX-License-Identifier: Apache-2.0
"""Audits: compares what ports carry with what the fabric was told, and has differences repaired."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from vhpc_slurm.controller.sync.batch import BatchLedger, FabricBatches, Submit, as_fabric, call_directly
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import FabricFinding, NetworkBackend
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.model import Generation

log = logging.getLogger("vhpcd")

LOGGED = 20
"""Findings of one audit that are logged."""


class FabricAudit:
    """Audits the fabric in the thread that also runs batches; ``watch`` has the conclusions."""

    def __init__(
        self,
        batches: FabricBatches,
        ledger: BatchLedger,
        network: NetworkBackend,
        watch: IsolationWatch,
        submit: Submit = call_directly,
    ) -> None:
        """``submit`` runs the methods of ``ledger``; ``batches`` repairs."""
        self.watch = watch
        self._batches = batches
        self._ledger = ledger
        self._network = network
        self._submit = submit

    def run(self) -> bool:
        """Compare the fabric with what it was told, log what is wrong, and repair it.

        Port tables are read whatever else fails. Returns whether something was wrong.

        Raises:
            FabricError: a part of the fabric cannot be changed to what it should be.
        """
        trouble = _failure(self._batches.run) if self._batches.told is None else None
        wrong = False
        for attempt in ("found", "still there after a repair"):
            snapshot = self._submit(self._ledger.snapshot).result()
            found = self._findings(snapshot)
            wrong = wrong or bool(found)
            self.watch.saw(found, trouble, _holders(snapshot))
            if not found:
                break
            for one in found[:LOGGED]:
                log.error("the fabric is not as it should be (%s): %s", attempt, one.what)
            if all(one.unread and not one.open for one in found):
                break  # no change makes it readable
            log.error("%d findings: vhpcd tells the fabric again what it should carry", len(found))
            trouble = _failure(partial(self._batches.run, repeat=True))
        if trouble is not None:
            raise trouble
        return wrong

    def _findings(self, snapshot: KeySnapshot) -> tuple[FabricFinding, ...]:
        """Defects of the fabric; an audit that fails has read nothing, so the fabric may be open."""
        try:
            return self._look(snapshot)
        except FabricError as err:
            return (FabricFinding(0, err.line(), unread=True, blind=True),)
        except Exception as err:
            log.exception("internal error")
            return (FabricFinding(0, as_fabric(err).line(), unread=True, blind=True),)

    def _look(self, snapshot: KeySnapshot) -> tuple[FabricFinding, ...]:
        """Defects of the fabric; ``snapshot`` is the newest."""
        told = self._batches.told
        if told is not None:
            return self._network.audit(told)
        # A change was interrupted. Keys that ports lack may not have been set yet; ACTIVE jobs had theirs.
        found, holders = self._network.audit(snapshot, unsure=True), _holders(snapshot)
        return tuple(
            one for one in found if one.open or one.unread or (one.lost and one.port_guid in holders)
        )


def _failure(call: Callable[[], object]) -> FabricError | None:
    try:
        call()
    except FabricError as err:
        return err
    except Exception as err:
        log.exception("internal error")
        return as_fabric(err)
    return None


def _holders(snapshot: KeySnapshot) -> dict[int, Generation]:
    """The generation of each port GUID; only generations whose key was proven once."""
    active = (assignment for assignment in snapshot.carried() if assignment.state is KeyState.ACTIVE)
    return {guid: assignment.generation for assignment in active for guid in assignment.port_guids()}
