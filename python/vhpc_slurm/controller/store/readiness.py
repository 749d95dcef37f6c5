# SPDX-License-Identifier: Apache-2.0
"""The store of what nodes report to the ready barrier: one row for each node of a generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.controller.wire_types import NodeFailure, NodeState
from vhpc_slurm.model import Generation


class ReadinessStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    def report(
        self, generation: Generation, node: str, state: NodeState, kind: str = "", line: str = ""
    ) -> None:
        """Store a node's state, which replaces an earlier one; an unknown generation changes nothing."""

    def passed(self, generation: Generation) -> int:
        """How many nodes have passed."""

    def nodes_passed(self, generation: Generation) -> frozenset[str]:
        """Which nodes have passed."""

    def reported(self, generation: Generation, nodes: Iterable[str]) -> frozenset[str]:
        """Which of these nodes have reported any state."""

    def failure(self, generation: Generation) -> NodeFailure | None:
        """The failure of one node; one that fails the job comes before one that requeues it."""

    def failed_starts(self, job_id: int) -> int:
        """How many generations of a job have failed because of their network or the check of their guests."""


class SqlReadiness:
    """These reports in the database."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def report(
        self, generation: Generation, node: str, state: NodeState, kind: str = "", line: str = ""
    ) -> None:
        """Store a node's state."""
        assert self._db.in_transaction, "a change outside a transaction"
        self._db.execute(
            "INSERT INTO readiness (lease, node, state, kind, line)"
            " SELECT id, ?, ?, ?, ? FROM lease WHERE generation = ?"
            " ON CONFLICT DO UPDATE SET state = excluded.state, kind = excluded.kind, line = excluded.line",
            (node, state, kind, line, str(generation)),
        )

    def passed(self, generation: Generation) -> int:
        """How many nodes have passed."""
        (count,) = self._db.execute(
            "SELECT count(*) FROM readiness JOIN lease ON lease.id = readiness.lease"
            " WHERE generation = ? AND readiness.state = 'passed'",
            (str(generation),),
        ).fetchone()
        return int(count)

    def nodes_passed(self, generation: Generation) -> frozenset[str]:
        """Which nodes have passed."""
        rows = self._db.execute(
            "SELECT node FROM readiness JOIN lease ON lease.id = readiness.lease"
            " WHERE generation = ? AND readiness.state = 'passed'",
            (str(generation),),
        )
        return frozenset(node for (node,) in rows)

    def reported(self, generation: Generation, nodes: Iterable[str]) -> frozenset[str]:
        """Which of these nodes have reported."""
        query = (
            "SELECT 1 FROM readiness JOIN lease ON lease.id = readiness.lease"
            " WHERE generation = ? AND node = ?"
        )
        return frozenset(
            node for node in nodes if self._db.execute(query, (str(generation), node)).fetchone()
        )

    def failure(self, generation: Generation) -> NodeFailure | None:
        """The failure of one node."""
        row = self._db.execute(
            "SELECT node, kind, line FROM readiness JOIN lease ON lease.id = readiness.lease"
            " WHERE generation = ? AND readiness.state = 'failed' ORDER BY kind = 'user' DESC, node LIMIT 1",
            (str(generation),),
        ).fetchone()
        return None if row is None else NodeFailure(node=row[0], kind=row[1], line=row[2])

    def failed_starts(self, job_id: int) -> int:
        """How many generations have failed for this reason."""
        (count,) = self._db.execute(
            "SELECT count(DISTINCT lease) FROM readiness JOIN lease ON lease.id = readiness.lease"
            " WHERE lease.job_id = ? AND readiness.state = 'failed' AND readiness.kind = 'fabric'",
            (job_id,),
        ).fetchone()
        return int(count)
