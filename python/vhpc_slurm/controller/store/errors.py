# SPDX-License-Identifier: Apache-2.0
"""Errors of the database engines, and those of SQLite as errors that say what an operator can do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from vhpc_slurm.errors import FabricError

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_ERROR)
_FORBIDDEN = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN)
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class EngineError(Exception):
    """An error of a database server.

    Attributes:
        code: the server's number, or the client library's from 2000 to 2999; 0 when there is none.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class EngineTakenError(EngineError):
    """A row with this key exists, or the row that it belongs to does not."""


ENGINE_ERRORS = (sqlite3.Error, EngineError)
"""Errors of a statement that fails."""
TAKEN_ERRORS = (sqlite3.IntegrityError, EngineTakenError)
"""Those of them that a constraint of a table raises."""


class RetryError(FabricError):
    """A transaction was undone for a reason that passes: the same calls may be run again."""


class UnknownOutcomeError(FabricError):
    """A transaction may be durable or not; the next one finds out."""


class DamagedError(FabricError):
    """The content of the database is not what vhpcd wrote."""

    def __init__(self, path: str | Path, why: str, hint: str = "") -> None:
        super().__init__(
            f"the database {path} is damaged",
            why,
            hint or "stop vhpcd, keep the file, and see 'A damaged database' in docs/install.md",
        )


def explain(err: Exception, path: str | Path) -> FabricError:
    """The FabricError for an error of SQLite: what failed, and what to do."""
    # The upper bits of a code are details: SQLITE_IOERR_FSYNC is a kind of SQLITE_IOERR.
    code = getattr(err, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGED:
        return DamagedError(path, str(err))
    what = f"vhpcd cannot use its database {path}"
    if code == sqlite3.SQLITE_FULL:
        return FabricError(what, str(err), "make room on its disk")
    if code == sqlite3.SQLITE_IOERR:
        return FabricError(what, str(err), "its disk reports errors; see dmesg")
    if code in _FORBIDDEN:
        return FabricError(
            what, str(err), "the file and its folder must belong to vhpcd's user, on a writable disk"
        )
    if code in _IN_USE:
        return FabricError(what, str(err), "another process holds it; see: fuser FILE")
    return FabricError(what, f"{type(err).__name__}: {err}", "see docs/install.md")
