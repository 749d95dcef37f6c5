# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for a change of a job, or of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

Key = int | str
"""A JobId, or ``of_cluster``."""


def of_cluster(serial: int) -> Key:
    """The key of a cluster, by its number in the database."""
    return f"cluster {serial}"


class Changes:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Key, set[asyncio.Future[None]]] = {}

    def notify(self, key: Key) -> None:
        """Something of the job or cluster has changed: requests that wait for it look again."""
        for change in self._waiting.get(key, ()):
            if not change.done():
                change.set_result(None)

    @contextlib.contextmanager
    def listening(self, *keys: Key) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next change; begin before the look, or one may be missed."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiting.setdefault(key, set()).add(change)
        try:
            yield change
        finally:
            for key in keys:
                listeners = self._waiting[key]
                listeners.discard(change)
                if not listeners:
                    del self._waiting[key]
