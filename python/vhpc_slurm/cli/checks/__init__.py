"""What `vhpc doctor` looks at: one module per subject, each a source of findings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is; only an error keeps jobs from running as they should."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, ``subject.thing``.
        level: how bad it is.
        what: what was seen, one line.
        hint: what to do about it; empty when nothing is to be done.
    """

    check: str
    level: Level
    what: str
    hint: str = ""


def ok(check: str, what: str) -> Finding:
    """It is as it should be."""
    return Finding(check, Level.OK, what)


def warn(check: str, what: str, hint: str) -> Finding:
    """It works, but somebody will be surprised one day."""
    return Finding(check, Level.WARN, what, hint)


def error(check: str, what: str, hint: str) -> Finding:
    """Jobs fail, or are not what they claim to be, until this is repaired."""
    return Finding(check, Level.ERROR, what, hint)
