# SPDX-License-Identifier: Apache-2.0
"""The statements of the store of leases, for every database engine.

Node and timeline rows have tables of their own, since a thousand nodes acknowledge one
by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import msgspec

from vhpc_slurm.controller.store import secrets
from vhpc_slurm.controller.store.checkpoints import CheckpointStore, SqlCheckpoints
from vhpc_slurm.controller.store.clusters import SqlClusters
from vhpc_slurm.controller.store.errors import ENGINE_ERRORS
from vhpc_slurm.controller.store.keys import KeyStore, SqlKeys
from vhpc_slurm.controller.store.readiness import ReadinessStore, SqlReadiness
from vhpc_slurm.controller.store.reports import ReportStore, SqlReports
from vhpc_slurm.controller.store.secrets import SecretStore, SqlSecrets
from vhpc_slurm.controller.store.segments import SegmentStore, SqlSegments
from vhpc_slurm.controller.store.sql import Database, among
from vhpc_slurm.controller.store.usage import SqlUsage, UsageStore
from vhpc_slurm.controller.store.viewing import visible
from vhpc_slurm.controller.wire_types import LeaseWire, TimelineWire
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import (
    ALARM,
    TOLD,
    Alarm,
    Generation,
    Lease,
    LeaseRecord,
    LeaseState,
    SshKeys,
    Timeline,
    TunnelKeyPairs,
    Viewer,
)
from vhpc_slurm.undecodable import UNDECODABLE

_AT_ONCE = 500


class SqlStore(ABC):
    """A store of leases over a connection; use it from one thread at a time.

    An engine says how a transaction begins and ends, and what its errors mean.
    """

    _db: Database

    def _build(self, db: Database) -> None:
        self._db = db
        self._depth = 0
        self._keys = SqlKeys(db)
        self._segments = SqlSegments(db)
        self._readiness = SqlReadiness(db)
        self._usage = SqlUsage(db)
        self._ssh_keys = SqlSecrets(db, "ssh_key", SshKeys)
        self._tunnel_keys = SqlSecrets(db, "tunnel_key", TunnelKeyPairs)
        self._reports = SqlReports(db, self.damaged)
        self.checkpoints: CheckpointStore = SqlCheckpoints(db, self.damaged)
        self.clusters = SqlClusters(db, self.damaged)

    @property
    def database(self) -> Database:
        """The connection, to copy tables."""
        return self._db

    def forget(self) -> None:
        """Discard what is in memory: rows were changed by other means than this store's methods."""
        self._keys.forget()
        self.clusters.forget()

    @abstractmethod
    def explain(self, err: Exception) -> FabricError:
        """One of ``errors.ENGINE_ERRORS`` as one line: what it is, and what to do."""

    @abstractmethod
    def damaged(self, why: str) -> FabricError:
        """The error of a row that cannot be read."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""

    @abstractmethod
    def _begin(self) -> None: ...

    def _commit(self) -> None:
        self._db.execute("COMMIT")

    def _rollback(self) -> None:
        if self._db.in_transaction:  # a full disk has ended it already
            self._db.execute("ROLLBACK")

    def _read_all(self) -> None:
        """Read what later requests cannot do without; FabricError when a row cannot be read.

        Otherwise one unreadable lease would fail every list of leases later.
        """
        self.live()
        parts = {"an assignment of a key": self._keys.snapshot, "the holder of a VNI": self._segments.held}
        for what, read in parts.items():
            try:
                read()
            except ValueError as err:
                raise self.damaged(f"{what} cannot be read: {err}") from err

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
        """The nodes' reports to the ready barrier."""
        return self._readiness

    @property
    def usage(self) -> UsageStore:
        """The usage of generations."""
        return self._usage

    @property
    def reports(self) -> ReportStore:
        """The nodes' reports to the owners of jobs."""
        return self._reports

    @property
    def ssh_keys(self) -> SecretStore[SshKeys]:
        """Keys for ssh between guests."""
        return self._ssh_keys

    @property
    def tunnel_keys(self) -> SecretStore[TunnelKeyPairs]:
        """Keys of the tunnels between nodes."""
        return self._tunnel_keys

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; within another it is a part of that, and durable with it."""
        if self._db.in_transaction:
            with self._part():
                yield
            return
        try:
            self._begin()
            try:
                yield
                self._commit()
            except BaseException:
                self._undo()
                raise
        except ENGINE_ERRORS as err:
            self.forget()
            raise self.explain(err) from err

    def _undo(self) -> None:
        self.forget()
        self._rollback()

    @contextmanager
    def _part(self) -> Iterator[None]:
        name = f"part{self._depth}"  # a savepoint of the same name would end the outer one in MariaDB
        self._db.execute(f"SAVEPOINT {name}")
        self._depth += 1
        try:
            yield
        except BaseException as err:
            self.forget()
            with suppress(*ENGINE_ERRORS):  # a full disk may have ended the whole already
                self._db.execute(f"ROLLBACK TO SAVEPOINT {name}")
                self._db.execute(f"RELEASE SAVEPOINT {name}")
            if isinstance(err, ENGINE_ERRORS):
                raise self.explain(err) from err
            raise
        finally:
            self._depth -= 1
        self._db.execute(f"RELEASE SAVEPOINT {name}")

    def put(self, record: LeaseRecord) -> None:
        """Insert a lease, or replace its lease part."""
        lease = record.lease
        self._change(
            "INSERT INTO lease (generation, job_id, state, created, updated, body, uid, account)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (generation) DO UPDATE SET state = excluded.state, updated = excluded.updated,"
            " body = excluded.body, account = excluded.account",
            str(lease.generation),
            lease.generation.job_id,
            lease.state.value,
            record.created,
            record.updated,
            msgspec.json.encode(LeaseWire.pack(lease)),
            lease.request.uid,
            lease.request.account,
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

    def state(self, generation: Generation) -> LeaseState | None:
        """The state of a lease."""
        return self._states("generation = ?", str(generation)).get(generation)

    def has_holders(self, generation: Generation) -> bool:
        """Whether a node still holds a lease."""
        held = "generation = ? AND taken IS NOT NULL AND (clean IS NULL OR clean = 0)"
        query = f"SELECT 1 FROM lease JOIN node ON node.lease = lease.id WHERE {held} LIMIT 1"  # noqa: S608
        return self._db.execute(query, (str(generation),)).fetchone() is not None

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
        """All leases that are ending: the index is of those that are not released."""
        return tuple(one for _, one in self._leases("state <> 'released' AND state = 'ending'"))

    def states(self) -> dict[Generation, LeaseState]:
        """The state of each lease that is not released."""
        return self._states("state <> 'released'")

    def _states(self, where: str, *values: object) -> dict[Generation, LeaseState]:
        rows = self._db.execute(f"SELECT generation, state FROM lease WHERE {where}", values).fetchall()  # noqa: S608
        try:
            return {Generation.parse(name): LeaseState(state) for name, state in rows}
        except ValueError as err:
            raise self.damaged(str(err)) from err

    def released(self, jobs: Iterable[int]) -> tuple[LeaseRecord, ...]:
        """All released leases of some jobs."""
        ids, found = sorted(jobs), []
        for first in range(0, len(ids), _AT_ONCE):
            some = ids[first : first + _AT_ONCE]
            found += self._leases(f"job_id IN {among(some)} AND state = 'released'", *some)
        return tuple(record for _, record in sorted(found, key=lambda one: one[0]))

    def page(
        self,
        after: int,
        *,
        job_id: int | None = None,
        live: bool = False,
        viewer: Viewer | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> tuple[tuple[int, LeaseRecord], ...]:
        """Leases above ``after``, or the newest ones below ``before``."""
        seen, who = visible(viewer)
        where, values = f"id > ?{seen}", (after, *who)
        if job_id is not None:
            where, values = where + " AND job_id = ?", (*values, job_id)
        if live:
            where += " AND state <> 'released'"
        if before is not None:
            where, values = where + " AND id < ?", (*values, before)
        return tuple(self._leases(where, *values, limit=limit, order="id DESC" if before else "id"))

    def timelines(
        self, after: int, *, job_id: int | None = None, viewer: Viewer | None = None, limit: int = 100
    ) -> tuple[tuple[int, Timeline], ...]:
        """Timelines above ``after``."""
        seen, who = visible(viewer)
        rows = self._db.execute(
            "SELECT timeline.id, timeline.body FROM timeline JOIN lease ON lease.id = timeline.lease"  # noqa: S608
            f" WHERE timeline.id > ? AND (? IS NULL OR lease.job_id = ?){seen}"
            " ORDER BY timeline.id LIMIT ?",
            (after, job_id, job_id, *who, limit),
        ).fetchall()
        try:
            return tuple((row[0], msgspec.json.decode(row[1], type=TimelineWire).unpack()) for row in rows)
        except UNDECODABLE as err:
            raise self.damaged(f"a timeline cannot be read: {err}") from err

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

    def _change(self, statement: str, *values: object) -> int:
        assert self._db.in_transaction, "a change outside a transaction"
        return self._db.execute(statement, values).rowcount

    def _leases(
        self, where: str, *values: object, limit: int = 1 << 62, order: str = "id"
    ) -> list[tuple[int, LeaseRecord]]:
        # `where` and `order` are constants of this module, never input.
        rows = self._db.execute(
            f"SELECT id, created, updated, body FROM lease WHERE {where} ORDER BY {order} LIMIT ?",  # noqa: S608
            (*values, limit),
        ).fetchall()
        return [(row[0], self._record(*row)) for row in rows]

    def _unpacked(self, body: bytes) -> Lease:
        try:
            return _unpacked(body)
        except UNDECODABLE as err:
            raise self.damaged(f"a lease cannot be read: {err}") from err

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
            told=tuple((node, line[len(TOLD) :]) for node, *_, line in nodes if line.startswith(TOLD)),
        )


@lru_cache(maxsize=64)
def _unpacked(body: bytes) -> Lease:
    """A stored lease; cached, since all nodes of a job ask for the same one."""
    return msgspec.json.decode(body, type=LeaseWire).unpack()
