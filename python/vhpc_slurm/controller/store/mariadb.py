# SPDX-License-Identifier: Apache-2.0
"""A connection to a MariaDB server that comes back: transactions, lost answers, deadlines.

A transaction is undone as a whole when one of its statements loses the connection, a
deadlock or a lock: from then on each of its statements fails, and so does its end. That the
calls of such a transaction may be run again is the affair of ``writer``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from vhpc_slurm.config.database import Database as Settings
from vhpc_slurm.controller.store import mariasession
from vhpc_slurm.controller.store.errors import EngineError
from vhpc_slurm.controller.store.mariadialect import translated
from vhpc_slurm.controller.store.sql import Rows
from vhpc_slurm.controller.store.writership import FencedError, Writership

if TYPE_CHECKING:
    import pymysql

UNKNOWN = -1
"""EngineError.code of a transaction that may have been committed."""
AGAIN_S = 1.0
"""After a connection has failed, further ones fail at once for so many seconds: many requests may wait."""


class MariaDatabase:
    """A ``sql.Database``; for one thread at a time."""

    def __init__(self, settings: Settings, owner: str, writership: Writership | None = None) -> None:
        """Connects with the first statement.

        Args:
            settings: the server, and how to reach it.
            owner: vhpcd's user, who may own the password file.
            writership: asked before the first change of each transaction; without it there are none.
        """
        self._settings, self._owner = settings, owner
        self._writership = writership
        self._connection: pymysql.Connection[Any] | None = None
        self._failed: tuple[float, EngineError] | None = None
        self._begun = self._claimed = False
        # whether the transaction had claimed the writer's row at each savepoint, which takes a claim back
        self._savepoints: dict[str, bool] = {}
        self._broken: EngineError | FencedError | None = None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and not ended; also one that the server has undone."""
        return self._begun

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        """Run a statement with a value for each ``?``; EngineError when it fails."""
        if self._broken is not None:
            raise self._broken
        text, changes = translated(statement)
        try:
            if changes and self._begun and not self._claimed and self._writership is not None:
                self._claimed = True
                if "vhpc_writer" not in text:  # else it is writership's own statement
                    self._writership.claim(self)
            done = self._send(text, values)
            self._follow(statement)
            return done
        except EngineError as err:
            if self._begun and mariasession.passes(err.code):
                self._broken = err
            raise
        except FencedError as err:
            self._broken = err  # else the next change of this transaction would be made
            raise

    def _follow(self, statement: str) -> None:
        """Know what a savepoint has taken back: perhaps the claim of this transaction."""
        if statement.startswith("SAVEPOINT "):
            self._savepoints[statement.rsplit(maxsplit=1)[-1]] = self._claimed
        elif statement.startswith("ROLLBACK TO SAVEPOINT "):
            self._claimed = self._savepoints[statement.rsplit(maxsplit=1)[-1]]

    def touch(self) -> None:
        """Have this transaction change the writer's row, whatever else it changes: a heartbeat.

        Raises:
            EngineError: the server cannot be reached.
            FencedError: another vhpcd has taken the database.
        """
        if self._broken is not None:
            raise self._broken
        if self._claimed or self._writership is None:
            return
        self._claimed = True
        try:
            self._writership.claim(self)
        except FencedError as err:
            self._broken = err
            raise

    def _send(self, text: str, values: Sequence[Any] = ()) -> Rows:
        import pymysql

        connection = self._connected()
        try:
            cursor = connection.cursor()
            cursor.execute(text, tuple(values) or None)
        except (pymysql.Error, OSError, RuntimeError) as err:
            found = mariasession.translated(err)
            if mariasession.gone(found.code):
                self._drop()
            raise found from err
        return cast(Rows, cursor)

    def _connected(self) -> pymysql.Connection[Any]:
        if self._connection is not None:
            return self._connection
        if self._begun:
            raise EngineError(2006, "the connection is lost")
        if self._failed is not None and time.monotonic() - self._failed[0] < AGAIN_S:
            raise self._failed[1]
        try:
            self._connection = mariasession.connect(self._settings, self._owner)
        except EngineError as err:
            self._failed = (time.monotonic(), err)
            raise
        self._failed = None
        return self._connection

    def begin(self) -> None:
        """Begin a transaction; over a new connection where the old one is lost.

        Raises:
            EngineError: the server cannot be reached.
            FencedError: another vhpcd has taken the database.
        """
        self.settle()
        try:
            self._send("BEGIN")
        except EngineError as err:
            if self._connection is not None or not mariasession.gone(err.code) or self._failed is not None:
                raise
            self._send("BEGIN")  # the server has ended an idle session, or was restarted
        self._begun, self._claimed, self._broken = True, False, None

    def commit(self) -> None:
        """End a transaction; what it changed is durable.

        A COMMIT without an answer is looked up over a new connection.

        Raises:
            EngineError: the transaction was undone. With the code UNKNOWN its outcome cannot be read
                now; the next ``begin`` reads it.
            FencedError: it was undone, as another vhpcd has taken the database.
        """
        if self._broken is not None:
            raise self._broken
        fence = self._writership if self._claimed else None
        try:
            self._send("COMMIT")
        except EngineError as err:
            if fence is None or not mariasession.gone(err.code):
                raise
            fence.lost()
            self._end()
            if not self._settled():
                raise
            return
        self._end()
        if fence is not None:
            fence.committed()

    def _settled(self) -> bool:
        try:
            return self.settle()
        except EngineError as err:
            raise EngineError(UNKNOWN, f"no answer to COMMIT, and then: {err}") from err

    def settle(self) -> bool:
        """Read whether a transaction whose COMMIT had no answer is there; true if nothing is open."""
        if self._writership is None or not self._writership.unknown:
            return True
        until = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                with self._reading():
                    return self._writership.resolve(self)
            except EngineError:
                # A server that was restarted is back after a moment.
                if time.monotonic() + AGAIN_S >= until:
                    raise
                time.sleep(AGAIN_S)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self._send("BEGIN")
        try:
            yield
        finally:
            with contextlib.suppress(EngineError):
                self._send("ROLLBACK")

    def rollback(self) -> None:
        """Undo a transaction; nothing when there is none."""
        if not self._begun:
            return
        self._end()
        try:
            if self._connection is not None:
                self._send("ROLLBACK")
        except EngineError:
            self._drop()  # the server undoes what a lost session has begun

    def _end(self) -> None:
        self._begun = self._claimed = False
        self._broken = None

    def _drop(self) -> None:
        if self._connection is not None:
            mariasession.drop(self._connection)
            self._connection = None

    def close(self) -> None:
        """End the connection."""
        self._end()
        self._drop()
