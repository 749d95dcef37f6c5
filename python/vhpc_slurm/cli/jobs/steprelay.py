# SPDX-License-Identifier: Apache-2.0
"""Connections to a guest through a step whose program is `vhpc-agent --forward` or `--forward-to`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import IO, Any

from vhpc_slurm.cli.jobs.forwardframes import ForwardError
from vhpc_slurm.cli.jobs.forwarding import READ_MAX, Forwarding
from vhpc_slurm.cli.jobs.jobguest import JobGuest
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.slurm.port import NoSuchJobError
from vhpc_slurm.slurm.steps import Step

AGENT = "/run/vhpc/vhpc-agent"
"""The agent in guests (guest/init/newroot.h)."""
Serve = Callable[[Forwarding, bool], Coroutine[Any, Any, None]]
"""Brings connections to a guest that has answered; also gets whether a program listens."""
HELLO_S = 120.0
"""How long a step may take to start."""
END_S = 5.0
"""How long Slurm may take to say that a job has ended whose step has."""


def say(line: str) -> None:
    """A line for the user."""
    print(f"vhpc: {line}", file=sys.stderr, flush=True)


async def pipes(source: IO[bytes], sink: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams of two open files, which stay open; no files of a disk."""
    loop = asyncio.get_running_loop()
    reader, unused = asyncio.StreamReader(limit=READ_MAX), asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(source.fileno()))
    )
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(unused), os.fdopen(os.dup(sink.fileno()), "wb", buffering=0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, unused, loop)


async def relay(step: Step, place: JobGuest, serve: Serve) -> Forwarding:
    """Relay until the output of the step ends, or ``serve`` does.

    Args:
        step: its program is the agent.
        place: the guest, for messages.
        serve: brings connections, once the guest has answered; also gets whether a program listens.

    Raises:
        UserError: the guest does not answer, or violates the protocol.
    """
    loop, own = asyncio.get_running_loop(), asyncio.current_task()
    assert own is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, own.cancel)
    output, to_guest = await pipes(step.stdout, step.stdin)
    forwarding = Forwarding(to_guest, say)
    tasks = [asyncio.create_task(forwarding.run(output))]
    try:
        try:
            async with asyncio.timeout(HELLO_S):
                listens = await forwarding.hello
        except asyncio.CancelledError:
            if not tasks[0].done():
                raise  # Ctrl-C
            await tasks[0]
            return forwarding
        tasks.append(asyncio.create_task(serve(forwarding, listens)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    except TimeoutError:
        raise UserError(
            f"the step in job {place.job_id} did not start",
            f"no answer within {HELLO_S:g} s",
            "see: squeue --steps",
        ) from None
    except ForwardError as err:
        raise UserError(f"{place} violates the protocol", str(err)) from err
    finally:
        for task in tasks:
            task.cancel()
        if not to_guest.is_closing():
            to_guest.transport.abort()
    return forwarding


def ended(step: Step, place: JobGuest, known: Callable[[Sequence[str]], VhpcError | None]) -> int:
    """Say why a step has ended: the job has, or it failed.

    Args:
        step: its output has ended.
        place: where it ran.
        known: the error of which these lines of its standard error tell.

    Raises:
        VhpcError: the step failed.
    """
    code = step.wait(END_S)
    until = time.monotonic() + END_S
    while True:
        if (error := known(step.complaints())) is not None:
            raise error
        try:
            found = place.jobs.state(place.job_id)
        except NoSuchJobError:
            break
        if found.ended or found.state == "COMPLETING":
            break
        if time.monotonic() > until:
            raise place.failure(step, code)
        time.sleep(0.5)
    say(f"job {place.job_id} has ended")
    return 0


def too_old(lines: Sequence[str], task: str) -> VhpcError | None:
    """The error of an image whose agent lacks an option, such as of one that cannot "forward ports"."""
    if not any("--forward" in line and "option" in line for line in lines):
        return None
    return UserError(
        f"the image of the job cannot {task}",
        "its agent is older than this command",
        "build or import the image again",
    )
