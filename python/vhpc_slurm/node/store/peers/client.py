# SPDX-License-Identifier: Apache-2.0
"""Asks other nodes of a lease for a blob: the parent in the tree first, then its ancestors."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable, Generator

from msgspec import Struct, field

from vhpc_slurm import rootport
from vhpc_slurm.model import Blob
from vhpc_slurm.node.store.peers import wire
from vhpc_slurm.node.store.peers.wire import Ask, NotOfferedError, PeerError, Reply
from vhpc_slurm.record import Record

END_S = 0.2
"""Seconds to wait until a node closes a connection that has served its purpose."""
FAILURES = 3
"""Nodes that were of no use, after which the catalogue is read: the waits for them must not add up."""
log = logging.getLogger("vhpc")


class Pace(Record, frozen=True):
    """How long a node waits for others, in seconds.

    Attributes:
        connect_s: for a connection.
        reply_s: for the answer to a request.
        parent_s: for the parent alone, before ancestors are asked, too: its Prolog may begin later.
        start_s: until some node answers; then the catalogue is read.
        silent_s: without any frame from a node that serves.
        stall_s: without a new chunk from a node that lives; its own source may be slow.
        again_s: between two attempts.
        look_s: longest wait for the next bytes.
    """

    connect_s: float = 1.0
    reply_s: float = 3.0
    parent_s: float = 2.0
    start_s: float = 5.0
    silent_s: float = 5.0
    stall_s: float = 10.0
    again_s: float = 0.2
    look_s: float = 1.0


class Lineage(Record, frozen=True):
    """This node's place in a lease.

    Attributes:
        generation: of the job.
        own: this node's name in Slurm.
        sources: the nodes to ask, parent first (``tree.sources``).
        host: the host name or address of a node.
        port: of the nodes.
        seal: makes and checks credentials.
        pace: times.
        withdraw: stops offering a blob to others, by its sha256: it does not come.
    """

    generation: str
    own: str
    sources: tuple[str, ...]
    host: Callable[[str], str]
    port: int
    seal: wire.Seal
    pace: Pace = Pace()
    withdraw: Callable[[str], None] = lambda _: None


class PeerSource:
    """A blob's bytes from another node."""

    def __init__(self, node: str, link: socket.socket, has: int) -> None:
        """``has`` is the number of bytes that the node had when it answered."""
        self.node, self.has = node, has
        self._link = link
        self._left = 0
        self._head = bytearray()
        self.heard = time.monotonic()

    @classmethod
    def ask(cls, lineage: Lineage, node: str, blob: Blob, start: int) -> PeerSource:
        """Ask a node for a blob from a byte on.

        Raises:
            PeerError: it does not answer, or refuses.
        """
        pace, nonce = lineage.pace, os.urandom(16).hex()
        asked = Ask(wire.VERSION, nonce, lineage.generation, lineage.own, node, blob.sha256, start)
        sealed = wire.seal(lineage.seal, asked)
        try:
            link = rootport.connect(lineage.host(node), lineage.port, time.monotonic() + pace.connect_s)
        except (OSError, UnicodeError) as err:
            raise PeerError(f"no connection: {err}") from err
        try:
            link.sendall(sealed)
            reply = _reply(lineage, link, time.monotonic() + pace.reply_s)
            if reply.nonce != nonce:
                raise PeerError("its answer belongs to another request")
            if reply.problem == wire.NOT_OFFERED:
                raise NotOfferedError(reply.problem)
            if reply.problem:
                raise PeerError(reply.problem)
            link.setblocking(False)
        except OSError as err:
            link.close()
            raise PeerError(f"no answer: {err}") from err
        except PeerError:
            link.close()
            raise
        return cls(node, link, reply.has)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def wait(self, seconds: float) -> bool:
        """Whether ``read`` may return something, after at most so many seconds."""
        poll = select.poll()  # select() knows no descriptors beyond 1023
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes of the blob; none if none are there.

        Raises:
            PeerError: the connection has ended, or the node says that it will not have the rest.
        """
        try:
            if not self._left and not self._begins():
                return b""
            data = self._link.recv(min(self._left, size))
        except BlockingIOError:
            return b""
        except OSError as err:
            raise PeerError(f"the connection broke: {err}") from err
        if not data:
            raise PeerError("the connection ended")
        self.heard = time.monotonic()
        self._left -= len(data)
        return data

    def finished(self) -> None:
        """All is there: let the node close first, which keeps this node's port free."""
        rootport.wait_for_end(self._link, END_S)

    def _begins(self) -> bool:
        """Read the head of a frame; False if it has no bytes, or is not there yet."""
        data = self._link.recv(wire.HEADER.size - len(self._head))
        if not data:
            raise PeerError("the connection ended")
        self._head += data
        if len(self._head) < wire.HEADER.size:
            return False
        (length,) = wire.HEADER.unpack(self._head)
        self._head.clear()
        self.heard = time.monotonic()
        if length == wire.GONE:
            raise PeerError("it does not get the rest")
        if length > wire.FRAME_MAX:
            raise PeerError(f"it sent a frame of {length} bytes")
        self._left = length
        return bool(length != wire.WAIT)


class Peers(Struct):
    """Finds a node to ask, for the blobs of one image; remembers which nodes were of no use."""

    lineage: Lineage
    _useless: set[str] = field(default_factory=set)

    def find(
        self, blob: Blob, start: int, due: Callable[[str], bool], *, more: bool
    ) -> Generator[None, None, PeerSource | None]:
        """A node that serves a blob; None: none does, read the catalogue.

        Args:
            blob: what is wanted.
            start: the first byte.
            due: whether to yield; raises when the time is over.
            more: only from a node that has more than ``start`` bytes now: another one has stalled.
        """
        pace, began = self.lineage.pace, time.monotonic()
        while True:
            waited = time.monotonic() - began
            candidates = [node for node in self.lineage.sources if node not in self._useless]
            if not candidates or len(self._useless) >= FAILURES:
                return None
            why, without = "", False
            for node in candidates if waited >= pace.parent_s or more else candidates[:1]:
                if why and time.monotonic() - began > pace.start_s:
                    break  # the waits for several nodes must not add up
                try:
                    found = PeerSource.ask(self.lineage, node, blob, start)
                except PeerError as err:
                    why = f"{node}: {err}"
                    without = without or isinstance(err, NotOfferedError)
                    continue
                if not more or found.has > start:
                    return found
                found.close()
            if more or without or waited >= pace.start_s:
                if not without:  # else they may have the other blobs
                    self._give_up(candidates, why)
                return None
            if due(f"node {candidates[0]} does not answer yet"):
                yield
            time.sleep(pace.again_s)

    def useless(self, node: str, why: str) -> None:
        """Do not ask a node again: its bytes were wrong, or did not come."""
        log.warning("peers: node %s: %s", node, why)
        self._useless.add(node)

    def _give_up(self, nodes: list[str], why: str) -> None:
        """The next blob must not wait for them again."""
        log.warning("peers: no other node serves the image, the catalogue is read; %s", why)
        self._useless.update(nodes)


def _reply(lineage: Lineage, link: socket.socket, until: float) -> Reply:
    (length,) = wire.HEADER.unpack(_receive(link, wire.HEADER.size, until))
    if length > wire.MESSAGE_MAX:
        raise PeerError(f"it answered with {length} bytes")
    return wire.unseal(lineage.seal, _receive(link, length, until), Reply)


def _receive(link: socket.socket, length: int, until: float) -> bytes:
    try:
        return rootport.receive(link, length, until)
    except EOFError as err:
        raise PeerError("it closed the connection without an answer") from err
