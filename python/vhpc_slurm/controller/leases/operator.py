# SPDX-License-Identifier: Apache-2.0
"""Decisions of operators about generations: a node is off, a tombstone may be cleared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import Generation

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")


class OperatorActions:
    """``vhpc fabric fence`` and ``vhpc fabric clear``; for the database thread only."""

    def __init__(self, store: LeaseStore, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self._store = store
        self._lifecycle = lifecycle
        self._clock = clock

    def fence(self, node: str, by_uid: int) -> tuple[list[Generation], list[Generation]]:
        """The node is off: ended generations wait for it no longer.

        Returns them, and the generations whose jobs still use the node: these have to end first.

        Raises:
            UserError: no generation waits for that node or uses it.
        """
        fenced, in_use = [], []
        assignments = self._store.keys.snapshot().assignments
        with_tombstone = [
            self._store.get(one.generation) for one in assignments if one.state is KeyState.TOMBSTONE
        ]
        records = {
            one.lease.generation: one for one in (*with_tombstone, *self._store.live()) if one is not None
        }
        for generation, record in sorted(records.items()):
            if record.lease.state in rules.USABLE and node in rules.holders(record):
                in_use.append(generation)
            elif node in rules.holders(record) or node in dict(record.unclean):
                fenced.append(generation)
        if not fenced and not in_use:
            raise UserError(
                f"no job that has ended waits for node {node[:80]}", "", "see: vhpc ps, vhpc fabric ls"
            )
        with self._store.transaction():
            for generation in fenced:
                note = f"fenced by uid {by_uid}"
                self._store.acknowledge(generation, node, clean=True, note=note, now=self._clock())
        for generation in fenced:
            log.warning("%s: uid %d declares node %s off", generation, by_uid, node)
            self._lifecycle.release(generation)
        return fenced, in_use

    def clear(self, generations: Collection[Generation], by_uid: int) -> None:
        """Tombstones may be removed; the next batch checks that the fabric has nothing of them.

        Raises:
            UserError: a generation has no tombstone, or one of its nodes still holds it.
        """
        for generation in generations:
            held = self._lifecycle.holding(generation)
            if held.key_state is not KeyState.TOMBSTONE:
                raise UserError(f"{generation} has no tombstone", "", "see: vhpc fabric ls")
            record = held.record
            nodes = sorted({*rules.holders(record), *dict(record.unclean)}) if record else []
            if nodes:
                raise UserError(
                    f"{generation} may still run on {' '.join(nodes)}",
                    "the node has not reported that it is clean",
                    f"run vhpc reconcile there, or when it is off: vhpc fabric fence {nodes[0]}",
                )
        for generation in generations:
            log.warning("%s: uid %d clears its tombstone", generation, by_uid)
            self._lifecycle.leave(generation)

    def keep(self, generations: Collection[Generation]) -> None:
        """Take back ``clear`` for tombstones that could not be removed."""
        self._lifecycle.stay(generations)
