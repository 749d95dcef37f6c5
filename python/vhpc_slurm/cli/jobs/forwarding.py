# SPDX-License-Identifier: Apache-2.0
"""Connections of this host, each a channel to a port of a guest, over one pair of streams.

The guest is not trusted: each frame is checked, and what is kept for a connection is bounded.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from vhpc_slurm.cli.jobs.forwardframes import (
    CHANNELS,
    CLOSE,
    CREDIT,
    DATA,
    DATA_MAX,
    EOF,
    HELLO,
    LISTENING,
    OPEN,
    OPENED,
    VERSION,
    WINDOW,
    Decoder,
    ForwardError,
    Frame,
    pack,
)

READ_MAX = 65536
_RESET = struct.pack("ii", 1, 0)


class _Channel:
    """One connection: what is on its way to the client, and how much may be sent to the guest."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number, self.writer = number, writer
        self.credit, self.taken, self.kept = WINDOW, 0, 0
        self.waiting: deque[bytes] = deque()
        self.opened = self.ended = False
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def accept(self, data: bytes) -> None:
        """Data of the guest for the client."""
        if self.ended:
            raise ForwardError("data after the end")
        self.kept += len(data)
        if self.kept > WINDOW:
            raise ForwardError("more data than was allowed")
        self.waiting.append(data)
        self.changed.set()

    def reset(self) -> None:
        """Let the client see a connection that was reset."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.writer.transport.abort()


class Forwarding:
    """The login host's end of the protocol."""

    def __init__(self, to_guest: asyncio.StreamWriter, say: Callable[[str], None]) -> None:
        """Send frames to ``to_guest``; ``say`` gets lines for the user."""
        self._to_guest, self._say = to_guest, say
        self._channels: dict[int, _Channel] = {}
        self._last = 0
        self._decoder = Decoder()
        self._failed: set[int] = set()
        self.hello: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether a program listened on the port when the guest answered."""
        self.answered = False
        """Whether the guest has sent data on a channel."""

    async def run(self, from_guest: asyncio.StreamReader) -> None:
        """Read frames until the stream ends; ForwardError if the guest violates the protocol."""
        try:
            while data := await from_guest.read(READ_MAX):
                self.feed(data)
        finally:
            if not self.hello.done():
                self.hello.cancel()

    def feed(self, data: bytes) -> None:
        """Take bytes of the guest."""
        for frame in self._decoder.feed(data):
            if frame.kind == HELLO:
                self._take_hello(frame)
            elif not self.hello.done():
                raise ForwardError("a frame before the first one")
            elif frame.kind == OPEN or frame.channel > self._last:
                raise ForwardError("a channel that this host has not opened")
            elif (channel := self._channels.get(frame.channel)) is not None:
                self._take(channel, frame)

    def _take_hello(self, frame: Frame) -> None:
        if self.hello.done():
            raise ForwardError("two first frames")
        version, flags = frame.number & 0xFFFF, frame.number >> 16
        if version != VERSION:
            raise ForwardError(f"version {version} of the protocol, this host has {VERSION}")
        self.hello.set_result(bool(flags & LISTENING))

    def _take(self, channel: _Channel, frame: Frame) -> None:
        if frame.kind == DATA:
            if not channel.opened:
                raise ForwardError("data of a channel that is not connected")
            channel.accept(frame.payload)
            self.answered = True
        elif frame.kind == CREDIT:
            channel.credit += frame.number
            if not 0 < frame.number <= WINDOW or channel.credit > WINDOW:
                raise ForwardError("more credit than was used")
        elif frame.kind == CLOSE:
            self._refused(channel, frame.number)
        elif (channel.opened if frame.kind == OPENED else channel.ended) is True:
            raise ForwardError("a frame that comes once came twice")
        elif frame.kind == OPENED:
            channel.opened = True
            self._failed.clear()
        else:
            channel.ended = True
        channel.changed.set()

    def _refused(self, channel: _Channel, number: int) -> None:
        """The guest has closed a connection: say why, once until one succeeds."""
        if not channel.opened and number not in self._failed:
            self._failed.add(min(number, 4096))
            why = (
                "nothing listens on the port" if number == errno.ECONNREFUSED else os.strerror(number % 4096)
            )
            self._say(f"a connection was refused in the guest: {why}")
        del self._channels[channel.number]
        channel.reset()
        if channel.task is not None:
            channel.task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection of a client to its end."""
        if len(self._channels) >= CHANNELS:
            if errno.EMFILE not in self._failed:
                self._failed.add(errno.EMFILE)
                self._say(f"a connection was refused: {CHANNELS} are open")
            writer.transport.abort()
            return
        self._last += 1
        channel = self._channels[self._last] = _Channel(self._last, writer)
        channel.task = asyncio.create_task(self._relay(channel, reader))
        try:
            await asyncio.wait([channel.task])
        except asyncio.CancelledError:
            # The command ends.  asyncio would print a traceback if this task ended as cancelled.
            channel.task.cancel()

    async def _relay(self, channel: _Channel, reader: asyncio.StreamReader) -> None:
        try:
            self._to_guest.write(pack(OPEN, channel.number))
            await self._to_guest.drain()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._upward(channel, reader))
                both.create_task(self._downward(channel))
            channel.writer.close()
        except* (OSError, EOFError) as errors:
            # either the client is gone, or the step is; run() ends for the latter
            first = errors.exceptions[0]
            number = getattr(first, "errno", None) or errno.ECONNRESET
            if self._channels.pop(channel.number, None) is not None and not self._to_guest.is_closing():
                self._to_guest.write(pack(CLOSE, channel.number, number))
            channel.reset()
        finally:
            self._channels.pop(channel.number, None)

    async def _upward(self, channel: _Channel, reader: asyncio.StreamReader) -> None:
        """From the client to the guest."""
        while True:
            while channel.credit == 0:
                await _change(channel)
            data = await reader.read(min(channel.credit, DATA_MAX))
            if not data:
                break
            channel.credit -= len(data)
            self._to_guest.write(pack(DATA, channel.number, data))
            await self._to_guest.drain()
        self._to_guest.write(pack(EOF, channel.number))

    async def _downward(self, channel: _Channel) -> None:
        """From the guest to the client."""
        while channel.waiting or not channel.ended:
            if not channel.waiting:
                await _change(channel)
                continue
            data = channel.waiting.popleft()
            channel.writer.write(data)
            await channel.writer.drain()
            channel.taken += len(data)
            if channel.taken >= WINDOW // 4 and not channel.ended:
                channel.kept -= channel.taken
                self._to_guest.write(pack(CREDIT, channel.number, channel.taken))
                channel.taken = 0
        if channel.writer.can_write_eof():
            channel.writer.write_eof()


async def _change(channel: _Channel) -> None:
    """Wait until a frame of the guest has changed the channel."""
    channel.changed.clear()
    await channel.changed.wait()
