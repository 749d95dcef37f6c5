# SPDX-License-Identifier: Apache-2.0
"""Which vhpcd may write to a database server, and whether its last transaction is there.

One row says it: ``epoch`` counts the vhpcd's that have taken the database, ``serial`` the
transactions that changed something. Each such transaction first raises the serial by a
statement that finds the row only with the epoch and the serial that this vhpcd knows. So
a vhpcd from which another one has taken the database changes nothing any more, whatever it
believes; and a COMMIT without an answer is decided by reading the row. The SQLite file
needs nothing of this: there the lock of the file decides.

Where several vhpcd share a database, one is active and the others are standbys (``standby``).
The active one changes the row at least every ``RENEW_S``, and ends its service when its last
change is older than ``STEP_DOWN_S``. A standby takes the database when it has not seen the row
change for ``TAKEOVER_S``, so no longer than the other one's service. Both are durations on
the clock of one host; clocks of two hosts are never compared.
"""
# Decision: A row fences a replaced vhpcd and decides a lost COMMIT

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.errors import FabricError

FRESH_S = 30.0
"""A vhpcd of another host that has written within this time, in seconds, is taken to be running."""
RENEW_S = 1.0
"""Seconds after which the active vhpcd changes the row, if no request has."""
STEP_DOWN_S = 6.0
"""Seconds after its last change at which the active vhpcd ends its service."""
TAKEOVER_S = 8.0
"""Seconds for which a standby must have seen no change; a quarter more, for clocks that run unevenly."""


class FencedError(FabricError):
    """Another vhpcd has taken the database."""


class NotInTurnError(FabricError):
    """Another vhpcd has the database, or took it a moment ago."""


@dataclass(frozen=True)
class Seen:
    """The row as a standby has seen it."""

    epoch: int
    serial: int
    holder: str


def uptime_s() -> float:
    """Seconds since this host was booted; they also pass while it is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Writership:
    """The right of this process to write; a ``Database`` asks it within its transactions."""

    def __init__(self, holder: str, clock: Callable[[], float] | None = None) -> None:
        """``holder`` names this vhpcd: its host, a colon and its process; ``clock`` is for tests."""
        self._holder = holder
        self._clock = clock or uptime_s
        self._epoch = -1
        self._serial = -1
        self._unknown = False
        self._claimed_at = self._renewed_at = float("-inf")

    @property
    def epoch(self) -> int:
        """The epoch that ``take`` has begun."""
        return self._epoch

    @property
    def age_s(self) -> float:
        """Seconds since the last durable change was sent to the server; any thread may ask."""
        return self._clock() - self._renewed_at

    def take(self, db: Database, after: Seen | None = None) -> None:
        """Take the database, in a transaction of the caller's.

        Epochs are at least the server's time in seconds. They thus rise also from one database to
        the next, such as one restored from a copy: nodes and files remember the highest epoch.

        Args:
            db: the database.
            after: the row as a standby has watched it; None: this is the only vhpcd.

        Raises:
            NotInTurnError: the row is not what the standby has watched.
            FabricError: a vhpcd on another host has it, and wrote to it a moment ago.
        """
        self._claimed_at = self._clock()
        epoch, serial, holder, now, age = db.execute(
            "SELECT epoch, serial, holder, FLOOR(UNIX_TIMESTAMP()), UNIX_TIMESTAMP() - seen"
            " FROM vhpc_writer WHERE id = 1 FOR UPDATE"
        ).fetchone()
        host = host_of(holder)
        if after is not None:
            if after != Seen(epoch, serial, holder):
                raise NotInTurnError("another vhpcd has the database", holder)
        elif host and host != host_of(self._holder) and age < FRESH_S:
            raise FabricError(
                "another vhpcd uses the database",
                f"{holder} wrote to it {max(0, int(age))} s ago",
                "stop it; one that has crashed can be replaced half a minute after its last change",
            )
        db.execute(
            "UPDATE vhpc_writer SET epoch = ?, serial = ?, holder = ?, seen = UNIX_TIMESTAMP() WHERE id = 1",
            (begun := max(epoch + 1, int(now)), serial + 1, self._holder),
        )
        self._epoch, self._serial, self._unknown = begun, serial, False  # ``committed`` counts this one

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
        self._claimed_at = self._clock()
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
        self._renewed_at = self._claimed_at

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


def host_of(holder: str) -> str:
    """The host of a vhpcd; empty: none has the database."""
    return holder.partition(":")[0]
