# SPDX-License-Identifier: Apache-2.0
"""Decides when the fabric is changed: gathers batches and runs them in the fabric thread.

Requests that do not need the fabric never wait for it. Generations that arrive
shortly after one another share a batch. Batches keep a minimum interval, because a
subnet manager answers no queries while it sweeps; a batch that only releases keys
waits longer for others to join it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from vhpc_slurm.controller.sync.batch import FabricBatches, Results, as_fabric
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.model import Generation, LeaseRecord

log = logging.getLogger("vhpcd")

GATHER_S = 0.5
"""A batch waits this long for leases that are being made."""
LINGER_S = 1.0
"""A batch that only releases keys waits this long for generations that start."""

Result = TypeVar("Result")


class FabricThread:
    """The one thread in which network backends are called."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "fabric")

    async def run(self, call: Callable[[], Result]) -> Result:
        """Run a call between two batches; a call that has begun ends also when its client disconnects."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, call))

    def close(self) -> None:
        """Wait for the call that runs; calls that wait are cancelled."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class BatchScheduler:
    """Gathers generations into batches; belongs to the event loop."""

    def __init__(
        self,
        batches: FabricBatches,
        thread: FabricThread,
        *,
        interval_s: float,
        deadline_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Two batches are ``interval_s`` apart; a generation that is not ready in ``deadline_s`` fails.

        ``changed`` is called after each batch that changed the fabric.
        """
        self._batches = batches
        self._thread = thread
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._changed = changed
        self._coming: dict[Generation, asyncio.Future[LeaseRecord]] = {}
        self._arriving = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._starts = asyncio.Event()
        self._wake = asyncio.Event()
        self._last_batch = float("-inf")
        self._task: asyncio.Task[None] | None = None

    async def ready(self, generation: Generation) -> LeaseRecord:
        """The lease when it is READY.

        Raises:
            FabricError: the fabric refuses it, the lease is over, or the deadline passed; the lease stays
                RESERVED, and the caller may ask again.
        """
        future = self._coming.get(generation)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._coming[generation] = future
            # The client may have disconnected by then.
            future.add_done_callback(lambda one: one.cancelled() or one.exception())
        self._starts.set()
        self.poke()
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise FabricError(
                f"the fabric did not carry {generation} within {self._deadline_s:g} s",
                "it is busy with other jobs, or does not answer",
                "see the log of vhpcd",
            ) from None

    @property
    def waiting(self) -> int:
        """How many generations wait for the next batch."""
        return len(self._coming)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """A lease is being made meanwhile: a batch waits a moment for it."""
        self._arriving += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            if not self._arriving:
                self._settled.set()

    def poke(self) -> None:
        """There is work for a batch."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run_batches())
        self._wake.set()

    def close(self) -> None:
        """Begin no further batch; the next vhpcd finds the remaining work in the database."""
        if self._task is not None:
            self._task.cancel()

    async def _run_batches(self) -> None:
        while True:
            await self._wake.wait()
            await self._gather()
            self._wake.clear()
            self._starts.clear()
            coming, self._coming = self._coming, {}
            before = self._batches.changes
            try:
                results: Results = await self._thread.run(partial(self._batches.run, tuple(coming)))
            except VhpcError as err:
                log.error("the fabric was not changed: %s", err.line())
                results = dict.fromkeys(coming, as_fabric(err))
            except Exception as err:
                log.exception("internal error")
                results = dict.fromkeys(coming, as_fabric(err))
            if self._batches.changes != before:
                self._last_batch = asyncio.get_running_loop().time()
                self._changed()
            for generation, future in coming.items():
                _resolve(future, results.get(generation))

    async def _gather(self) -> None:
        pause_s = self._last_batch + self._interval_s - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        if not self._coming:
            await wait_within(LINGER_S, self._starts)
        await wait_within(GATHER_S, self._settled)


async def wait_within(seconds: float, event: asyncio.Event) -> None:
    """Wait for an event, and no longer than so many seconds."""
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
