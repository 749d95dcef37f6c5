# SPDX-License-Identifier: Apache-2.0
"""Serves blobs to other nodes of a lease: one thread with a selector, and a few for credentials and names.

Everything is bounded: connections, the time until a request is there, the time in which an asker
takes nothing, and the bytes that wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from msgspec import Struct, field

from vhpc_slurm import files
from vhpc_slurm.model import Blob
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import offers, wire
from vhpc_slurm.node.store.peers.offers import Offer
from vhpc_slurm.node.store.peers.wire import Ask, PeerError, Reply
from vhpc_slurm.record import Record

CONNECTIONS = 64
"""Of one listener. Two nodes ask a node, more only while others do not answer."""
ROOT_PORTS = 1024
CHECKS = 4
"""Threads that check requests: munged and the resolver may take their time."""
log = logging.getLogger("vhpc")


class Limits(Record, frozen=True):
    """Times in seconds.

    Attributes:
        request_s: from the connection to the end of the request.
        send_s: in which an asker must take something that was sent to it.
        wait_s: between two frames that say that nothing new is there.
        poll_s: between two looks whether something new is there.
        any_port: also serve askers whose port any user can have; only for tests.
    """

    request_s: float = 5.0
    send_s: float = 10.0
    wait_s: float = 1.0
    poll_s: float = 0.02
    any_port: bool = False


LIMITS = Limits()


class Place(Record, frozen=True):
    """Data for a listener: the node's files, and how names of nodes become addresses."""

    layout: Layout
    addresses: Callable[[str], frozenset[str]]


class _Granted(Record, frozen=True):
    """A request that may be served."""

    ask: Ask
    offer: Offer
    blob: Blob
    final: Path
    reply: bytes


class _Link(Struct, eq=False):
    """One connection."""

    sock: socket.socket
    place: Place
    address: str
    moved: float
    got: bytearray = field(default_factory=bytearray)
    judged: Future[_Granted] | None = None
    granted: _Granted | None = None
    file: int = -1
    at: int = 0
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    ends: bool = False
    told: float = 0.0
    writable: bool = False


class Server:
    """Serves listeners until ``stop``; not thread-safe but for ``stop``."""

    def __init__(self, by: wire.Seal, limits: Limits = LIMITS) -> None:
        """``by`` makes and checks credentials."""
        self._seal, self._limits = by, limits
        self._selector = selectors.DefaultSelector()
        self._checks = ThreadPoolExecutor(CHECKS, "peers")
        self._links: set[_Link] = set()
        self._per_listener: dict[socket.socket, Place] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._swept = 0.0
        self._stop = False
        self.idle_since = time.monotonic()

    def add(self, listener: socket.socket, place: Place) -> None:
        """Serve the connections of a listening socket."""
        listener.setblocking(False)
        self._per_listener[listener] = place
        self._selector.register(listener, selectors.EVENT_READ)

    def stop(self) -> None:
        """End ``run``, from any thread."""
        self._stop = True
        self._wake()

    def run(self, idle_s: float, most_s: float) -> None:
        """Serve until no node has been connected for ``idle_s`` seconds, or ``most_s`` seconds are over."""
        until = time.monotonic() + most_s
        try:
            while not self._stop and time.monotonic() < min(until, self.idle_since + idle_s):
                self._step()
        finally:
            for link in list(self._links):
                self._close(link)
            for listener in self._per_listener:
                listener.close()
            self._checks.shutdown(wait=False, cancel_futures=True)
            self._selector.close()

    def _step(self) -> None:
        for event, _ in self._selector.select(self._limits.poll_s if self._links else 0.5):
            if isinstance(event.data, _Link):
                self._guarded(event.data, self._ready)
            elif event.fileobj is not None and event.fileobj in self._per_listener:
                self._accept(event.fileobj)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                for link in list(self._links):
                    if link.judged is not None:
                        self._guarded(link, self._look)
        now = time.monotonic()
        if now - self._swept >= self._limits.poll_s:
            self._swept = now
            for link in list(self._links):
                self._guarded(link, self._look)
        if self._links:
            self.idle_since = now

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, place = listener.accept()
        except OSError:
            return
        own = self._per_listener[listener]
        crowd = sum(link.place is own for link in self._links)
        if crowd >= CONNECTIONS or (place[1] >= ROOT_PORTS and not self._limits.any_port):
            sock.close()
            return
        sock.setblocking(False)
        link = _Link(sock, own, plain(str(place[0])), time.monotonic())
        self._links.add(link)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _guarded(self, link: _Link, act: Callable[[_Link], None]) -> None:
        """Do something for a connection, and close it if that fails."""
        try:
            act(link)
        except (OSError, ValueError, PeerError) as err:
            if not isinstance(err, ConnectionError):
                log.info("peers: %s: %s", link.address, err)
            self._close(link)

    def _close(self, link: _Link) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        self._selector.unregister(link.sock)
        link.sock.close()
        if link.file >= 0:
            os.close(link.file)

    def _ready(self, link: _Link) -> None:
        """The socket can be read or written."""
        if link.granted is not None:
            self._serve(link)
            return
        data = link.sock.recv(wire.MESSAGE_MAX)
        if not data:
            raise ConnectionResetError
        link.got += data
        if len(link.got) > wire.HEADER.size + wire.MESSAGE_MAX or link.judged is not None:
            raise PeerError("it sent too much")
        if len(link.got) < wire.HEADER.size:
            return
        (length,) = wire.HEADER.unpack_from(link.got)
        if length > wire.MESSAGE_MAX:
            raise PeerError(f"a request of {length} bytes")
        if len(link.got) - wire.HEADER.size >= length:
            sealed = bytes(link.got[wire.HEADER.size : wire.HEADER.size + length])
            link.judged = self._checks.submit(_judge, self._seal, link.place, link.address, sealed)
            link.judged.add_done_callback(lambda _: self._wake())

    def _look(self, link: _Link) -> None:
        """Do what time or a finished check makes due."""
        now = time.monotonic()
        if link.granted is not None:
            self._serve(link)
            if link.out and now - link.moved > self._limits.send_s:
                raise PeerError("it takes nothing")
        elif link.judged is not None and link.judged.done():
            link.granted = link.judged.result()
            link.at, link.moved, link.told = link.granted.ask.start, now, now
            link.out = memoryview(link.granted.reply)
            self._serve(link)
        elif now - link.moved > self._limits.request_s:
            raise PeerError("no request in time")

    def _serve(self, link: _Link) -> None:
        """Send what is there; at most one frame waits in memory."""
        assert link.granted is not None
        for _ in range(16):  # then others get their turn
            if not link.out:
                self._fill(link)
            if not link.out:
                break
            try:
                sent = link.sock.send(link.out)
            except BlockingIOError:
                break
            link.out, link.moved = link.out[sent:], time.monotonic()
            if link.ends and not link.out:
                raise ConnectionResetError  # all is sent; the asker keeps its port, as it closes second
        if bool(link.out) != link.writable:
            link.writable = bool(link.out)
            # while sending, wait for writability only: an asker sends nothing more
            event = selectors.EVENT_WRITE if link.out else selectors.EVENT_READ
            self._selector.modify(link.sock, event, link)
        if not link.out and not link.ends and _has_closed(link.sock):
            raise ConnectionResetError

    def _fill(self, link: _Link) -> None:
        """The next frame: bytes, or that there are none."""
        found = link.granted
        assert found is not None
        if link.file < 0:
            link.file = _open(found)
        there = _available(found, link.file)
        if there > link.at:
            data = os.pread(link.file, min(wire.FRAME_MAX, there - link.at), link.at)
            if not data:
                raise PeerError("the file became shorter")
            link.at += len(data)
            link.out = memoryview(wire.HEADER.pack(len(data)) + data)
            link.ends = link.at >= found.blob.size
            link.told = time.monotonic()
        elif time.monotonic() - link.told >= self._limits.wait_s or there < 0:
            link.told = time.monotonic()
            link.ends = there < 0 or not _may_grow(link.place.layout, found)
            link.out = memoryview(wire.HEADER.pack(wire.GONE if link.ends else wire.WAIT))


