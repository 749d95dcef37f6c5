# SPDX-License-Identifier: Apache-2.0
"""Which leases an ordinary user may see, as a condition of a query."""

from __future__ import annotations

from vhpc_slurm.controller.store.sql import among
from vhpc_slurm.model import Viewer


def visible(viewer: Viewer | None) -> tuple[str, tuple[int | str, ...]]:
    """A condition on the table ``lease``, to follow another one, and its values; empty for everything.

    Without accounts the condition is one equality, so that the database reads the user's own rows only.
    """
    if viewer is None or viewer.everything:
        return "", ()
    if not viewer.accounts:
        return " AND lease.uid = ?", (viewer.uid,)
    return (
        f" AND (lease.uid = ? OR lease.account IN {among(viewer.accounts)})",
        (viewer.uid, *viewer.accounts),
    )
