# SPDX-License-Identifier: Apache-2.0
"""Connections of a client to the hosts with a vhpcd; a host that does not answer delays no other.

With several hosts a client asks them in order. One that says nothing may be frozen, or at work:
its connection stays open while the next ones are asked. All requests may be repeated.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from vhpc_slurm import rootport
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.errors import FabricError

CONNECT_S, CONNECT_ALONE_S = 1.5, 5.0
"""The most seconds for a connection to one of several hosts, and to the only one.

One that is off does not answer at all, and the kernel's pauses between SYN packets double.
"""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4))
"""The kernel ends the connection to a host that is silent for six seconds (tcp(7))."""
NEXT_S, MOST_S = 1.0, 2.0
"""Seconds without an answer until another host is asked, and the most until one is asked again."""
CLOSED = "connection closed"
"""The error if vhpcd closes without an answer, as it does if munge does not authenticate the request."""
CLOSE_S = 0.5
"""Seconds to wait until vhpcd closes an answered connection."""


class Link(msgspec.Struct, eq=False):
    """A connection whose answer has not come.

    Attributes:
        host: as the configuration names it.
        nonce: of its request.
        socket: the connection.
        data: what has come of the answer.
    """

    host: str
    nonce: str
    socket: socket.socket
    data: bytearray = msgspec.field(default_factory=bytearray)

    def receive(self) -> bytes | None:
        """The answer, once all of it has come.

        Raises:
            OSError, EOFError: the connection has ended before.
            FabricError: the peer is not vhpcd.
        """
        size = wire.HEADER.size
        if len(self.data) >= size:
            size += wire.HEADER.unpack(self.data[:size])[0]
        if size > wire.MAX_MESSAGE + wire.HEADER.size:
            raise FabricError("the program at vhpcd's address is not vhpcd", f"a message of {size} bytes")
        chunk = self.socket.recv(min(size - len(self.data), 65536))
        if not chunk:
            raise EOFError(CLOSED)
        self.data += chunk
        if len(self.data) < size or len(self.data) == wire.HEADER.size:
            return None
        return bytes(self.data[wire.HEADER.size :])


class Round:
    """Asks each host, until an answer is accepted; a context manager, which closes all connections."""

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        deadline: float,
        sealed: Callable[[], tuple[str, bytes]],
        *,
        keep: bool = False,
    ) -> None:
        """``sealed`` makes a request, with its nonce; ``deadline`` by ``time.monotonic``.

        With ``keep`` the connection of the last answer stays open, for ``take``.
        """
        self._keep = keep
        self._answered: socket.socket | None = None
        self._hosts, self._port, self._deadline, self._sealed = tuple(hosts), port, deadline, sealed
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, Link] = {}
        self._queue = deque(self._hosts)
        self._pause_s, self._next = NEXT_S, 0.0
        self.refusals: dict[str, str] = {}

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *_: object) -> None:
        for link in tuple(self._open.values()):
            self._close(link)
        self._selector.close()
        if (answered := self.take()) is not None:
            answered.close()

    def take(self) -> socket.socket | None:
        """The connection of the last answer; the caller closes it."""
        answered, self._answered = self._answered, None
        return answered

    def answers(self) -> Iterator[tuple[Link, bytes]]:
        """Each answer that comes; a caller that continues has refused it, with the reason in ``refusals``.

        Raises:
            OSError: no host is left to be asked, or the deadline is over.
        """
        while True:
            self._ask_next()
            if not self._open:
                if not self._queue:
                    raise ConnectionError("; ".join(self.refusals.values()) or "nothing is configured")
                continue
            for link in self._readable():
                try:
                    answer = link.receive()
                except (OSError, EOFError) as err:
                    self._fail(link.host, err)
                    self._close(link)
                    continue
                if answer is None:
                    continue
                if self._keep:
                    self._forget(link)
                    self._answered = link.socket
                else:
                    rootport.wait_for_end(link.socket, min(CLOSE_S, max(0.001, self._left())))
                    self._close(link)
                yield link, answer
                if (refused := self.take()) is not None:
                    refused.close()
                self._go_on()

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _ask_next(self) -> None:
        """Ask one more host, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        if not self._queue and self._open:
            # Those that refused a while ago may be active now.
            self._queue.extend(host for host in self._hosts if host not in self._open)
            self._pause_s = min(2 * self._pause_s, MOST_S)
            if not self._queue:  # all are at it
                self._next = self._deadline
                return
        if not self._queue:
            return
        host = self._queue.popleft()
        self._next = now + self._pause_s
        until = min(self._deadline, now + (CONNECT_ALONE_S if len(self._hosts) == 1 else CONNECT_S))
        try:
            connection = rootport.connect(host, self._port, until)
        except OSError as err:
            self._fail(host, err)
            return
        nonce, sealed = self._sealed()
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, name, value)
            connection.settimeout(rootport.left(self._deadline))
            connection.sendall(wire.HEADER.pack(len(sealed)) + sealed)
        except OSError as err:
            connection.close()
            self._fail(host, err)
            return
        self._open[host] = Link(host, nonce, connection)
        self._selector.register(connection, selectors.EVENT_READ, self._open[host])

    def _readable(self) -> list[Link]:
        seconds = min(self._left(), max(0.0, self._next - time.monotonic()))
        if self._left() <= 0:
            waiting = ", ".join(self._open)
            raise TimeoutError("timed out" if len(self._hosts) == 1 else f"no answer of {waiting}")
        return [key.data for key, _ in self._selector.select(seconds)]

    def _fail(self, host: str, err: OSError | EOFError) -> None:
        said = str(err) or type(err).__name__
        self.refusals[host] = said if len(self._hosts) == 1 else f"{host}: {said}"
        self._go_on()

    def _go_on(self) -> None:
        """Ask the next host at once, but those that were asked already a while later."""
        self._next = 0.0 if self._queue else time.monotonic() + self._pause_s

    def _close(self, link: Link) -> None:
        self._forget(link)
        link.socket.close()

    def _forget(self, link: Link) -> None:
        del self._open[link.host]
        self._selector.unregister(link.socket)
