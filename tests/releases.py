# SPDX-License-Identifier: Apache-2.0
"""The record of releases, packaging/releases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).parents[1] / "packaging/releases"


@dataclass(frozen=True)
class Release:
    """A release: its version, the day (UTC, ISO 8601) and the commit."""

    version: str
    day: str
    commit: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version, for comparisons."""
        return tuple(int(part) for part in self.version.split("."))


def releases() -> tuple[Release, ...]:
    """All releases, oldest first; none before the first release."""
    lines = RECORD.read_text().splitlines()
    return tuple(Release(*line.split()) for line in lines if not line.startswith("#"))
