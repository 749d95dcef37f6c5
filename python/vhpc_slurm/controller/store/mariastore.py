# SPDX-License-Identifier: Apache-2.0
"""The store of leases in a MariaDB or MySQL server, where also slurmdbd's may be."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from vhpc_slurm.config.database import Database as Settings
from vhpc_slurm.controller.store import mariaschema, mariasession
from vhpc_slurm.controller.store.errors import (
    ENGINE_ERRORS,
    DamagedError,
    EngineError,
    RetryError,
    UnknownOutcomeError,
)
from vhpc_slurm.controller.store.mariadb import UNKNOWN, MariaDatabase
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.controller.store.writership import Seen, Writership
from vhpc_slurm.errors import FabricError

_ACCESS = frozenset({1044, 1045, 1142, 1143, 1227, 1524, 1698})
_HINTS = {
    1049: "create it; see 'Leases in MariaDB' in docs/install.md",
    1114: "make room on its disk",
    1021: "make room on its disk",
    1290: "use the server that accepts changes",
    1836: "use the server that accepts changes",
}
_DAMAGED = frozenset({126, 127, 1034, 1054, 1146, 1194, 1712, 1877})


def own_name() -> str:
    """The name of this vhpcd as the holder of a database: its host and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def explain(err: Exception, settings: Settings) -> FabricError:
    """The FabricError for an error of the server: what failed, and what to do."""
    where, code = mariasession.where(settings), getattr(err, "code", 0)
    what = f"vhpcd cannot use the {where}"
    if code in _DAMAGED:
        return DamagedError(where, str(err), "compare its tables with a backup; see docs/install.md")
    if code in _ACCESS:
        return FabricError(what, str(err), "grant its user all rights on it; see docs/install.md")
    if code == UNKNOWN:
        return UnknownOutcomeError(
            f"a change may be in the {where} or not", str(err), "send the request again; vhpcd then reads it"
        )
    if mariasession.passes(code):
        return RetryError(what, str(err), "is the server running? vhpcd connects again by itself")
    return FabricError(what, f"error {code}: {err}", _HINTS.get(code, "see docs/install.md"))


class MariaStore(SqlStore):
    """The store in a database server; use it from one thread at a time."""

    def __init__(self, settings: Settings, owner: str, holder: str = "", after: Seen | None = None) -> None:
        """Connect, create or update the tables, and take the database.

        Args:
            settings: the server, and how to reach it.
            owner: vhpcd's user, who may own the password file.
            holder: name of this vhpcd; by default this host and process.
            after: what this vhpcd has seen as a standby; None: there is no other.

        Raises:
            NotInTurnError: another vhpcd has the database, contrary to ``after``.
            FabricError: the server cannot be reached or used, does not write commits to the disk,
                has tables of another program or of a newer vhpcd, or another vhpcd uses it.
        """
        self._settings = settings
        self._after = after
        self._writership = Writership(holder or own_name())
        self._maria = MariaDatabase(settings, owner, self._writership)
        try:
            _check_server(self._maria, settings)
            self._build(self._maria)
            self._take()
            self._read_all()
        except EngineError as err:
            self._maria.close()
            raise explain(err, settings) from err
        except FabricError:
            self._maria.close()
            raise

    def _take(self) -> None:
        """Take the database before its tables are changed; of an empty one, afterwards."""
        where = mariasession.where(self._settings)
        found = mariaschema.version(self._maria)
        mariaschema.check(found, where)
        if not found:
            mariaschema.prepare(self._maria, where)
        if self._after is not None and self._after.holder:
            self._end_sessions()
        with self.transaction():
            self._writership.take(self._maria, self._after)
        mariaschema.prepare(self._maria, where)

    def _end_sessions(self) -> None:
        """End the sessions of the vhpcd before: one that is frozen in a transaction keeps the row locked.

        A user may end its own sessions without further rights. Those that only read connect again.
        """
        (own,) = self._maria.execute("SELECT CONNECTION_ID()").fetchone()
        for number, user, _, database, *_ in self._maria.execute("SHOW PROCESSLIST"):
            if number != own and (user, database) == (self._settings.user, self._settings.name):
                with suppress(EngineError):  # it has ended by itself
                    self._maria.execute(f"KILL CONNECTION {int(number)}")

    @property
    def writership(self) -> Writership:
        """This vhpcd's right to write."""
        return self._writership

    def renew(self) -> None:
        """Show standbys that this vhpcd is alive, within a transaction of the caller's."""
        self._maria.touch()

    def explain(self, err: Exception) -> FabricError:
        """An error of the server as one line: what it is, and what to do."""
        return explain(err, self._settings)

    def damaged(self, why: str) -> FabricError:
        """The error of a row that cannot be read."""
        return DamagedError(mariasession.where(self._settings), why)

    def close(self) -> None:
        """Say that this vhpcd has ended, and close the connection; nothing is lost without this call."""
        with suppress(FabricError, *ENGINE_ERRORS), self.transaction():
            self._writership.give(self._maria)
        self._maria.close()

    def _begin(self) -> None:
        self._maria.begin()

    def _commit(self) -> None:
        self._maria.commit()

    def _rollback(self) -> None:
        self._maria.rollback()


def _check_server(db: MariaDatabase, settings: Settings) -> None:
    found = mariasession.trouble(mariasession.variables(db.execute))
    if found is not None:
        raise FabricError(f"cannot use the {mariasession.where(settings)}", *found)
