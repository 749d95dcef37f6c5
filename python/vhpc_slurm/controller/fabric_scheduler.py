# SPDX-License-Identifier: Apache-2.0
"""When the fabric is changed: batches are put together here, and run in a thread of their own.

Nothing that does not need the fabric waits for it.  Those that come within a
moment share a batch, and between two batches there is a pause, since the subnet
manager answers nobody while it sweeps; what only leaves has more time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from vhpc_slurm.controller.fabric_sync import FabricSync, Results
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.fabric.filewatch import FileWatch
from vhpc_slurm.model import Generation, LeaseRecord

log = logging.getLogger("vhpcd")

GATHER_S = 0.5
"""How long a batch waits for leases that are being made."""
LINGER_S = 1.0
"""How long what leaves waits for company where nothing comes."""
CALM_S = 1.0
"""So long after a change of ours the fabric is audited: what comes next need not wait for that."""
NOTICE_S = 0.02
"""What is noticed within so many seconds is looked at once."""

Result = TypeVar("Result")


class FabricScheduler:
    """One for each vhpcd; belongs to its event loop."""

    def __init__(self, fabric_sync: FabricSync, *, interval_s: float, deadline_s: float) -> None:
        """``interval_s`` lies between two batches; a start that is not served in ``deadline_s`` fails."""
        self._fabric_sync = fabric_sync
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "fabric")
        self._coming: dict[Generation, asyncio.Future[LeaseRecord]] = {}
        self._arriving = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._starts = asyncio.Event()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._audit = asyncio.Event()
        self._disturbed = False
        self._news = False
        self._asking: asyncio.Task[None] | None = None
        self._filewatch: FileWatch | None = None
        self._last_batch = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def ready(self, generation: Generation) -> LeaseRecord:
        """The lease when it is READY.

        Raises:
            FabricError: the fabric will not, the lease is over, or it takes too long; the lease stays
                RESERVED, and may be asked for again.
        """
        future = self._coming.get(generation)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._coming[generation] = future
            # Whoever asked may have gone away by then.
            future.add_done_callback(lambda one: one.cancelled() or one.exception())
        self._starts.set()
        self.poke()
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise FabricError(
                f"the fabric did not carry {generation} within {self._deadline_s:g} s",
                "it is busy with others, or does not answer",
                "see the log of vhpcd",
            ) from None

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """While one is in it, a lease is being made, and a batch had better wait a moment for it."""
        self._arriving += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            if not self._arriving:
                self._settled.set()

    def poke(self) -> None:
        """Something changed that the fabric should know of."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run_batches())
        self._wake.set()

    async def run(self, call: Callable[[], Result]) -> Result:
        """Do something else with the fabric, between two batches."""
        # What has begun is finished, even when its client has gone away.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, call))

    async def audit_due(self, seconds: float) -> None:
        """Wait so long, or until something is to be looked at.

        That is a batch that has changed something, a moment after it, or what others did, at once.
        """
        await _within(seconds, self._audit)
        if self._changed.is_set() and not self._disturbed:
            # What comes next need not wait for the audit.
            await asyncio.sleep(min(CALM_S, seconds))
        self._audit.clear()
        self._changed.clear()
        self._disturbed = False

    def watch(self) -> None:
        """Have the backend tell of what others do; FabricError when it cannot."""
        loop = asyncio.get_running_loop()
        self._filewatch = self._fabric_sync.network.watch(lambda: _soon(loop, self._noticed))

    def _noticed(self) -> None:
        """Ask, between two batches, whether that was somebody else."""
        self._news = True
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            while self._news:
                await asyncio.sleep(NOTICE_S)
                self._news = False
                if await self.run(self._fabric_sync.network.disturbed):
                    self._disturbed = True
                    self._audit.set()
        finally:
            self._asking = None

    def close(self) -> None:
        """End after what runs; the rest is found again at the next start."""
        if self._filewatch is not None:
            self._filewatch.close()
        for task in (self._task, self._asking):
            if task is not None:
                task.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run_batches(self) -> None:
        while True:
            await self._wake.wait()
            await self._gather()
            self._wake.clear()
            self._starts.clear()
            coming, self._coming = self._coming, {}
            before = self._fabric_sync.changes
            try:
                results: Results = await self.run(partial(self._fabric_sync.run_batch, tuple(coming)))
            except VhpcError as err:
                log.error("the fabric was not changed: %s", err.line())
                results = {generation: _as_fabric(err) for generation in coming}
            except Exception:
                log.exception("internal error")
                results = {}
            if self._fabric_sync.changes != before:
                self._last_batch = asyncio.get_running_loop().time()
                self._changed.set()
                self._audit.set()
            for generation, future in coming.items():
                _resolve(future, results.get(generation))

    async def _gather(self) -> None:
        pause_s = self._last_batch + self._interval_s - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        if not self._coming:
            await _within(LINGER_S, self._starts)
        await _within(GATHER_S, self._settled)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # vhpcd ends
        loop.call_soon_threadsafe(call)


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _resolve(future: asyncio.Future[LeaseRecord], result: LeaseRecord | FabricError | None) -> None:
    if future.done():
        return
    if isinstance(result, LeaseRecord):
        future.set_result(result)
    else:
        future.set_exception(result or FabricError("vhpcd failed", hint="see its log"))


def _as_fabric(err: VhpcError) -> FabricError:
    return err if isinstance(err, FabricError) else FabricError(err.what, err.why, err.hint)
