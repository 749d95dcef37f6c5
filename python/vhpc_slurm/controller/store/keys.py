# SPDX-License-Identifier: Apache-2.0
"""The store of key assignments: in the database of the leases, and in their transactions.

The database refuses a second owner of a key, and this module a second assignment of a
GUID, so a mistake in the allocator becomes an error, not a leak between jobs.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from vhpc_slurm.controller.store.errors import TAKEN_ERRORS, DamagedError, explain
from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot, KeyState
from vhpc_slurm.model import Generation

_REMEMBERED = 100_000
"""Epochs whose tags are kept; a job takes about five, each batch one partitions file."""


class KeyStore(Protocol):
    """The port.  Changes happen inside the lease store's ``transaction`` only."""

    def snapshot(self) -> KeySnapshot:
        """All assignments, as of now."""

    def add(self, assignment: KeyAssignment) -> None:
        """Add an assignment; FabricError when another owner has its key, or another one of its GUIDs."""

    def update(self, assignments: Sequence[KeyAssignment]) -> None:
        """Write new states of existing assignments; one change of the epoch."""

    def free(self, generations: Sequence[Generation]) -> None:
        """Delete assignments; a key is free when its last assignment is deleted."""

    def knows(self, epoch: int, tag: str) -> bool:
        """Whether this database recently had that epoch with that tag.

        A copy from the past has other tags for the same numbers.
        """


class SqlKeys:
    """Assignments in the database, with a copy in memory, since each request needs all of them."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._assignments: dict[Generation, KeyAssignment] = {}
        self._freed: dict[int, int] = {}
        self._snapshot: KeySnapshot | None = None
        self._fresh = False

    def snapshot(self) -> KeySnapshot:
        """All assignments."""
        if not self._fresh:
            self._load()
        if self._snapshot is None:
            epoch, tag = self._db.execute(
                "SELECT epoch, tag FROM key_epoch ORDER BY epoch DESC LIMIT 1"
            ).fetchone()
            self._snapshot = KeySnapshot(epoch, tuple(self._assignments.values()), dict(self._freed), tag)
        return self._snapshot

    def forget(self) -> None:
        """Discard the copy in memory: a transaction was rolled back."""
        self._fresh, self._snapshot = False, None

    def add(self, assignment: KeyAssignment) -> None:
        """Add an assignment."""
        for other in self.snapshot().assignments:
            if keys.overlap(assignment, other) and other.generation != assignment.generation:
                raise FabricError(
                    f"{assignment.generation} cannot have its GUIDs", f"{other.generation} has some of them"
                )
        try:
            if self._db.execute("SELECT 1 FROM key_owner WHERE pkey = ?", (assignment.pkey,)).fetchone():
                self._change(
                    "UPDATE key_owner SET owner = ? WHERE pkey = ? AND owner IS NULL",
                    assignment.owner,
                    assignment.pkey,
                )
            else:
                self._change(
                    "INSERT INTO key_owner (pkey, owner) VALUES (?, ?)", assignment.pkey, assignment.owner
                )
            self._change(
                "INSERT INTO key_claim VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                str(assignment.generation),
                assignment.pkey,
                assignment.owner,
                assignment.first_rank,
                assignment.ranks,
                assignment.rails,
                assignment.vfs,
                assignment.state.value,
                assignment.left_s,
                assignment.note,
                " ".join(f"{guid:#018x}" for guid in assignment.ports),
            )
        except TAKEN_ERRORS as err:
            raise FabricError(
                f"{assignment.generation} cannot have the key {numbers.label(assignment.pkey)}",
                f"another owner has it: {err}",
            ) from err
        self._tick()
        self._assignments[assignment.generation] = assignment

    def update(self, assignments: Sequence[KeyAssignment]) -> None:
        """Write new states of existing assignments."""
        for assignment in assignments:
            changed = self._change(
                "UPDATE key_claim SET state = ?, left_s = ?, note = ? WHERE generation = ?",
                assignment.state.value,
                assignment.left_s,
                assignment.note,
                str(assignment.generation),
            )
            assert changed == 1, "an update of a missing assignment"
        if assignments:
            self._tick()
            old = {
                assignment.generation: self._assignments[assignment.generation] for assignment in assignments
            }
            self._assignments |= {
                assignment.generation: replace(
                    old[assignment.generation],
                    state=assignment.state,
                    left_s=assignment.left_s,
                    note=assignment.note,
                )
                for assignment in assignments
            }

    def free(self, generations: Sequence[Generation]) -> None:
        """Delete assignments."""
        if not generations:
            return
        self.snapshot()
        self._tick()
        freed = set()
        for generation in generations:
            self._change("DELETE FROM key_claim WHERE generation = ?", str(generation))
            if (assignment := self._assignments.pop(generation, None)) is not None:
                freed.add(assignment.pkey)
        (epoch,) = self._db.execute("SELECT max(epoch) FROM key_epoch").fetchone()
        for pkey in freed.difference(assignment.pkey for assignment in self._assignments.values()):
            self._change("UPDATE key_owner SET owner = NULL, freed = ? WHERE pkey = ?", epoch, pkey)
            self._freed[pkey] = epoch

    def _load(self) -> None:
        rows = self._db.execute(
            "SELECT generation, pkey, owner, first_rank, ranks, rails, vfs, state, left_s, note, ports"
            " FROM key_claim ORDER BY pkey, first_rank, generation"
        ).fetchall()
        assignments = (
            KeyAssignment(
                Generation.parse(name),
                pkey,
                owner,
                first,
                ranks,
                rails,
                vfs,
                KeyState(state),
                left_s,
                note,
                tuple(int(guid, 16) for guid in ports.split()),
            )
            for name, pkey, owner, first, ranks, rails, vfs, state, left_s, note, ports in rows
        )
        self._assignments = {assignment.generation: assignment for assignment in assignments}
        self._freed = dict(self._db.execute("SELECT pkey, freed FROM key_owner WHERE freed > 0").fetchall())
        self._fresh = True

    def knows(self, epoch: int, tag: str) -> bool:
        """Whether an epoch of that tag was."""
        found = self._db.execute("SELECT 1 FROM key_epoch WHERE epoch = ? AND tag = ?", (epoch, tag))
        return found.fetchone() is not None

    def _tick(self) -> None:
        if not self._fresh:
            self._load()  # before the change is noted in memory as well
        self._snapshot = None
        self._change("INSERT INTO key_epoch (tag) VALUES (?)", os.urandom(4).hex())
        (epoch,) = self._db.execute("SELECT max(epoch) FROM key_epoch").fetchone()
        self._change("DELETE FROM key_epoch WHERE epoch <= ?", epoch - _REMEMBERED)

    def _change(self, statement: str, *values: object) -> int:
        assert self._db.in_transaction, "a change outside a transaction"
        return self._db.execute(statement, values).rowcount


def read_snapshot(database: str | Path) -> KeySnapshot:
    """The snapshot of a database that a running vhpcd may be writing; read-only.

    Raises:
        FabricError: it cannot be read, or is of a vhpcd that had no keys.
    """
    try:
        uri = f"{Path(database).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as db:
            db.execute("BEGIN")
            return SqlKeys(db).snapshot()
    except sqlite3.Error as err:
        if isinstance(found := explain(err, database), DamagedError):
            raise found from err
        raise FabricError(
            f"cannot read the keys in {database}", str(err), "root can, on the host of vhpcd"
        ) from err
    except ValueError as err:
        raise DamagedError(database, f"an assignment of a key cannot be read: {err}") from err
