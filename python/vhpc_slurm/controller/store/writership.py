# SPDX-License-Identifier: Apache-2.0
"""Which vhpcd may write to a database server, and whether its last transaction is there.

One row says it: ``epoch`` counts the vhpcd's that have taken the database, ``serial`` the
transactions that changed something. Each such transaction first raises the serial by a
statement that finds the row only with the epoch and the serial that this vhpcd knows. So
a vhpcd from which another one has taken the database changes nothing any more, whatever it
believes; and a COMMIT without an answer is decided by reading the row. The SQLite file
needs nothing of this: there the lock of the file decides.

A standby will take the database by ``take`` alone, when the active vhpcd no longer
renews ``seen``.
"""

from __future__ import annotations

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.errors import FabricError

FRESH_S = 30.0
"""A vhpcd of another host that has written within this time, in seconds, is taken to be running."""


class FencedError(FabricError):
    """Another vhpcd has taken the database."""


class Writership:
    """The right of this process to write; a ``Database`` asks it within its transactions."""

    def __init__(self, holder: str) -> None:
        """``holder`` names this vhpcd: its host, a colon and its process."""
        self._holder = holder
        self._epoch = -1
        self._serial = -1
        self._unknown = False

    def take(self, db: Database) -> None:
        """Take the database, in a transaction of the caller's.

        FabricError: a vhpcd on another host has it, and wrote to it a moment ago.
        """
        epoch, serial, holder, age = db.execute(
            "SELECT epoch, serial, holder, UNIX_TIMESTAMP() - seen FROM vhpc_writer WHERE id = 1 FOR UPDATE"
        ).fetchone()
        host = holder.partition(":")[0]
        if host and host != self._holder.partition(":")[0] and age < FRESH_S:
            raise FabricError(
                "another vhpcd uses the database",
                f"{holder} wrote to it {max(0, int(age))} s ago",
                "stop it; one that has crashed can be replaced half a minute after its last change",
            )
        db.execute(
            "UPDATE vhpc_writer SET epoch = ?, serial = ?, holder = ?, seen = UNIX_TIMESTAMP() WHERE id = 1",
            (epoch + 1, serial + 1, self._holder),
        )
        self._epoch, self._serial, self._unknown = epoch + 1, serial, False  # ``committed`` counts this one

    def give(self, db: Database) -> None:
        """Say that this vhpcd has ended, in a transaction of the caller's; not if another has taken it."""
        db.execute(
            "UPDATE vhpc_writer SET serial = serial + 1, holder = ''"
            " WHERE id = 1 AND epoch = ? AND serial = ?",
            (self._epoch, self._serial),
        )

    @property
    def unknown(self) -> bool:
        """Whether a COMMIT has had no answer, and ``resolve`` has to be called."""
        return self._unknown

    def claim(self, db: Database) -> None:
        """Let this transaction write; FencedError when another vhpcd has taken the database."""
        found = db.execute(
            "UPDATE vhpc_writer SET serial = serial + 1, seen = UNIX_TIMESTAMP()"
            " WHERE id = 1 AND epoch = ? AND serial = ?",
            (self._epoch, self._serial),
        )
        if found.rowcount != 1:
            raise self._fenced(db)

    def committed(self) -> None:
        """The claimed transaction is durable."""
        self._serial += 1
        self._unknown = False

    def lost(self) -> None:
        """The COMMIT of the claimed transaction has had no answer."""
        self._unknown = True

    def resolve(self, db: Database) -> bool:
        """Whether the transaction without an answer is there; in a transaction of the caller's.

        The reading waits for the old session, if the server is still at its COMMIT.
        """
        epoch, serial = db.execute("SELECT epoch, serial FROM vhpc_writer WHERE id = 1 FOR UPDATE").fetchone()
        if epoch != self._epoch or serial not in (self._serial, self._serial + 1):
            raise self._fenced(db)
        there = bool(serial == self._serial + 1)
        self._serial, self._unknown = serial, False
        return there

    @staticmethod
    def _fenced(db: Database) -> FencedError:
        (holder,) = db.execute("SELECT holder FROM vhpc_writer WHERE id = 1").fetchone()
        return FencedError(
            "this vhpcd no longer has the database",
            f"{holder or 'another vhpcd'} has taken it, or the database was restored from a copy",
            "stop one of them; see vhpcd's log on both hosts",
        )
