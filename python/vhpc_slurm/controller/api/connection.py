# SPDX-License-Identifier: Apache-2.0
"""One accepted connection: a request comes in, an answer goes out.

A node sends its request as soon as it is connected, and takes the whole answer at once. So the
socket is read and written directly: asyncio's streams, with a transport, a buffer and two tasks
for each connection, took two fifths of the event loop's turns for a request.
"""
# Decision: Connections without asyncio's streams

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Coroutine
from typing import Any, TypeVar

CHUNK = 65536

Result = TypeVar("Result")


class Connection:
    """Belongs to the event loop; the socket does not block.

    Attributes:
        socket: the connection.
        error: the errno that has ended it; 0: none has.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.error = 0
        self._loop = asyncio.get_running_loop()

    def set_option(self, level: int, name: int, value: int) -> None:
        """Set an option of the socket, if that is possible."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(level, name, value)

    def unconfirmed(self) -> int:
        """How many bytes that were sent the peer's kernel has not confirmed (SIOCOUTQ in tcp(7))."""
        try:
            found = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(found, sys.byteorder)

    async def receive(self, most: int) -> bytes:
        """From 1 to ``most`` bytes, and at most CHUNK; EOFError when no more will come."""
        data = await self._loop.sock_recv(self.socket, min(most, CHUNK))
        if not data:
            raise EOFError
        return data

    async def send(self, data: bytes) -> None:
        """Give all of it to the kernel."""
        try:
            await self._loop.sock_sendall(self.socket, data)
        except OSError as err:
            self.error = err.errno or 0
            raise

    async def unless_gone(self, answer: Coroutine[Any, Any, Result]) -> Result | None:
        """Run a coroutine; cancel it, and return None, when the peer disconnects or says anything more."""
        task, number = asyncio.current_task(), self.socket.fileno()
        assert task is not None
        gone = False

        def readable() -> None:
            nonlocal gone
            gone = True
            self.error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._loop.remove_reader(number)
            task.cancel()

        self._loop.add_reader(number, readable)
        try:
            return await answer
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                return None
            raise
        finally:
            if not gone:
                self._loop.remove_reader(number)
