# SPDX-License-Identifier: Apache-2.0
"""A rate-limited log: a few lines of each kind per window, then the number of the suppressed ones."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

LINES = 5
WINDOW_S = 10.0


@dataclass
class _Kind:
    told: int = 0
    hidden: int = 0
    last: str = ""


class RateLimitedLog:
    """Belongs to the event loop.  ``kind`` is the format string of a line."""

    def __init__(self, log: logging.Logger, lines: int = LINES, window_s: float = WINDOW_S) -> None:
        self._log = log
        self._lines = lines
        self._window_s = window_s
        self._kinds: dict[str, _Kind] = {}

    def warning(self, kind: str, *arguments: object) -> None:
        """Log a line, or count it as suppressed."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind()
            asyncio.get_running_loop().call_later(self._window_s, self._over, kind)
        if found.told < self._lines:
            found.told += 1
            self._log.warning(kind, *arguments)
        else:
            found.hidden += 1
            found.last = kind % arguments

    def _over(self, kind: str) -> None:
        found = self._kinds.pop(kind)
        if found.hidden:
            self._log.warning(
                "%d more like this within %g s, the last: %s", found.hidden, self._window_s, found.last
            )
