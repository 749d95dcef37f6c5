# SPDX-License-Identifier: Apache-2.0
# promise: attack.garbage
"""Fuzz vhpcd: what an unknown peer's bytes and an authorised peer's requests can do to it.

An input is lines.  ``K`` as the first: there is a fabric, and leases have keys.
``R`` and bytes: a connection of a peer that is not authenticated yet.  ``P``
and bytes: the content of root's credential, whole.  Any other line: the body of
a request of root's, put into a proper envelope, so that a sequence of requests
can make its way through the life of a lease; ``@`` in it is the generation of
the last lease that was answered.  munged, which stands between the two, is not
ours to fuzz.

After each input vhpcd must still be able to list everything: no request may
leave behind what cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path
from unittest.mock import patch

import msgspec
from controller_lab import manifest, publish
from rig import InternalError, fuzz

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.admission import Peer, PeerGroup
from vhpc_slurm.controller.api.authority import Origin
from vhpc_slurm.controller.api.connection import Connection
from vhpc_slurm.controller.api.conversation import Server
from vhpc_slurm.controller.api.requests import Requests
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.leases import layer
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric.backend import KeyPolicy, NoNetwork, ProofResults
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.model import Generation
from vhpc_slurm.munge import Credential, Munge
from vhpc_slurm.slurm import connect

LINES = 12
"""Requests of one input that are acted on."""
ROOT = 0
WAIT_S = 0.002
"""A lease that is waited for in vain is no hang."""

_folder = tempfile.TemporaryDirectory(prefix="vhpc-fuzz-")
_nonces = itertools.count(10**15)
_loop = asyncio.new_event_loop()


publish(Path(_folder.name), manifest())  # so that leases become ready and not only refused
_CONFIG = Config(
    images=Images(catalog=_folder.name),
    fabric=Fabric(sweep_interval_s=0.0),
    checkpoint=Checkpoint(folder=_folder.name),
)


class Keys(NoNetwork):
    """A fabric that takes whatever it is told."""

    plan = KeyPolicy(KeyPool(0x1000, 0x1001)).plan

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        return self.verify(generations, snapshot)


def one_input(data: bytes) -> None:
    """Let a vhpcd with an empty store live through the lines of the input."""
    with patch.object(wire, "MAX_WAIT_S", WAIT_S):
        _loop.run_until_complete(_live(data.split(b"\n")[:LINES]))


async def _live(lines: list[bytes]) -> None:
    store = SqliteStore(":memory:")
    network = Keys() if lines[0] == b"K" else NoNetwork()
    leases = layer.build(store, network, _CONFIG)
    vhpcd = assemble(_CONFIG, leases, network, connect(_CONFIG))
    server = Server(vhpcd.requests, Munge(), frozenset({ROOT}))
    try:
        generation = "42.0.0badcafe"
        for line in lines:
            answer = await _say(server, line.replace(b"@", generation.encode()))
            if isinstance(answer, wire.LeaseAnswer):
                generation = answer.lease.generation
        for listing in (
            wire.ListLeases(progress=True),
            wire.ListLeases(live=True),
            wire.ListTimelines(),
            wire.ListReports(job_id=42),
        ):
            await _walk(vhpcd.requests, listing)
        if isinstance(await vhpcd.requests.answer(wire.AskStatus()), wire.Failure):
            raise InternalError("no status")
        leases.settling.run()
        leases.queries.prune(0.0)
    finally:
        await server.close()
        vhpcd.close()
        store.close()


async def _say(server: Server, line: bytes) -> wire.Answer | None:
    client, accepted = socket.socketpair()
    with client, accepted:
        accepted.setblocking(False)
        return await _say_on(server, line, client, Connection(accepted))


async def _say_on(
    server: Server, line: bytes, client: socket.socket, connection: Connection
) -> wire.Answer | None:
    if line[:1] == b"R":
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # more than a socket holds: the rest is cut
            client.sendall(line[1:])
        client.shutdown(socket.SHUT_WR)
        peer = Peer("192.0.2.1", PeerGroup.OTHER, lambda: None)
        server._admission.enter(peer)
        with contextlib.suppress(EOFError):
            await server._receive(connection, peer)
        server._admission.leave(peer)
        if peer.held or server._admission.count(PeerGroup.OTHER):
            raise InternalError(f"{peer.held} bytes still held")
        return None
    if line[:1] == b"P":
        payload = line[1:]
    else:
        head = b'{"message":"request","version":%d,"nonce":"%016d",' % (wire.VERSION, next(_nonces))
        payload = head + b'"body":%s}' % line
    try:
        envelope = wire.unwrap(payload, "request")
    except ValueError:
        return None
    refusal = server._object(envelope, Credential(payload, ROOT, ROOT), "192.0.2.1")
    answer = refusal or await server._ask(envelope, ROOT, Origin("192.0.2.1", own_host=False), connection)
    if answer is None:
        raise InternalError("no answer to a client that still waits")
    return _check(wire.wrap("answer", envelope.nonce, answer))


async def _walk(requests: Requests, listing: wire.ListLeases | wire.ListTimelines | wire.ListReports) -> None:
    """Read a listing to its end."""
    rows = 0
    while True:
        answer = _check(wire.wrap("answer", "n" * 16, await requests.answer(listing)))
        match answer:
            case wire.LeasePage():
                rows += len([record.unpack() for record in answer.records])
            case wire.TimelinePage():
                rows += len([line.unpack() for line in answer.timelines])
            case wire.ReportPage():
                rows += len(answer.reports)
            case _:
                raise InternalError(f"cannot be listed any more: {answer}")
        if answer.more is None:
            return
        if rows > LINES or answer.more <= listing.after:
            raise InternalError("a listing without end")
        listing = msgspec.structs.replace(listing, after=answer.more)


def _check(payload: bytes) -> wire.Answer:
    """The answer as the client reads it."""
    if len(payload) > wire.MAX_MESSAGE:
        raise InternalError(f"an answer of {len(payload)} bytes")
    answer = wire.read_answer(wire.unwrap(payload, "answer"))
    if isinstance(answer, wire.Failure) and answer.what == "vhpcd failed":
        raise InternalError("an exception that nobody expected")
    return answer


if __name__ == "__main__":
    fuzz(one_input)
