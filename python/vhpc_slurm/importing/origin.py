# SPDX-License-Identifier: Apache-2.0
"""The part of a manifest that says where an image comes from, and when it was made."""

from __future__ import annotations

import os
import time
from typing import Any

from vhpc_slurm.errors import UserError

EPOCH_DIGITS = 11
"""Of SOURCE_DATE_EPOCH: until the year 5138."""


def created(found: dict[str, Any]) -> str:
    """The time of an imported image; the same source must give the same digest at any time.

    It is that of SOURCE_DATE_EPOCH, or when the container was made, or empty.

    Raises:
        UserError: SOURCE_DATE_EPOCH is no time.
    """
    wanted = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not wanted:
        return str(found.get("created") or "")
    if not (wanted.isascii() and wanted.isdecimal() and len(wanted) <= EPOCH_DIGITS):
        why = f"SOURCE_DATE_EPOCH is {wanted[:40]!r}, seconds since 1970 are expected"
        raise UserError("cannot import an image", why)
    return date(int(wanted))


def date(seconds: float) -> str:
    """A time as a manifest has it, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def origin(builder: str, parent: str, source: str, found: dict[str, Any], created: str) -> dict[str, Any]:
    """The manifest's key ``provenance``; ``found`` is the worker's result."""
    return {
        "builder": builder,
        "created": created,
        "parent": parent,
        "source": source,
        "source_digest": found.get("digest") or "",
    }
