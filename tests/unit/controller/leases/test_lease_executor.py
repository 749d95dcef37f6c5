# SPDX-License-Identifier: Apache-2.0
"""Coroutines that have the database thread do something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from controller_lab import Alone

from vhpc_slurm.config import Config
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import NodeError
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.slurm import connect


@contextmanager
def an_executor() -> Iterator[LeaseExecutor]:
    store = SqliteStore(":memory:")
    alone = Alone(store, NoNetwork(), reserve_mib=0)
    vhpcd = assemble(Config(), alone.leases, NoNetwork(), connect(Config()))
    try:
        yield vhpcd.executor
    finally:
        vhpcd.close()
        store.close()


class Call:
    """A call that ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may, self.done = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, answer: str) -> str:
        self.begun.set()
        assert self.may.wait(60)
        self.done.set()
        return answer


def test_a_call_in_the_database_thread_gives_result_or_error() -> None:
    def fails() -> None:
        raise NodeError("it failed")

    async def run() -> None:
        with an_executor() as executor:
            assert await executor.write(lambda a, b: a + b, 1, b=2) == 3
            with pytest.raises(NodeError, match="it failed"):
                await executor.write(fails)

    asyncio.run(run())


def test_a_call_that_has_begun_ends_without_its_caller() -> None:
    async def run() -> None:
        call = Call()
        with an_executor() as executor:
            waiting = asyncio.create_task(executor.write(call, "answer"))
            await asyncio.to_thread(call.begun.wait, 60)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not call.done.is_set()
            call.may.set()
            assert await executor.write(lambda: "the next") == "the next"
            assert call.done.is_set()

    asyncio.run(run())


def test_a_call_that_waits_is_made_without_its_caller_too() -> None:
    """Its client may have disconnected: what it asked for happens all the same."""

    async def run() -> None:
        first, second = Call(), Call()
        second.may.set()
        with an_executor() as executor:
            before = asyncio.create_task(executor.write(first, "first"))
            await asyncio.to_thread(first.begun.wait, 60)
            waiting = asyncio.create_task(executor.write(second, "second"))
            await asyncio.sleep(0)
            waiting.cancel()
            first.may.set()
            assert await before == "first"
            assert await asyncio.to_thread(second.done.wait, 60)

    asyncio.run(run())
