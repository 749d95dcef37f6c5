# SPDX-License-Identifier: Apache-2.0
"""The store's statements in MariaDB's words.

The statements are a closed set of constants, and the contract tests run all of them in both
engines. Only three things differ: the sign of a value, the clause for a row that exists, and
which columns it may name.
"""
# Decision: Leases in two database engines by the same statements

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_CONFLICT = re.compile(r" ON CONFLICT(?: \([a-z_, ]+\))? DO UPDATE SET ")
_EXCLUDED = re.compile(r"\bexcluded\.([a-z_]+)")
_SELECTED = re.compile(r"^(INSERT INTO \S+ \([^)]*\)) (SELECT .*)$", re.DOTALL)


class Translated(NamedTuple):
    """A statement for the server.

    Attributes:
        text: the statement, with ``%s`` for each value.
        changes: whether it changes rows.
    """

    text: str
    changes: bool


@lru_cache(maxsize=512)
def translated(statement: str) -> Translated:
    """A statement of the store in MariaDB's words."""
    assert "%" not in statement, "the client library would take it for a value"
    text, conflict, update = statement, _CONFLICT.search(statement), ""
    if conflict is not None:
        text = statement[: conflict.start()]
        update = " ON DUPLICATE KEY UPDATE " + _EXCLUDED.sub(r"VALUES(\1)", statement[conflict.end() :])
        if (selected := _SELECTED.match(text)) is not None:
            # Else the columns of the table that is read from are ambiguous in the clause.
            text = f"{selected[1]} SELECT * FROM ({_named(selected[2])}) AS source"  # noqa: S608
    return Translated(
        (text + update).replace("?", "%s"), statement.startswith(("INSERT", "UPDATE", "DELETE"))
    )


def _named(select: str) -> str:
    """A SELECT whose columns that are values have names: a derived table must not have one twice."""
    columns, rest = select.removeprefix("SELECT ").split(" FROM ", 1)
    names = [f"{column} AS c{number}" for number, column in enumerate(columns.split(", "))]
    return f"SELECT {', '.join(names)} FROM {rest}"  # noqa: S608 - from constants of this package
