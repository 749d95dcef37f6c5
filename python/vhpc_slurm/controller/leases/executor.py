# SPDX-License-Identifier: Apache-2.0
"""From the event loop into threads: changes into the database thread, blocking reads into others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.sync.scheduler import BatchScheduler

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SLOW_THREADS = 8


class LeaseExecutor:
    """Runs calls for coroutines; belongs to the event loop."""

    def __init__(
        self,
        writer: Writer,
        lifecycle: Lifecycle,
        scheduler: BatchScheduler,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``scheduler`` is told when a change leaves work for a batch; ``changed`` is called after each."""
        self._writer = writer
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._changed = changed
        self._slow = ThreadPoolExecutor(SLOW_THREADS, "slow")

    async def write(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a call in the database thread; its changes are durable when this returns.

        A call that has begun ends also when its client disconnects.
        """
        run = functools.partial(call, *args, **kwargs)
        done = await _awaitable(self._writer.submit(run))
        if self._lifecycle.has_leaving:
            self._scheduler.poke()
        self._changed()
        return done

    async def aside(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a call that may block on a file system or on Slurm."""
        run = functools.partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._slow, run)

    def close(self) -> None:
        """Finish what waits for the database; calls that block are abandoned."""
        self._writer.close()
        self._slow.shutdown(wait=False, cancel_futures=True)


def _awaitable(call: Future[Result]) -> asyncio.Future[Result]:
    """A future with the result of a call; cancelling the future does not cancel the call.

    ``shield(wrap_future(call))`` does the same with one more turn of the event loop.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Result] = loop.create_future()

    def settle() -> None:
        if waiting.cancelled():
            return
        err = call.exception()  # nothing cancels a call of the database thread
        if err is None:
            waiting.set_result(call.result())
        else:
            waiting.set_exception(err)

    def done(_: Future[Result]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: vhpcd stops
            loop.call_soon_threadsafe(settle)

    call.add_done_callback(done)
    return waiting
