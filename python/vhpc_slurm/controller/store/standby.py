# SPDX-License-Identifier: Apache-2.0
"""A vhpcd that waits for its turn: it watches the row of the active one, and takes the database after it."""
# Decision: The database decides which vhpcd is active

from __future__ import annotations

import time
from collections.abc import Callable

from vhpc_slurm.config.database import Database as Settings
from vhpc_slurm.controller.store import mariaschema, mariasession
from vhpc_slurm.controller.store.errors import EngineError
from vhpc_slurm.controller.store.mariadb import MariaDatabase
from vhpc_slurm.controller.store.mariastore import MariaStore, explain, own_name
from vhpc_slurm.controller.store.writership import TAKEOVER_S, FencedError, NotInTurnError, Seen, host_of


class Standby:
    """For one thread at a time."""

    def __init__(
        self,
        settings: Settings,
        owner: str,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects with the first look.

        Args:
            settings: the server, and how to reach it.
            owner: vhpcd's user, who may own the password file.
            name: of this vhpcd: its host and process. The caller holds the lock of the host's vhpcd,
                so a database that a vhpcd of this host has is free.
            clock: in seconds; it may stand still while the host is suspended, which only delays a takeover.
        """
        self._settings, self._owner = settings, owner
        self._name = name or own_name()
        self._clock = clock
        self._db = MariaDatabase(settings, owner)
        self._seen: Seen | None = None
        self._since = 0.0

    @property
    def holder(self) -> str:
        """Host and process of the active vhpcd as last seen; empty: none is known."""
        return self._seen.holder if self._seen is not None else ""

    def take(self) -> MariaStore | None:
        """The store, if it is this vhpcd's turn.

        Raises:
            FabricError: the server cannot be reached or used; ask again.
        """
        try:
            free = self._look()
        except EngineError as err:
            raise explain(err, self._settings) from err
        if free is None:
            return None
        try:
            store = MariaStore(self._settings, self._owner, self._name, free)
            with store.transaction():
                store.renew()  # reading all leases may have taken a while
        except (NotInTurnError, FencedError):
            return None
        self._db.close()
        return store

    def _look(self) -> Seen | None:
        """Read the row; returns it if the database is free."""
        asked = self._clock()
        try:
            found = self._read()
        except EngineError as err:
            if not mariasession.gone(err.code):
                raise
            found = self._read()  # another standby has taken the database, or the server was restarted
        if found == self._seen and asked - self._since >= TAKEOVER_S:
            return found
        if found != self._seen:
            # The change was made before it was read, so the active vhpcd had sent it before this moment.
            self._seen, self._since = found, self._clock()
        return found if host_of(found.holder) in ("", host_of(self._name)) else None

    def _read(self) -> Seen:
        if mariaschema.version(self._db) <= 0:
            return Seen(0, 0, "")  # no tables yet; MariaStore refuses those of another program
        row = self._db.execute("SELECT epoch, serial, holder FROM vhpc_writer WHERE id = 1").fetchone()
        return Seen(*row)

    def close(self) -> None:
        """End the connection."""
        self._db.close()
