# SPDX-License-Identifier: Apache-2.0
"""vhpcd's listening sockets: one port, and a separate accept queue for each kind of peer.

An accept queue is short, and a peer that fills it keeps out all others of the same
queue. So there are three sockets on the port (SO_REUSEPORT), and a BPF filter in the
kernel puts each new connection into the queue of its lane, by the packet's source: a
port below 1024, which takes root on that host; vhpcd's own host; or the rest. The rest
is accepted at a limited rate.
"""
# Decision: Three sockets on one port

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
from collections.abc import Callable
from enum import IntEnum

from vhpc_slurm.controller.api.admission import PRIVILEGED_PORTS
from vhpc_slurm.errors import FabricError

log = logging.getLogger("vhpcd")

BACKLOG = 1024
BUDGET = 64
"""Connections that are accepted before other events are handled."""
RATE, BURST = 1000.0, 500.0
"""Connections a second of the lane ``REST``, and the size of a burst."""
PAUSE_S = 0.05
SO_ATTACH_REUSEPORT_CBPF = 51


class Lane(IntEnum):
    """The socket that a connection waits at; the values are the order in which these are bound."""

    PRIVILEGED = 0
    OWN_HOST = 1
    REST = 2


Accepted = Callable[[socket.socket, tuple[str, int]], None]


class Listener:
    """Accepts until it is closed; belongs to the event loop."""

    def __init__(self, host: str, port: int, accepted: Accepted) -> None:
        """Bind; FabricError when the address cannot be bound."""
        self._accepted = accepted
        self._tokens, self._filled = BURST, 0.0
        try:
            self._sockets = _bound(host, port)
        except OSError as err:
            raise FabricError(
                f"vhpcd cannot listen on {host} port {port}",
                err.strerror or str(err),
                "check whether another vhpcd is running",
            ) from err

    def start(self) -> None:
        """Begin to accept."""
        for lane, listening in self._sockets.items():
            listening.listen(BACKLOG)
            self._resume(lane)
        if len(self._sockets) > 1:
            # The group of sockets has its order from now on.
            try:
                _steer(self._sockets[Lane.PRIVILEGED])
            except OSError as err:
                log.warning("all connections share one accept queue: %s", err.strerror)
                for lane in (Lane.OWN_HOST, Lane.REST):
                    self._pause(lane)
                    self._sockets.pop(lane).close()

    def close(self) -> None:
        """End."""
        for lane, listening in self._sockets.items():
            self._pause(lane)
            listening.close()

    def _resume(self, lane: Lane) -> None:
        if self._sockets[lane].fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._sockets[lane].fileno(), self._ready, lane)

    def _pause(self, lane: Lane) -> None:
        asyncio.get_running_loop().remove_reader(self._sockets[lane].fileno())

    def _ready(self, lane: Lane) -> None:
        limited = lane is Lane.REST
        for _ in range(BUDGET):
            if limited and not self._token():
                return self._rest(lane)
            try:
                connection, place = self._sockets[lane].accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            except OSError as err:
                log.warning("a connection cannot be accepted: %s", err.strerror)
                return self._rest(lane)
            connection.setblocking(False)
            self._accepted(connection, (str(place[0]), int(place[1])))
        return None

    def _rest(self, lane: Lane) -> None:
        self._pause(lane)
        asyncio.get_running_loop().call_later(PAUSE_S, self._again, lane)

    def _again(self, lane: Lane) -> None:
        if lane in self._sockets:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                self._resume(lane)

    def _token(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * RATE)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _bound(host: str, port: int) -> dict[Lane, socket.socket]:
    family, kind, proto, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    def one(*, several: bool) -> socket.socket:
        made = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, proto)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if several:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Connections inherit it: the end of a long answer is not held back.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.bind(place)
        except OSError:
            made.close()
            raise
        return made

    # With SO_REUSEPORT two vhpcd of one user could share the port; a bind without it finds the other.
    with contextlib.closing(one(several=False)) as alone:
        alone.listen(1)
    try:
        return {lane: one(several=True) for lane in Lane}
    except OSError as err:
        if err.errno != errno.ENOPROTOOPT:
            raise
        return {Lane.PRIVILEGED: one(several=False)}


# --- the filter: classic BPF, as in socket(7) and the kernel's networking/filter.rst ----------------

_NET = -0x100000 & 0xFFFFFFFF  # SKF_NET_OFF: what follows counts from the network header
_LD_W, _LD_H, _LD_B = 0x20, 0x28, 0x30
_TAX, _JEQ, _JEQ_X, _JGE, _AND, _RET = 0x07, 0x15, 0x1D, 0x35, 0x54, 0x06
_IPV4_PLAIN, _IPV6, _TCP = 0x45, 0x60, 6


def program() -> bytes:
    """The filter: it returns the number of the lane."""

    def load(size: int, offset: int) -> tuple[int, int, int, int]:
        return (size, 0, 0, (_NET + offset) & 0xFFFFFFFF)

    def give(lane: Lane) -> tuple[int, int, int, int]:
        return (_RET, 0, 0, lane)

    def same(source: int, target: int, words: int) -> list[tuple[int, int, int, int]]:
        """Go on where two addresses are equal; else to REST, which follows behind a return."""
        code = []
        for word in range(words):
            left = (words - 1 - word) * 4
            code += [
                load(_LD_W, source + 4 * word),
                (_TAX, 0, 0, 0),
                load(_LD_W, target + 4 * word),
                (_JEQ_X, 0, left + 1, 0),
            ]
        return [*code, give(Lane.OWN_HOST), give(Lane.REST)]

    def by_port(offset: int) -> list[tuple[int, int, int, int]]:
        return [load(_LD_H, offset), (_JGE, 1, 0, PRIVILEGED_PORTS), give(Lane.PRIVILEGED)]

    # IP options would move the fields at these offsets, so packets with options go to REST.
    ipv4 = [*by_port(20), *same(12, 16, 1)]
    ipv6 = [load(_LD_B, 6), (_JEQ, 1, 0, _TCP), give(Lane.REST), *by_port(40), *same(8, 24, 4)]
    code = [
        load(_LD_B, 0),
        (_JEQ, 0, len(ipv4), _IPV4_PLAIN),
        *ipv4,
        (_AND, 0, 0, 0xF0),
        (_JEQ, 1, 0, _IPV6),
        give(Lane.REST),
        *ipv6,
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def _steer(one: socket.socket) -> None:
    code = program()
    text = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog
    fprog = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text))
    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, fprog)
