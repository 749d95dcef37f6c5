# SPDX-License-Identifier: Apache-2.0
# promise: attack.forward
"""Fuzz what a guest sends to `vhpc forward` on a login host: a hostile guest writes all of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

from rig import InternalError, fuzz

from vhpc_slurm.cli.jobs.forwardframes import WINDOW, ForwardError
from vhpc_slurm.cli.jobs.forwarding import Forwarding

CLIENTS, PIECE = 3, 997


class Writer:
    """A client, or the step; reads all or nothing."""

    def __init__(self, reads: bool) -> None:
        self.reads, self.size, self.transport = reads, 0, self

    def write(self, data: bytes) -> None:
        self.size += len(data)

    async def drain(self) -> None:
        if not self.reads:
            await asyncio.Event().wait()

    def get_extra_info(self, _name: str) -> None:
        return None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    close = abort = write_eof

    def is_closing(self) -> bool:
        return False


async def _feed(data: bytes) -> None:
    forwarding = Forwarding(cast("Any", Writer(reads=True)), lambda _line: None)
    clients, tasks = [Writer(reads=number > 0) for number in range(CLIENTS)], []
    for client in clients:
        reader = asyncio.StreamReader()
        reader.feed_data(b"a request")
        tasks.append(asyncio.create_task(forwarding.serve(reader, cast("Any", client))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        for place in range(0, len(data), PIECE):
            forwarding.feed(data[place : place + PIECE])
            for _ in range(4):
                await asyncio.sleep(0)
            kept = sum(sum(map(len, channel.waiting)) for channel in forwarding._channels.values())
            if kept > CLIENTS * WINDOW or clients[0].size > WINDOW:
                raise InternalError(f"{kept} bytes are kept")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        forwarding.hello.cancel()


def one_input(data: bytes) -> None:
    """Three connections to a guest that says this."""
    with contextlib.suppress(ForwardError):
        asyncio.run(_feed(data))


if __name__ == "__main__":
    fuzz(one_input)
