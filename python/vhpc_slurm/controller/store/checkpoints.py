# SPDX-License-Identifier: Apache-2.0
"""The store of checkpoints: one row for each, and one for each node that has reported something about it.

A checkpoint outlives its lease, so it has a copy of it.  Its key is given only to nodes that write or read
its files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Protocol

import msgspec

from vhpc_slurm.controller.store.checkpoint_sizes import SizeStore, SqlSizes
from vhpc_slurm.controller.store.sql import Database, among
from vhpc_slurm.controller.store.viewing import visible
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import CheckpointState, Generation, KeeperState, Lease, SavedNode, Viewer
from vhpc_slurm.record import Record
from vhpc_slurm.undecodable import UNDECODABLE

_COLUMNS = (
    "id, name, uid, account, job_id, generation, state, created, updated, stop, requeue, secret, origin,"
    " error, resumed_by, paused_s"
)


class StoredCheckpoint(Record, frozen=True):
    """A checkpoint as vhpcd keeps it.

    Attributes:
        serial: its number, which no other has, ever.
        name: that its owner knows it by; another one may have the same.
        uid: of its owner.
        account: of the job.
        job_id: of the job that was saved.
        generation: that was saved.
        state: of the checkpoint.
        created: time of the request, in seconds since the epoch.
        updated: time of the last change of the state.
        stop: this run of the job ends when the checkpoint is valid.
        requeue: the job's next run continues the checkpoint, so that it is put back into the queue.
        key: of its seals; secret.
        origin: the lease that was saved.
        error: why it has failed.
        resumed_by: the last generation that continues it, or has continued it.
        paused_s: how long programs were stopped on a node at most; None: no node has told.
    """

    serial: int
    name: str
    uid: int
    account: str
    job_id: int
    generation: Generation
    state: CheckpointState
    created: float
    updated: float
    stop: bool
    requeue: bool
    key: bytes
    origin: Lease
    error: str = ""
    resumed_by: Generation | None = None
    paused_s: float | None = None

    def __repr__(self) -> str:
        return f"Checkpoint({self.serial}, {self.name!r}, {self.state.value})"


class CheckpointStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    @property
    def sizes(self) -> SizeStore:
        """Their sizes, in the same transactions."""

    def add(
        self, origin: Lease, name: str, *, stop: bool, requeue: bool, key: bytes, now: float
    ) -> StoredCheckpoint:
        """A new checkpoint of a lease, HOLDING."""

    def get(self, serial: int) -> StoredCheckpoint | None:
        """One checkpoint."""

    def of(self, generation: Generation) -> StoredCheckpoint | None:
        """The newest checkpoint of a generation."""

    def named(self, uid: int | None, name: str) -> tuple[StoredCheckpoint, ...]:
        """All checkpoints that a user has under a name, newest first; None: those of all users."""

    def active(self) -> tuple[StoredCheckpoint, ...]:
        """Return those in HOLDING or SAVING, oldest first."""

    def valid(self, job_id: int) -> tuple[StoredCheckpoint, ...]:
        """The VALID ones of a job, newest first."""

    def aged(self, before: float, uid: int | None = None) -> tuple[StoredCheckpoint, ...]:
        """Return those that became VALID before a time, oldest first; ``uid`` None: of all users."""

    def stopping(self) -> tuple[StoredCheckpoint, ...]:
        """Return VALID ones whose jobs must end and have not: their leases are READY."""

    def move(self, serial: int, state: CheckpointState, now: float, error: str = "") -> None:
        """Change the state of a checkpoint."""

    def give_up(self, generation: Generation, error: str, now: float) -> int:
        """Active checkpoints of a generation become FAILED; returns how many."""

    def resume(self, serial: int, generation: Generation) -> None:
        """Record which generation continues a checkpoint."""

    def paused(self, serial: int, generation: Generation, seconds: float) -> None:
        """Record how long programs of the generation were stopped, if no node has told of a longer time."""

    def report(self, serial: int, node: str, state: KeeperState, saved: SavedNode | None) -> None:
        """Store what a node has reported, in place of what it has reported before."""

    def reported(self, serial: int, node: str) -> KeeperState | None:
        """The last report of a node."""

    def reports(self, serial: int) -> dict[str, KeeperState]:
        """The last report of each node that has sent one."""

    def count(self, serial: int, state: KeeperState) -> int:
        """How many nodes have reported this last."""

    def saved(self, serial: int, node: str | None = None) -> tuple[SavedNode, ...]:
        """Return the parts of all nodes, or of one, in the order of their names."""

    def page(
        self, after: int, *, job_id: int | None = None, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[StoredCheckpoint, ...]:
        """Checkpoints above a serial number, in order; only what ``viewer`` may see."""

    def kept(self, serials: Collection[int]) -> frozenset[int]:
        """Those of some checkpoints whose files are needed."""

    def delete(self, serial: int) -> None:
        """Delete the row of a checkpoint; no other one ever gets its number."""

    def prune(self, before: float) -> int:
        """Delete FAILED and REMOVED ones that have not changed since then; returns how many."""


class SqlCheckpoints:
    """Checkpoints in the database."""

    def __init__(self, db: Database, damaged: Callable[[str], FabricError]) -> None:
        """``damaged`` makes the error of a row that cannot be read."""
        self._db, self._damaged = db, damaged
        self._sizes = SqlSizes(db, self.saved)

    @property
    def sizes(self) -> SizeStore:
        """Their sizes."""
        return self._sizes

    def add(
        self, origin: Lease, name: str, *, stop: bool, requeue: bool, key: bytes, now: float
    ) -> StoredCheckpoint:
        """A new checkpoint."""
        assert self._db.in_transaction, "a change outside a transaction"
        request, generation = origin.request, origin.generation
        serial = self._db.execute(
            "INSERT INTO checkpoint (name, uid, account, job_id, generation, state, created, updated, stop,"
            " requeue, secret, origin, error, resumed_by)"
            " VALUES (?, ?, ?, ?, ?, 'holding', ?, ?, ?, ?, ?, ?, '', '')",
            (
                name,
                request.uid,
                request.account,
                generation.job_id,
                str(generation),
                now,
                now,
                int(stop),
                int(requeue),
                key,
                msgspec.json.encode(LeaseWire.pack(origin)),
            ),
        ).lastrowid
        assert serial is not None
        found = self.get(serial)
        assert found is not None
        return found

    def get(self, serial: int) -> StoredCheckpoint | None:
        """One checkpoint."""
        return self._first("id = ?", serial)

    def of(self, generation: Generation) -> StoredCheckpoint | None:
        """The newest of a generation."""
        return self._first("generation = ?", str(generation))

    def named(self, uid: int | None, name: str) -> tuple[StoredCheckpoint, ...]:
        """All of a user under a name."""
        if uid is None:
            return self._select("name = ? ORDER BY id DESC", name)
        return self._select("uid = ? AND name = ? ORDER BY id DESC", uid, name)

    def active(self) -> tuple[StoredCheckpoint, ...]:
        """Return those in HOLDING or SAVING."""
        return self._select("state IN ('holding', 'saving') ORDER BY id")

    def valid(self, job_id: int) -> tuple[StoredCheckpoint, ...]:
        """The VALID ones of a job."""
        return self._select("job_id = ? AND state = 'valid' ORDER BY id DESC", job_id)

    def aged(self, before: float, uid: int | None = None) -> tuple[StoredCheckpoint, ...]:
        """Return those that became VALID before a time."""
        return self._select(
            "state = 'valid' AND updated < ? AND (? IS NULL OR uid = ?) ORDER BY id", before, uid, uid
        )

    def stopping(self) -> tuple[StoredCheckpoint, ...]:
        """Return VALID ones whose jobs must end."""
        return self._select(
            "state = 'valid' AND stop = 1 AND generation IN"
            " (SELECT generation FROM lease WHERE lease.state = 'ready') ORDER BY id"
        )

    def move(self, serial: int, state: CheckpointState, now: float, error: str = "") -> None:
        """Change the state."""
        self._change(
            "UPDATE checkpoint SET state = ?, updated = ?, error = ? WHERE id = ?",
            state.value,
            now,
            error,
            serial,
        )

    def give_up(self, generation: Generation, error: str, now: float) -> int:
        """Active ones of a generation become FAILED."""
        return self._change(
            "UPDATE checkpoint SET state = 'failed', updated = ?, error = ?"
            " WHERE generation = ? AND state IN ('holding', 'saving')",
            now,
            error,
            str(generation),
        )

    def resume(self, serial: int, generation: Generation) -> None:
        """Record who continues it."""
        self._change("UPDATE checkpoint SET resumed_by = ? WHERE id = ?", str(generation), serial)

    def paused(self, serial: int, generation: Generation, seconds: float) -> None:
        """Record the longest time."""
        self._change(
            "UPDATE checkpoint SET paused_s = ? WHERE id = ? AND generation = ?"
            " AND (paused_s IS NULL OR paused_s < ?)",
            seconds,
            serial,
            str(generation),
            seconds,
        )

    def report(self, serial: int, node: str, state: KeeperState, saved: SavedNode | None) -> None:
        """Store a node's report."""
        self._change(
            "INSERT INTO checkpoint_node (checkpoint, node, state, body) VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET state = excluded.state, body = excluded.body",
            serial,
            node,
            state.value,
            None if saved is None else msgspec.json.encode(saved),
        )

    def reported(self, serial: int, node: str) -> KeeperState | None:
        """The last report of a node."""
        row = self._db.execute(
            "SELECT state FROM checkpoint_node WHERE checkpoint = ? AND node = ?", (serial, node)
        ).fetchone()
        return None if row is None else KeeperState(row[0])

    def reports(self, serial: int) -> dict[str, KeeperState]:
        """The last report of each node."""
        rows = self._db.execute("SELECT node, state FROM checkpoint_node WHERE checkpoint = ?", (serial,))
        return {node: KeeperState(state) for node, state in rows}

    def count(self, serial: int, state: KeeperState) -> int:
        """How many nodes have reported this last."""
        (count,) = self._db.execute(
            "SELECT count(*) FROM checkpoint_node WHERE checkpoint = ? AND state = ?", (serial, state.value)
        ).fetchone()
        return int(count)

    def saved(self, serial: int, node: str | None = None) -> tuple[SavedNode, ...]:
        """Return the parts of nodes."""
        rows = self._db.execute(
            "SELECT body FROM checkpoint_node WHERE checkpoint = ? AND (? IS NULL OR node = ?)"
            " AND body IS NOT NULL ORDER BY node",
            (serial, node, node),
        ).fetchall()
        try:
            return tuple(msgspec.json.decode(body, type=SavedNode) for (body,) in rows)
        except UNDECODABLE as err:
            raise self._damaged(f"what a node has saved for a checkpoint cannot be read: {err}") from err

    def page(
        self, after: int, *, job_id: int | None = None, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[StoredCheckpoint, ...]:
        """Checkpoints above a serial number."""
        seen, who = visible(viewer, "checkpoint")
        return self._select(
            f"id > ? AND (? IS NULL OR job_id = ?){seen} ORDER BY id LIMIT ?",
            after,
            job_id,
            job_id,
            *who,
            limit,
        )

    def kept(self, serials: Collection[int]) -> frozenset[int]:
        """Those whose files are needed."""
        rows = self._db.execute(
            f"SELECT id FROM checkpoint WHERE id IN {among(serials)}"  # noqa: S608 - question marks
            " AND state IN ('holding', 'saving', 'valid')",
            tuple(serials),
        )
        return frozenset(serial for (serial,) in rows)

    def delete(self, serial: int) -> None:
        """Delete a row."""
        self._change("DELETE FROM checkpoint WHERE id = ?", serial)

    def prune(self, before: float) -> int:
        """Delete old ones that have no files."""
        return self._change(
            "DELETE FROM checkpoint WHERE state IN ('failed', 'removed') AND updated < ?", before
        )

    def _first(self, where: str, *values: object) -> StoredCheckpoint | None:
        found = self._select(f"{where} ORDER BY id DESC LIMIT 1", *values)
        return found[0] if found else None

    def _select(self, where: str, *values: object) -> tuple[StoredCheckpoint, ...]:
        # `where` is made of constants of this module, never of input.
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM checkpoint WHERE {where}", values).fetchall()  # noqa: S608
        try:
            return tuple(_checkpoint(*row) for row in rows)
        except UNDECODABLE as err:
            raise self._damaged(f"a checkpoint cannot be read: {err}") from err

    def _change(self, statement: str, *values: object) -> int:
        assert self._db.in_transaction, "a change outside a transaction"
        return self._db.execute(statement, values).rowcount


def _checkpoint(
    serial: int,
    name: str,
    uid: int,
    account: str,
    job_id: int,
    generation: str,
    state: str,
    created: float,
    updated: float,
    stop: int,
    requeue: int,
    secret: bytes,
    origin: bytes,
    error: str,
    resumed_by: str,
    paused_s: float | None,
) -> StoredCheckpoint:
    return StoredCheckpoint(
        serial,
        name,
        uid,
        account,
        job_id,
        Generation.parse(generation),
        CheckpointState(state),
        created,
        updated,
        bool(stop),
        bool(requeue),
        bytes(secret),
        _unpacked(bytes(origin)),
        error,
        Generation.parse(resumed_by) if resumed_by else None,
        paused_s,
    )


@lru_cache(maxsize=64)
def _unpacked(body: bytes) -> Lease:
    """A stored lease; cached, since each node of a job asks for its checkpoint."""
    return msgspec.json.decode(body, type=LeaseWire).unpack()
