# SPDX-License-Identifier: Apache-2.0
"""Results of checks of `vhpc doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a result; only an error makes jobs fail or run unsafely."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: its name, ``subject.thing``.
        level: its severity.
        what: the finding, one line.
        hint: what to do; empty when nothing has to be done.
    """

    check: str
    level: Level
    what: str
    hint: str = ""


def ok(check: str, what: str) -> CheckResult:
    """The check passed."""
    return CheckResult(check, Level.OK, what)


def warn(check: str, what: str, hint: str) -> CheckResult:
    """Jobs run, but something will fail or surprise users in some situation."""
    return CheckResult(check, Level.WARN, what, hint)


def error(check: str, what: str, hint: str) -> CheckResult:
    """Jobs fail, or run outside of their guests or limits, until this is repaired."""
    return CheckResult(check, Level.ERROR, what, hint)
