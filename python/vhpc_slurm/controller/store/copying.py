# SPDX-License-Identifier: Apache-2.0
"""All rows of one store into an empty one of another engine, in one transaction, compared before its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import zip_longest
from typing import Any

from vhpc_slurm.config import Config
from vhpc_slurm.controller.store.choice import lock_path, name, only_one, open_store
from vhpc_slurm.controller.store.sql import Database
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError, UserError

TABLES: dict[str, tuple[str, ...]] = {
    "lease": ("id",),
    "node": ("lease", "node"),
    "timeline": ("id",),
    "key_epoch": ("epoch",),
    "key_owner": ("pkey",),
    "key_claim": ("generation",),
    "segment": ("vni",),
    "segment_share": ("generation",),
    "readiness": ("lease", "node"),
    "ssh_key": ("lease",),
    "tunnel_key": ("lease",),
    "usage": ("lease", "node"),
    "node_report": ("id",),
    "checkpoint": ("id",),
    "checkpoint_node": ("checkpoint", "node"),
    "checkpoint_size": ("checkpoint",),
    "cluster": ("id",),
    "cluster_member": ("id",),
}
"""All tables, those that others refer to first, and the columns of their primary keys."""

_PAGE = 500
_MOST_BYTES = 1 << 20
_NOTHING = {"key_epoch": [(0, "")]}

Row = tuple[Any, ...]


def migrate(source: Config, target: Config) -> dict[str, int]:
    """Copy the leases from the engine of one configuration to that of the other; rows of each table.

    Raises:
        NodeError: a vhpcd of this host runs.
        UserError: the target has leases.
        FabricError: one of the databases cannot be used, a vhpcd of another host uses it, or a row
            is not in the target as it is in the source.
    """
    with only_one(lock_path(source)), closing(open_store(source)) as old, closing(open_store(target)) as new:
        return copy(old, new, name(source), name(target))


def copy(source: SqlStore, target: SqlStore, origin: str, destination: str) -> dict[str, int]:
    """Copy all rows; the target has all of them or none.

    Args:
        source: read only.
        target: must be empty.
        origin: the source's name, for messages.
        destination: the target's name.

    Raises:
        UserError: the target has rows.
        FabricError: a row in the target differs from its original.
    """
    counts = {}
    with source.transaction(), target.transaction():
        for table in TABLES:
            first = list(_rows(target.database, table, _columns(table, source.database), limit=2))
            if first != _NOTHING.get(table, []):
                raise UserError(
                    f"the {destination} is not empty",
                    f"its table {table} has rows",
                    "vhpc copies into an empty database only; is it in use already?",
                )
        target.database.execute("DELETE FROM key_epoch")
        for table in TABLES:
            columns = _columns(table, source.database)
            counts[table] = _insert(target.database, table, columns, _rows(source.database, table, columns))
        for table in TABLES:
            columns = _columns(table, source.database)
            pairs = zip_longest(
                _rows(source.database, table, columns), _rows(target.database, table, columns)
            )
            for number, (old, new) in enumerate(pairs, 1):
                if old != new:
                    raise FabricError(
                        f"row {number} of table {table} differs between {origin} and the {destination}",
                        "nothing was copied",
                        "see vhpcd's documentation of both engines, docs/install.md",
                    )
    target.forget()
    return counts


def _columns(table: str, db: Database) -> tuple[str, ...]:
    """The columns of a table in SQLite, which has the same ones as the other engine."""
    found: Any = db.execute(f'SELECT * FROM "{table}" LIMIT 0')  # noqa: S608 - a constant of this module
    return tuple(one[0] for one in found.description)


def _rows(db: Database, table: str, columns: tuple[str, ...], limit: int = 1 << 62) -> Iterator[Row]:
    """Rows in the order of the primary key, some at a time: bodies of leases may have megabytes."""
    keys = TABLES[table]
    places = [columns.index(key) for key in keys]
    listed = ", ".join(columns)
    where, values, given = "", (), 0
    while given < limit:
        page = db.execute(
            f'SELECT {listed} FROM "{table}"{where} ORDER BY {", ".join(keys)} LIMIT ?',  # noqa: S608
            (*values, min(_PAGE, limit - given)),
        ).fetchall()
        if not page:
            return
        yield from (tuple(row) for row in page)
        given += len(page)
        last = tuple(page[-1][place] for place in places)
        if len(keys) == 1:
            where, values = f" WHERE {keys[0]} > ?", last
        else:
            where = f" WHERE {keys[0]} > ? OR ({keys[0]} = ? AND {keys[1]} > ?)"
            values = (last[0], *last)


def _insert(db: Database, table: str, columns: tuple[str, ...], rows: Iterator[Row]) -> int:
    """Insert rows, many with one statement, as a server answers each."""
    one = f"({', '.join('?' * len(columns))})"
    begin = f'INSERT INTO "{table}" ({", ".join(columns)}) VALUES '  # noqa: S608 - constants
    count, size = 0, 0
    waiting: list[Row] = []

    def flush() -> None:
        nonlocal size
        if waiting:
            db.execute(begin + ", ".join([one] * len(waiting)), [value for row in waiting for value in row])
            waiting.clear()
            size = 0

    for row in rows:
        waiting.append(row)
        count += 1
        size += sum(len(value) for value in row if isinstance(value, (bytes, str)))
        if len(waiting) >= _PAGE or size >= _MOST_BYTES:
            flush()
    flush()
    return count
