# SPDX-License-Identifier: Apache-2.0
"""The store of leases: SQLite, one file, one writer, every commit on disk.

A ``transaction`` is all or nothing, also for ``kill -9`` and power loss (WAL
with synchronous=FULL).  Node and timeline rows have tables of their own, since
a thousand nodes acknowledge one by one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from vhpc_slurm.controller.store import schema, secrets
from vhpc_slurm.controller.store.errors import DamagedError, explain
from vhpc_slurm.controller.store.keys import KeyStore, SqliteKeys
from vhpc_slurm.controller.store.readiness import ReadinessStore, SqliteReadiness
from vhpc_slurm.controller.store.secrets import SecretStore, SqliteSecrets
from vhpc_slurm.controller.store.segments import SegmentStore, SqliteSegments
from vhpc_slurm.controller.wire_types import LeaseWire, TimelineWire
from vhpc_slurm.errors import UNDECODABLE, FabricError
from vhpc_slurm.model import (
    ALARM,
    Alarm,
    Generation,
    Lease,
    LeaseRecord,
    LeaseState,
    SshKeys,
    Timeline,
    TunnelKeyPairs,
)

_VNI_BASE = 1 << 24
"""Assignments of an earlier version's backend vxlan have numbers from here on."""


class SqliteStore:
    """The store in one SQLite file; use it from one thread at a time."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the database.

        Raises:
            DamagedError: its content is not what vhpcd writes.
            FabricError: it cannot be opened, is another program's, or of a newer vhpcd.
        """
        self._path = path
        self._db = sqlite3.connect(":memory:")  # replaced below; close() needs one
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            schema.prepare(self._db, path)
            self._keys = SqliteKeys(self._db)
            self._segments = SqliteSegments(self._db)
            self._readiness = SqliteReadiness(self._db)
            self._ssh_keys = SqliteSecrets(self._db, "ssh_key", SshKeys)
            self._tunnel_keys = SqliteSecrets(self._db, "tunnel_key", TunnelKeyPairs)
            self._check()
        except sqlite3.Error as err:
            self._db.close()
            raise explain(err, path) from err
        except FabricError:
            self._db.close()
            raise

    def _check(self) -> None:
        """DamagedError when pages, tables or rows are not what vhpcd writes.

        Otherwise one unreadable lease would fail every list of leases later.
        """
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise DamagedError(self._path, found)
        (orphans,) = self._db.execute("SELECT count(*) FROM pragma_foreign_key_check").fetchone()
        if orphans:
            raise DamagedError(self._path, f"{orphans} rows belong to a missing lease or key")
        (foreign,) = self._db.execute(
            "SELECT count(*) FROM key_claim WHERE pkey >= ? AND state <> 'quarantine'", (_VNI_BASE,)
        ).fetchone()
        if foreign:
            raise FabricError(
                f"cannot use the database {self._path}",
                f"{foreign} jobs have a VNI of fabric.backend vxlan, which this version does not have",
                "let these jobs end under the earlier version; see [network] in vhpc.toml(5)",
            )
        self.live()
        try:
            self._keys.snapshot()
        except ValueError as err:
            raise DamagedError(self._path, f"an assignment of a key cannot be read: {err}") from err
        try:
            self._segments.held()
        except ValueError as err:
            raise DamagedError(self._path, f"the holder of a VNI cannot be read: {err}") from err

    def explain(self, err: sqlite3.Error) -> FabricError:
        """An error of the database as one line: what it is, and what to do."""
        return explain(err, self._path)

    @property
    def keys(self) -> KeyStore:
        """Assignments of partition keys."""
        return self._keys

    @property
    def segments(self) -> SegmentStore:
        """VNIs of job networks."""
        return self._segments

    @property
    def readiness(self) -> ReadinessStore:
        """What nodes report to the ready barrier."""
        return self._readiness

    @property
    def ssh_keys(self) -> SecretStore[SshKeys]:
        """Keys for ssh between guests."""
        return self._ssh_keys

    @property
    def tunnel_keys(self) -> SecretStore[TunnelKeyPairs]:
        """Keys of the WireGuard tunnels between the nodes of a generation."""
        return self._tunnel_keys

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; within another it is a part of that, and durable with it."""
        if self._db.in_transaction:
            with self._part():
                yield
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._keys.forget()
                if self._db.in_transaction:  # a full disk has ended it already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as err:
            self._keys.forget()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise explain(err, self._path) from err

    @contextmanager
    def _part(self) -> Iterator[None]:
        self._db.execute("SAVEPOINT part")
        try:
            yield
        except BaseException as err:
            self._keys.forget()
            with suppress(sqlite3.Error):  # a full disk may have ended the whole already
                self._db.execute("ROLLBACK TO part")
                self._db.execute("RELEASE part")
            if isinstance(err, sqlite3.Error):
                raise explain(err, self._path) from err
            raise
        self._db.execute("RELEASE part")

    def put(self, record: LeaseRecord) -> None:
        """Insert a lease, or replace its lease part."""
        lease = record.lease
        self._change(
            "INSERT INTO lease (generation, job_id, state, created, updated, body) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (generation) DO UPDATE SET state = excluded.state, updated = excluded.updated,"
            " body = excluded.body",
            str(lease.generation),
            lease.generation.job_id,
            lease.state.value,
            record.created,
            record.updated,
            msgspec.json.encode(LeaseWire.pack(lease)),
        )
        if lease.state in (LeaseState.ENDING, LeaseState.RELEASED):
            secrets.delete(self._db, lease.generation)

    def take(self, generation: Generation, node: str, now: float) -> None:
        """Remember that a node took the lease."""
        self._change(
            "INSERT INTO node (lease, node, taken) SELECT id, ?, ? FROM lease WHERE generation = ?"
            " ON CONFLICT DO UPDATE SET taken = excluded.taken, acknowledged = NULL, clean = NULL, note = ''",
            node,
            now,
            str(generation),
        )

    def acknowledge(self, generation: Generation, node: str, *, clean: bool, note: str, now: float) -> None:
        """Record the last acknowledgement of a node."""
        self._change(
            "INSERT INTO node (lease, node, acknowledged, clean, note)"
            " SELECT id, ?, ?, ?, ? FROM lease WHERE generation = ?"
            " ON CONFLICT DO UPDATE SET acknowledged = excluded.acknowledged, clean = excluded.clean,"
            " note = excluded.note",
            node,
            now,
            int(clean),
            note,
            str(generation),
        )

    def report(self, timeline: Timeline) -> None:
        """Keep a timeline."""
        wire = TimelineWire(generation=str(timeline.generation), node=timeline.node, stages=timeline.stages)
        self._change(
            "INSERT INTO timeline (lease, node, body) SELECT id, ?, ? FROM lease WHERE generation = ?"
            " ON CONFLICT DO UPDATE SET body = excluded.body",
            timeline.node,
            msgspec.json.encode(wire),
            str(timeline.generation),
        )

    def get(self, generation: Generation) -> LeaseRecord | None:
        """One lease."""
        found = self._leases("generation = ?", str(generation))
        return found[0][1] if found else None

    def of_job(self, job_id: int) -> tuple[LeaseRecord, ...]:
        """All leases of a job, newest first."""
        return tuple(record for _, record in reversed(self._leases("job_id = ?", job_id)))

    def newest(self, job_id: int) -> LeaseRecord | None:
        """The newest lease of a job."""
        row = self._db.execute(
            "SELECT created, updated, body FROM lease WHERE job_id = ? ORDER BY id DESC LIMIT 1", (job_id,)
        ).fetchone()
        return None if row is None else LeaseRecord(self._unpacked(row[2]), row[0], row[1], ())

    def live(self) -> tuple[LeaseRecord, ...]:
        """All leases that are not released."""
        return tuple(record for _, record in self._leases("state <> 'released'"))

    def ending(self) -> tuple[LeaseRecord, ...]:
        """All leases that are ending."""
        # The index is of leases that are not released.
        return tuple(record for _, record in self._leases("state <> 'released' AND state = 'ending'"))

    def states(self) -> dict[Generation, LeaseState]:
        """The state of each lease that is not released."""
        rows = self._db.execute("SELECT generation, state FROM lease WHERE state <> 'released'").fetchall()
        try:
            return {Generation.parse(name): LeaseState(state) for name, state in rows}
        except ValueError as err:
            raise DamagedError(self._path, str(err)) from err

    def released(self, jobs: Iterable[int]) -> tuple[LeaseRecord, ...]:
        """All released leases of some jobs."""
        ids = msgspec.json.encode(sorted(jobs)).decode()
        where = "job_id IN (SELECT value FROM json_each(?)) AND state = 'released'"
        return tuple(record for _, record in self._leases(where, ids))

    def page(
        self, after: int, *, job_id: int | None = None, live: bool = False, limit: int = 100
    ) -> tuple[tuple[int, LeaseRecord], ...]:
        """Leases above ``after``."""
        where, values = "id > ?", [after]
        if job_id is not None:
            where, values = where + " AND job_id = ?", [*values, job_id]
        if live:
            where += " AND state <> 'released'"
        return tuple(self._leases(where, *values, limit=limit))

    def timelines(
        self, after: int, *, job_id: int | None = None, limit: int = 100
    ) -> tuple[tuple[int, Timeline], ...]:
        """Timelines above ``after``."""
        rows = self._db.execute(
            "SELECT timeline.id, timeline.body FROM timeline JOIN lease ON lease.id = timeline.lease"
            " WHERE timeline.id > ? AND (? IS NULL OR lease.job_id = ?) ORDER BY timeline.id LIMIT ?",
            (after, job_id, job_id, limit),
        ).fetchall()
        try:
            return tuple(
                (serial, msgspec.json.decode(body, type=TimelineWire).unpack()) for serial, body in rows
            )
        except UNDECODABLE as err:
            raise DamagedError(self._path, f"a timeline cannot be read: {err}") from err

    def counts(self) -> dict[str, int]:
        """How many leases there are in each state."""
        rows = self._db.execute("SELECT state, count(*) FROM lease GROUP BY state").fetchall()
        return {state.value: 0 for state in LeaseState} | dict(rows)

    def alarms(self, limit: int) -> tuple[Alarm, ...]:
        """The newest alarms of nodes; reads all notes, so not for every request."""
        rows = self._db.execute(
            "SELECT lease.job_id, node.node, node.acknowledged, substr(node.note, ?)"
            " FROM node JOIN lease ON lease.id = node.lease WHERE node.clean AND substr(node.note, 1, ?) = ?"
            " ORDER BY node.acknowledged DESC LIMIT ?",
            (len(ALARM) + 1, len(ALARM), ALARM, limit),
        ).fetchall()
        return tuple(Alarm(*row) for row in reversed(rows))

    def prune(self, before: float) -> int:
        """Delete old leases, but those whose VNI a node may still use: it is freed through its lease."""
        return self._change(
            "DELETE FROM lease WHERE state = 'released' AND updated < ? AND generation NOT IN"
            " (SELECT generation FROM segment WHERE generation IS NOT NULL AND left_s IS NULL"
            " UNION SELECT generation FROM segment_share WHERE held)",
            before,
        )

    def close(self) -> None:
        """End."""
        self._db.close()

    def _change(self, statement: str, *values: object) -> int:
        assert self._db.in_transaction, "a change outside a transaction"
        return self._db.execute(statement, values).rowcount

    def _leases(self, where: str, *values: object, limit: int = -1) -> list[tuple[int, LeaseRecord]]:
        # `where` is a constant of this module, never input.
        rows = self._db.execute(
            f"SELECT id, created, updated, body FROM lease WHERE {where} ORDER BY id LIMIT ?",  # noqa: S608
            (*values, limit),
        ).fetchall()
        return [
            (serial, self._record(serial, created, updated, body)) for serial, created, updated, body in rows
        ]

    def _unpacked(self, body: bytes) -> Lease:
        try:
            return _unpacked(body)
        except UNDECODABLE as err:
            raise DamagedError(self._path, f"a lease cannot be read: {err}") from err

    def _record(self, serial: int, created: float, updated: float, body: bytes) -> LeaseRecord:
        nodes = self._db.execute(
            "SELECT node, taken, clean, note FROM node WHERE lease = ? ORDER BY node", (serial,)
        ).fetchall()
        return LeaseRecord(
            self._unpacked(body),
            created,
            updated,
            acknowledged=tuple(node for node, _, clean, _ in nodes if clean),
            taken=tuple(node for node, taken, _, _ in nodes if taken is not None),
            unclean=tuple((node, note) for node, _, clean, note in nodes if clean == 0),
        )


@lru_cache(maxsize=64)
def _unpacked(body: bytes) -> Lease:
    """A stored lease; cached, since all nodes of a job ask for the same one."""
    return msgspec.json.decode(body, type=LeaseWire).unpack()
