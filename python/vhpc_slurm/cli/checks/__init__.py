# SPDX-License-Identifier: Apache-2.0
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
class CheckResult:
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


def ok(check: str, what: str) -> CheckResult:
    """It is as it should be."""
    return CheckResult(check, Level.OK, what)


def warn(check: str, what: str, hint: str) -> CheckResult:
    """It works, but somebody will be surprised one day."""
    return CheckResult(check, Level.WARN, what, hint)


def error(check: str, what: str, hint: str) -> CheckResult:
    """Jobs fail, or are not what they claim to be, until this is repaired."""
    return CheckResult(check, Level.ERROR, what, hint)
