# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a change of a job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Changes:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}

    def notify(self, job_id: int) -> None:
        """Something of the job has changed: requests that wait for it look again."""
        for change in self._waiting.get(job_id, ()):
            if not change.done():
                change.set_result(None)

    @contextlib.contextmanager
    def listening(self, job_id: int) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change; begin before the look, or one may be missed."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(change)
        try:
            yield change
        finally:
            listeners = self._waiting[job_id]
            listeners.discard(change)
            if not listeners:
                del self._waiting[job_id]
