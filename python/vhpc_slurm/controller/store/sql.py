# SPDX-License-Identifier: Apache-2.0
"""The interface of a database engine for the statements of the store.

``sqlite3.Connection`` is such a ``Database`` as it is. Statements are SQLite's, restricted to what
``mariadialect`` translates; each is a constant of this package.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol


class Rows(Protocol):
    """The rows that a statement returned or changed."""

    def fetchone(self) -> Any:
        """The next row; None after the last one."""

    def fetchall(self) -> Sequence[Any]:
        """All further rows."""

    def __iter__(self) -> Iterator[Any]:
        """All further rows."""

    @property
    def rowcount(self) -> int:
        """How many rows an UPDATE has found, or a DELETE has deleted."""

    @property
    def lastrowid(self) -> int | None:
        """The serial number of the row that an INSERT made."""


class Database(Protocol):
    """A connection to a database; for one thread at a time."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction has begun and not ended."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        """Run a statement with a value for each ``?``; one of ``errors.ENGINE_ERRORS`` when it fails."""


def among(values: Collection[object]) -> str:
    """``(?, ?, …)`` for these values, to follow IN."""
    return f"({', '.join('?' * len(values))})" if values else "(NULL)"
