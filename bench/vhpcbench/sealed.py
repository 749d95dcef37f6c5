# SPDX-License-Identifier: Apache-2.0
"""Requests to vhpcd that are sealed before they are timed, and answers that are received whole."""

from __future__ import annotations

import asyncio
import os

from vhpcd_process import Vhpcd, frame_of

from vhpc_slurm.controller.api import protocol as wire


def frame(vhpcd: Vhpcd, body: wire.Request) -> bytes:
    """The frame of a request."""
    return frame_of(vhpcd.munge().encode(wire.wrap("request", os.urandom(16).hex(), body), ttl_s=wire.TTL_S))


async def ask_all(vhpcd: Vhpcd, frames: list[bytes], at_once: int, limit_s: float) -> list[bytes]:
    """The sealed answers; at most ``at_once`` requests are open, and all take ``limit_s`` at most."""
    gate = asyncio.Semaphore(at_once)
    port = vhpcd.config.controller.port

    async def ask(frame: bytes) -> bytes:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(frame)
            (length,) = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
            answer = await reader.readexactly(length)
            writer.close()
            return answer

    return await asyncio.wait_for(asyncio.gather(*(ask(frame) for frame in frames)), limit_s)


def opened(vhpcd: Vhpcd, answer: bytes) -> object:
    """What a sealed answer says."""
    return wire.read_answer(wire.unwrap(vhpcd.munge().decode(answer).payload, "answer"))