def plain(address: str) -> str:
    """The canonical form of an address: IPv4-mapped IPv6 becomes IPv4, a zone is removed."""
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _has_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def _judge(by: wire.Seal, place: Place, address: str, sealed: bytes) -> _Granted:
    """Whether a request is served: only root of a node of the lease gets bytes of its image.

    Raises:
        PeerError: it is not, and gets no answer.
    """
    ask = wire.unseal(by, sealed, Ask)
    offer = offers.read(place.layout, ask.generation)
    problem, blob = "", None
    if offer is None:
        problem = f"{ask.generation} offers nothing here"
    elif ask.version != wire.VERSION:
        problem = f"this vhpc knows version {wire.VERSION} of the protocol"
    elif ask.asked != offer.node or ask.asker not in offer.nodes:
        raise PeerError(f"{ask.asker} is no node of {ask.generation}, or asks {ask.asked}"[:200])
    elif address not in place.addresses(ask.asker):
        raise PeerError(f"it is not node {ask.asker}"[:200])
    else:
        blob = offer.blob(ask.sha256)
        if blob is None or ask.start >= blob.size:
            problem = wire.NOT_OFFERED
    if problem or offer is None or blob is None:
        # a node that may not ask learns no more than that this node has no such generation
        reply = wire.seal(by, Reply(ask.nonce, problem=problem))
        nothing = Blob("", "", 0)
        empty = Offer(ask.generation, "", (), None, (), (0, 0))
        return _Granted(ask, empty, nothing, place.layout.blobs / "none", reply)
    final = place.layout.blobs_of(offer.owner) / blob.sha256
    found = _Granted(ask, offer, blob, final, b"")
    fd = _open(found)
    try:
        has = max(0, _available(found, fd))
    finally:
        if fd >= 0:
            os.close(fd)
    return _Granted(ask, offer, blob, final, wire.seal(by, Reply(ask.nonce, has=has)))


def _open(found: _Granted) -> int:
    """A descriptor of the blob, or of the part that was copied so far; -1 if there is nothing."""
    for path in (found.final, *([offers.part_of(found.final)] if found.blob.chunks else [])):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    return -1


def _available(found: _Granted, fd: int) -> int:
    """How many bytes can be served; -1 if no more will come from this file.

    A copy is appended to by whole chunks (``store.part``), so its size says how many. The asker compares
    each with the chunk list.
    """
    if fd < 0:
        return 0 if found.blob.size else -1
    about = os.fstat(fd)
    if about.st_nlink == 0:
        return -1  # the copy was given up
    if about.st_size >= found.blob.size:
        return found.blob.size
    return about.st_size - about.st_size % found.blob.chunk_size if found.blob.chunks else -1


def _may_grow(layout: Layout, found: _Granted) -> bool:
    """Whether more of a blob may come: somebody copies it, or the Prolog still offers it."""
    if files.is_locked(offers.lock_of(found.final)):
        return True
    offer = offers.read(layout, found.ask.generation)
    return offer is not None and offer.blob(found.blob.sha256) is not None and offer.may_grow
