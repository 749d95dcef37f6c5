# SPDX-License-Identifier: Apache-2.0
"""The time zone of this node, which its guests get."""

from __future__ import annotations

import os
from pathlib import Path

from vhpc_slurm.record import Record

MAX_BYTES = 65536
"""Longest file of a zone that is read; those of tzdata have up to 4 KB."""
_ZONES = "/zoneinfo/"


class TimeZone(Record, frozen=True):
    """A time zone.

    Attributes:
        name: as in /usr/share/zoneinfo, such as ``Europe/Berlin``; empty if it is not known.
        data: content of its file (tzfile(5)); empty if the host has none, which then means UTC.
    """

    name: str
    data: bytes


UTC = TimeZone("UTC", b"")


def of_host(root: Path = Path("/")) -> TimeZone:
    """The zone of /etc/localtime: a link into a folder ``zoneinfo``, or a copy of such a file.

    A copy has its name in /etc/timezone, if that is the name of the same zone.  Without a file, and with
    one that is not a zone's, the host is in UTC, as glibc takes it.
    """
    file = root / "etc/localtime"
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES)
    except OSError:
        return UTC
    if not data.startswith(b"TZif"):
        return UTC
    _, found, name = os.path.realpath(file).partition(_ZONES)
    return TimeZone(name if found else _named(root, data), data)


def _named(root: Path, data: bytes) -> str:
    """The name in /etc/timezone, if the zone of that name has the same data."""
    try:
        name = (root / "etc/timezone").read_text(encoding="utf-8").strip()
        zone = root / "usr/share/zoneinfo" / name
        return name if name and ".." not in name and zone.read_bytes() == data else ""
    except (OSError, UnicodeDecodeError):
        return ""
