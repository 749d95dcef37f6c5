# SPDX-License-Identifier: Apache-2.0
"""The store of a generation's secrets: ssh keys, keys of tunnels; given only to nodes that take the lease.

They are not in the lease, which every host of the cluster may read, and are deleted when it ends.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.model import Generation
from vhpc_slurm.undecodable import UNDECODABLE

Secret = TypeVar("Secret")
TABLES = ("ssh_key", "tunnel_key")


class SecretStore(Protocol[Secret]):
    """The port, for one kind of secret.  Changes happen inside the lease store's ``transaction`` only."""

    def get(self, generation: Generation) -> Secret | None:
        """The secret of a generation; None when it has none, or it cannot be read."""

    def add(self, generation: Generation, secret: Secret) -> None:
        """Store the secret of a READY lease that has none; else nothing changes."""


class SqlSecrets(Generic[Secret]):
    """Secrets in one table of the database."""

    def __init__(self, db: Database, table: str, kind: type[Secret]) -> None:
        """``table`` is one of ``TABLES``, ``kind`` what is stored in it."""
        assert table in TABLES
        self._db, self._table, self._kind = db, table, kind

    def get(self, generation: Generation) -> Secret | None:
        """The secret of a generation."""
        row = self._db.execute(
            f"SELECT {self._table}.body FROM {self._table}"  # noqa: S608 - a constant of this module
            f" JOIN lease ON lease.id = {self._table}.lease WHERE generation = ?",
            (str(generation),),
        ).fetchone()
        try:
            return None if row is None else msgspec.json.decode(row[0], type=self._kind)
        except UNDECODABLE:
            return None

    def add(self, generation: Generation, secret: Secret) -> None:
        """Store a secret."""
        assert self._db.in_transaction, "a change outside a transaction"
        self._db.execute(
            f"INSERT INTO {self._table} (lease, body)"  # noqa: S608 - a constant of this module
            " SELECT id, ? FROM lease WHERE generation = ? AND state = 'ready'"
            f" AND NOT EXISTS (SELECT 1 FROM {self._table} WHERE {self._table}.lease = lease.id)",
            (msgspec.json.encode(secret), str(generation)),
        )


def delete(db: Database, generation: Generation) -> None:
    """Delete all secrets of a generation."""
    assert db.in_transaction, "a change outside a transaction"
    for table in TABLES:
        db.execute(
            f"DELETE FROM {table} WHERE lease = (SELECT id FROM lease WHERE generation = ?)",  # noqa: S608
            (str(generation),),
        )
