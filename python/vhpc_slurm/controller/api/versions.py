# SPDX-License-Identifier: Apache-2.0
"""Versions of the protocol, and messages as an earlier version has them.

A peer of an earlier version refuses a message with a field that it does not know, and does
not see unknown fields of dataclasses of the model (a request, an image) at all.  So a developer
who adds a field that a message may contain

1. raises ``VERSION``, once between two releases, and leaves ``OLDEST`` at
   the version of the previous release;
2. gives the field a default, with which it means what messages without it meant;
3. adds it to ``ADDED``.  ``needed`` is true if the receiver must not act without it: then a
   message in which it has another value than "nothing" is not sent to an older peer.

A new message needs the first step only: an older vhpcd refuses it with one line.
"""
# Decision: Older peers get messages without newer fields

from __future__ import annotations

from typing import Any

import msgspec

from vhpc_slurm.errors import FabricError
from vhpc_slurm.record import Record

VERSION = 1
"""The protocol of this vhpc."""
OLDEST = 1
"""The earliest protocol that it still reads: that of the previous release."""
EACH = "*"
"""In a path: each element of a list."""


class Added(Record, frozen=True):
    """A field that a version of the protocol has added.

    Attributes:
        since: that version.
        message: tag of the message.
        path: keys from the message to the field; EACH for the elements of a list.
        needed: whether a receiver must not act without it.
    """

    since: int
    message: str
    path: tuple[str, ...]
    needed: bool = True


ADDED: tuple[Added, ...] = ()
"""Fields that are newer than ``OLDEST``."""


def readable(version: int) -> bool:
    """Whether this vhpc reads messages of a version."""
    return OLDEST <= version <= VERSION


def rewrite(raw: bytes, version: int, added: tuple[Added, ...] | None = None) -> bytes:
    """A message of this version as one of an earlier ``version``; ``added`` is for tests.

    Raises:
        FabricError: it has a value that a peer of that version must not ignore.
    """
    body = msgspec.json.decode(raw)
    for one in ADDED if added is None else added:
        if one.since > version and body.get("type") == one.message:
            _remove(body, one.path, one)
    return msgspec.json.encode(body)


def _remove(found: Any, path: tuple[str, ...], added: Added) -> None:
    """Remove a field from each place that its path names.  None and empty values mean nothing."""
    key, *rest = path
    if key == EACH:
        for each in found or ():
            _remove(each, tuple(rest), added)
    elif isinstance(found, dict) and key in found:
        if rest:
            _remove(found[key], tuple(rest), added)
        elif (value := found.pop(key)) and added.needed:
            raise FabricError(
                f"an earlier vhpc does not know {'.'.join(added.path)}",
                f"it is {str(value)[:80]!r}, and the protocol has it since version {added.since}",
                "upgrade vhpc on all hosts; see docs/upgrade.md",
            )
