# SPDX-License-Identifier: Apache-2.0
"""A user's permitted view, as a condition of a query."""

from __future__ import annotations

from vhpc_slurm.controller.store.sql import among
from vhpc_slurm.model import Viewer


def visible(viewer: Viewer | None, table: str = "lease") -> tuple[str, tuple[int | str, ...]]:
    """A condition to follow another one, and its values; empty for everything.

    ``table`` is one with the columns ``uid`` and ``account``.  Without accounts the condition is one
    equality, so that the database reads the user's own rows only.
    """
    if viewer is None or viewer.everything:
        return "", ()
    if not viewer.accounts:
        return f" AND {table}.uid = ?", (viewer.uid,)
    return (
        f" AND ({table}.uid = ? OR {table}.account IN {among(viewer.accounts)})",
        (viewer.uid, *viewer.accounts),
    )
