# SPDX-License-Identifier: Apache-2.0
# promise: attack.peer-port
"""Fuzz what nodes of a lease say to each other: root of another node, or whoever has its address, writes it.

The first line of an input is a message, as a request and as an answer; the rest is what follows the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec
from rig import InternalError, fuzz

from vhpc_slurm.config import Config
from vhpc_slurm.model import Blob
from vhpc_slurm.munge import Credential
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import offers, server, wire
from vhpc_slurm.node.store.peers.client import PeerSource
from vhpc_slurm.node.store.peers.wire import PeerError

GENERATION, SHARED, SECRET = "7.0.0123abcd", "a" * 64, "b" * 64
CONTENT = b"the blob's bytes"
PIECE = 5


class Root:
    """Credentials that are the message itself; all are root's."""

    def encode(self, payload: bytes, *, ttl_s: int = 0, only_uid: int | None = None) -> bytes:
        return payload

    def decode(self, credential: bytes) -> Credential:
        return Credential(credential, 0, 0)


def _node() -> server.Place:
    """A node that offers one of the two blobs that it has."""
    folder = Path(tempfile.mkdtemp(prefix="vhpc-fuzz-peers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    site = msgspec.convert(
        {"images": {"store": f"{folder}/store"}, "paths": {"run": f"{folder}/run"}}, Config
    )
    layout = Layout(site)
    layout.blobs.mkdir(parents=True)
    for name in (SHARED, SECRET):
        (layout.blobs / name).write_bytes(CONTENT)
    layout.job(7).mkdir(parents=True)
    offered = Blob("root", SHARED, len(CONTENT))
    offers.write(layout, offers.Offer(GENERATION, "n0", ("n0", "n1"), None, (offered,), (1, 1)))
    return server.Place(layout, lambda name: frozenset({"127.0.0.1"} if name == "n1" else ()))


NODE = _node()


def _ask(message: bytes) -> None:
    """Only node n1 gets bytes, and only those that are offered."""
    try:
        granted = server._judge(Root(), NODE, "127.0.0.1", message)
    except PeerError:
        return
    if not granted.blob.size:
        return
    ask = granted.ask
    if (ask.asker, ask.asked, ask.generation) != ("n1", "n0", GENERATION) or ask.sha256 != SHARED:
        raise InternalError(f"{ask} is granted")
    if granted.final.name != SHARED or not 0 <= ask.start < len(CONTENT):
        raise InternalError(f"{ask} gets other bytes")


def _stream(frames: bytes) -> None:
    """The bytes that a node gets are never more than were sent, and arrive in order."""
    near, far = socket.socketpair()
    with near, far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        far.settimeout(0)
        sent = frames[: 128 << 10]
        with contextlib.suppress(BlockingIOError):
            sent = sent[: far.send(sent)]
        far.shutdown(socket.SHUT_WR)
        near.setblocking(False)
        source, place = PeerSource("n0", near, 0), 0
        with contextlib.suppress(PeerError):
            while source.wait(0):
                data = source.read(PIECE)
                found = sent.find(data, place)
                if len(data) > PIECE or found < 0:
                    raise InternalError(f"{data!r} was not sent")
                place = found + len(data)


def one_input(data: bytes) -> None:
    """A message, then a stream."""
    message, _, frames = data.partition(b"\n")
    _ask(message)
    with contextlib.suppress(PeerError):
        wire.unseal(Root(), message, wire.Reply)
    _stream(frames)


if __name__ == "__main__":
    fuzz(one_input)
