# SPDX-License-Identifier: Apache-2.0
"""A database connection that counts rows: what a request costs, without a clock."""

from __future__ import annotations

from typing import Any


class Counting:
    """A connection that counts the rows that its user has got."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rows = 0

    def execute(self, statement: str, values: Any = (), /) -> Any:
        return _Rows(self, self._inner.execute(statement, values))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Rows:
    def __init__(self, counting: Counting, inner: Any) -> None:
        self._counting, self._inner = counting, inner

    def fetchone(self) -> Any:
        row = self._inner.fetchone()
        self._counting.rows += row is not None
        return row

    def fetchall(self) -> Any:
        rows = self._inner.fetchall()
        self._counting.rows += len(rows)
        return rows

    def __iter__(self) -> Any:
        return iter(self.fetchall())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
