# SPDX-License-Identifier: Apache-2.0
"""A vhpcd to time, requests that are sealed before they are timed, and answers that are received whole."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controller_lab import Munged, munged
from vhpcd_fabric import a_vhpcd
from vhpcd_process import Vhpcd, frame_of

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.munge import CredentialExpiredError
from vhpcbench.common import BenchError

BUSY = "this machine is too busy: vhpcd waits ten seconds for a request, and a request is valid for a minute"


@contextmanager
def timed_vhpcd(
    name: str, prepare: Callable[[Vhpcd], None] = lambda _: None
) -> Iterator[tuple[Vhpcd, Munged]]:
    """A vhpcd without a fabric, and its munged.  It compares jobs with Slurm's rarely."""
    with munged() as daemon, tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        with a_vhpcd(Path(folder), daemon, None, prepare, reconcile_s=600.0) as vhpcd:
            yield vhpcd, daemon


def frame(vhpcd: Vhpcd, body: wire.Request) -> bytes:
    """The frame of a request."""
    return frame_of(vhpcd.munge().encode(wire.wrap("request", os.urandom(16).hex(), body), ttl_s=wire.TTL_S))


async def ask_all(vhpcd: Vhpcd, frames: list[bytes], at_once: int, limit_s: float) -> list[bytes]:
    """The sealed answers; at most ``at_once`` requests are open, and all take ``limit_s`` at most.

    Raises:
        BenchError: vhpcd has closed a connection, or has not answered all.
    """
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

    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.gather(*(ask(frame) for frame in frames))
    except (OSError, EOFError, TimeoutError) as err:
        raise BenchError(f"vhpcd has not answered all of {len(frames)} requests ({err}); {BUSY}") from err


def opened(vhpcd: Vhpcd, answer: bytes) -> object:
    """What a sealed answer says; BenchError if it has expired."""
    try:
        return wire.read_answer(wire.unwrap(vhpcd.munge().decode(answer).payload, "answer"))
    except CredentialExpiredError as err:
        raise BenchError(f"an answer has expired before it was read; {BUSY}") from err
