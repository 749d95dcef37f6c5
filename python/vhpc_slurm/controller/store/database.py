# SPDX-License-Identifier: Apache-2.0
"""The store of leases in SQLite: one file, one writer, every commit on disk.

A ``transaction`` is all or nothing, also for ``kill -9`` and power loss (WAL
with synchronous=FULL).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from vhpc_slurm.controller.store import schema
from vhpc_slurm.controller.store.errors import DamagedError, explain
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError


class SqliteStore(SqlStore):
    """The store in one SQLite file; use it from one thread at a time."""

    _db: sqlite3.Connection

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
            schema.check(self._db, path)  # before the file of another program is changed
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            schema.prepare(self._db, path)
            self._build(self._db)
            self._check()
        except sqlite3.Error as err:
            self._db.close()
            raise explain(err, path) from err
        except FabricError:
            self._db.close()
            raise

    def _check(self) -> None:
        """FabricError when pages, tables or rows are not what vhpcd writes."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise DamagedError(self._path, found)
        (orphans,) = self._db.execute("SELECT count(*) FROM pragma_foreign_key_check").fetchone()
        if orphans:
            raise DamagedError(self._path, f"{orphans} rows belong to a missing lease or key")
        self._read_all()

    def explain(self, err: Exception) -> FabricError:
        """An error of SQLite as one line: what it is, and what to do."""
        return explain(err, self._path)

    def damaged(self, why: str) -> FabricError:
        """The error of a row that cannot be read."""
        return DamagedError(self._path, why)

    def close(self) -> None:
        """Close the file; nothing is lost without this call."""
        self._db.close()

    def _begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
