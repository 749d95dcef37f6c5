# SPDX-License-Identifier: Apache-2.0
"""The store of what nodes tell the owners of jobs: one compressed row for each node of a generation."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.controller.store.viewing import visible
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, NodeReport, Viewer
from vhpc_slurm.undecodable import UNDECODABLE

KEPT_NODES = 64
"""Reports of a generation at most; those of further nodes are not stored."""
MAX_REPORT = 256 << 10
"""Longest report in bytes of JSON; nodes send shorter ones, and an answer must have room for it."""


class ReportStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    def add(self, report: NodeReport) -> None:
        """Store a report, which replaces an earlier one of that node; beyond KEPT_NODES only such ones.

        One that is longer than MAX_REPORT is not stored.
        """

    def page(
        self, after: int, *, job_id: int, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[tuple[int, NodeReport], ...]:
        """Reports of a job with their serial numbers, in order, those above ``after``."""

    def nodes(self, generation: Generation) -> frozenset[str]:
        """The nodes whose Prolog has ended: those with a timeline."""


class SqlReports:
    """These reports in the database."""

    def __init__(self, db: Database, damaged: Callable[[str], FabricError]) -> None:
        """``damaged`` makes the error of a row that cannot be read."""
        self._db = db
        self._damaged = damaged

    def add(self, report: NodeReport) -> None:
        """Store a report."""
        body, generation = msgspec.json.encode(report), str(report.generation)
        if len(body) > MAX_REPORT:
            return
        self._db.execute(
            "INSERT INTO node_report (lease, node, body) SELECT id, ?, ? FROM lease WHERE generation = ?"
            " AND (SELECT count(*) FROM node_report WHERE lease = lease.id AND node <> ?) < ?"
            " ON CONFLICT DO UPDATE SET body = excluded.body",
            (report.node, zlib.compress(body), generation, report.node, KEPT_NODES),
        )

    def page(
        self, after: int, *, job_id: int, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[tuple[int, NodeReport], ...]:
        """Reports above ``after``."""
        seen, who = visible(viewer)
        rows = self._db.execute(
            "SELECT node_report.id, node_report.body FROM node_report"  # noqa: S608
            " JOIN lease ON lease.id = node_report.lease"
            f" WHERE node_report.id > ? AND lease.job_id = ?{seen} ORDER BY node_report.id LIMIT ?",
            (after, job_id, *who, limit),
        ).fetchall()
        try:
            return tuple((serial, _unpacked(body)) for serial, body in rows)
        except (zlib.error, *UNDECODABLE) as err:
            raise self._damaged(f"a report of a node cannot be read: {err}") from err

    def nodes(self, generation: Generation) -> frozenset[str]:
        """Nodes with a timeline."""
        rows = self._db.execute(
            "SELECT timeline.node FROM timeline JOIN lease ON lease.id = timeline.lease"
            " WHERE lease.generation = ?",
            (str(generation),),
        )
        return frozenset(node for (node,) in rows)


def _unpacked(body: bytes) -> NodeReport:
    raw = zlib.decompressobj().decompress(body, MAX_REPORT)
    return msgspec.json.decode(raw, type=NodeReport)
