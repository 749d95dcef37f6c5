# SPDX-License-Identifier: Apache-2.0
"""The store of what generations have used: one row for each node of a generation."""

from __future__ import annotations

from typing import Protocol

import msgspec

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage
from vhpc_slurm.undecodable import UNDECODABLE

NEAR = 16
"""Among so many nodes behind one that has reported another is looked for that has not."""


class UsageStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    def keep(self, usage: NodeUsage) -> None:
        """Store a node's report, which replaces an earlier one; an unknown generation changes nothing."""

    def page(self, generation: Generation, after: str, limit: int) -> tuple[NodeUsage, ...]:
        """Reports in the order of node names, those above ``after``."""

    def complete(self, generation: Generation, node: str) -> bool:
        """Whether all nodes that took the lease have reported, ``node`` last; False if none took it."""

    def taken(self, generation: Generation) -> int:
        """How many nodes took the lease."""


class SqlUsage:
    """These reports in the database."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def keep(self, usage: NodeUsage) -> None:
        """Store a node's report."""
        assert self._db.in_transaction, "a change outside a transaction"
        self._db.execute(
            'INSERT INTO "usage" (lease, node, body) SELECT id, ?, ? FROM lease WHERE generation = ?'
            " ON CONFLICT DO UPDATE SET body = excluded.body",
            (usage.node, msgspec.json.encode(usage.guests), str(usage.generation)),
        )

    def page(self, generation: Generation, after: str, limit: int) -> tuple[NodeUsage, ...]:
        """Reports of nodes after ``after``; one that cannot be read has an error instead of figures."""
        rows = self._db.execute(
            'SELECT used.node, used.body FROM "usage" AS used JOIN lease ON lease.id = used.lease'
            " WHERE lease.generation = ? AND used.node > ? ORDER BY used.node LIMIT ?",
            (str(generation), after, limit),
        ).fetchall()
        return tuple(NodeUsage(generation, node, _guests(body)) for node, body in rows)

    def complete(self, generation: Generation, node: str) -> bool:
        """Whether all nodes that took the lease have reported.

        Each node of a job asks, so their list is not read: the search ends at the first node without a
        report. It looks behind ``node`` before it begins at the first one, which is far from such a node if
        nodes report in the order of their names.
        """
        near = self._db.execute(
            "SELECT 1 FROM (SELECT node.lease, node.node, node.taken FROM node"
            " JOIN lease ON lease.id = node.lease WHERE lease.generation = ? AND node.node > ?"
            " ORDER BY node.node LIMIT ?) AS next"
            ' LEFT JOIN "usage" AS used ON used.lease = next.lease AND used.node = next.node'
            " WHERE next.taken IS NOT NULL AND used.node IS NULL LIMIT 1",
            (str(generation), node, NEAR),
        ).fetchone()
        if near is not None:
            return False
        first = self._db.execute(
            "SELECT 1 FROM lease JOIN node ON node.lease = lease.id"
            ' LEFT JOIN "usage" AS used ON used.lease = node.lease AND used.node = node.node'
            " WHERE lease.generation = ? AND node.taken IS NOT NULL AND used.node IS NULL LIMIT 1",
            (str(generation),),
        ).fetchone()
        return first is None and self.taken(generation) > 0

    def taken(self, generation: Generation) -> int:
        """How many nodes took the lease."""
        (count,) = self._db.execute(
            "SELECT count(*) FROM node JOIN lease ON lease.id = node.lease"
            " WHERE lease.generation = ? AND node.taken IS NOT NULL",
            (str(generation),),
        ).fetchone()
        return int(count)


def _guests(body: bytes) -> tuple[GuestUsage, ...]:
    try:
        return msgspec.json.decode(body, type=tuple[GuestUsage, ...])
    except UNDECODABLE:
        return (GuestUsage(0, missing="the report in vhpcd's database cannot be read"),)
