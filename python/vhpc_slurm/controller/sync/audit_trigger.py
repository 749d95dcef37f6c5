# SPDX-License-Identifier: Apache-2.0
"""When the fabric is audited: at intervals, after a change by vhpcd, and at once after a change by others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from vhpc_slurm.controller.sync.scheduler import FabricThread, wait_within
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.fabric.filewatch import FileWatch

CALM_S = 1.0
"""An audit after a change by vhpcd begins this much later: jobs that start next need not wait for it."""
NOTICE_S = 0.02
"""File events within this time are examined together."""


class AuditTrigger:
    """Says when the next audit is due; belongs to the event loop."""

    def __init__(self, network: NetworkBackend, thread: FabricThread) -> None:
        self._network = network
        self._thread = thread
        self._changed = asyncio.Event()
        self._audit = asyncio.Event()
        self._disturbed = False
        self._news = False
        self._asking: asyncio.Task[None] | None = None
        self._filewatch: FileWatch | None = None

    def changed(self) -> None:
        """vhpcd has changed the fabric."""
        self._changed.set()
        self._audit.set()

    async def due(self, seconds: float) -> None:
        """Wait this long, or until the fabric was changed: by vhpcd a moment after it, by others at once."""
        await wait_within(seconds, self._audit)
        if self._changed.is_set() and not self._disturbed:
            await asyncio.sleep(min(CALM_S, seconds))
        self._audit.clear()
        self._changed.clear()
        self._disturbed = False

    def watch(self) -> None:
        """Have the backend watch for changes by others; FabricError when it cannot."""
        loop = asyncio.get_running_loop()
        self._filewatch = self._network.watch(lambda: _soon(loop, self._noticed))

    def close(self) -> None:
        """End the watch."""
        if self._filewatch is not None:
            self._filewatch.close()
        if self._asking is not None:
            self._asking.cancel()

    def _noticed(self) -> None:
        """Ask the backend, between two batches, whether another program changed the fabric."""
        self._news = True
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            while self._news:
                await asyncio.sleep(NOTICE_S)
                self._news = False
                if await self._thread.run(self._network.disturbed):
                    self._disturbed = True
                    self._audit.set()
        finally:
            self._asking = None


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: vhpcd stops
        loop.call_soon_threadsafe(call)
