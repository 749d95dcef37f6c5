# SPDX-License-Identifier: Apache-2.0
"""Threads of a campaign, whose failures are noted, and its log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Background:
    """The data that users, faults and operator of a campaign share.

    Args:
        say: takes each line of the log.
        stop: no more jobs and faults may begin.
    """

    def __init__(self, say: Callable[[str], None], stop: threading.Event) -> None:
        self.stop = stop
        self.failures: list[str] = []
        self._say = say
        self._began = time.monotonic()

    def log(self, text: str) -> None:
        """One line with the time since the beginning."""
        self._say(f"{time.monotonic() - self._began:7.1f}  {text}")

    def safely(self, work: Callable[..., None], *args: object) -> None:
        """Do ``work``; if it fails, note that: what ends unheard would make the campaign look good."""
        try:
            work(*args)
        except Exception as err:
            self.failures.append(f"{work.__name__}{args}: {err!r}")
            self.log(f"BROKEN {self.failures[-1]}")

    def thread(self, work: Callable[..., None], *args: object) -> threading.Thread:
        """Do the same in a thread."""
        thread = threading.Thread(target=self.safely, args=(work, *args), daemon=True)
        thread.start()
        return thread
