# SPDX-License-Identifier: Apache-2.0
"""Connections: receive one request, authenticate it, and send the answer.

Only what munged has authenticated is used. ``admission`` bounds the connections and
bytes of unauthenticated peers. munged serves the whole cluster, so credentials of
untrusted peers are sent to it a few at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from vhpc_slurm import __version__
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.addresses import plain
from vhpc_slurm.controller.api.admission import PRIVILEGED_PORTS, SHARES, Admission, Peer, PeerGroup, scaled
from vhpc_slurm.controller.api.attempts import Attempts
from vhpc_slurm.controller.api.authority import Authority, Origin
from vhpc_slurm.controller.api.cluster_messages import AskRoster
from vhpc_slurm.controller.api.connection import Connection
from vhpc_slurm.controller.api.duty import Duty
from vhpc_slurm.controller.api.peeruid import PeerUids
from vhpc_slurm.controller.api.presence import Lose, Presence
from vhpc_slurm.controller.api.ratelimited_log import RateLimitedLog
from vhpc_slurm.controller.api.requests import Answering
from vhpc_slurm.controller.api.status_messages import Status
from vhpc_slurm.controller.api.usage_messages import UsageKept
from vhpc_slurm.controller.api.useraccess import UserAccess
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.munge import (
    Credential,
    CredentialExpiredError,
    CredentialRewoundError,
    Munge,
    MungeError,
)

log = logging.getLogger("vhpcd")

MAX_KNOWN, MAX_KNOWN_EACH = 8192, 1024
"""Authenticated connections, in all and of one address: nodes wait in them for leases."""
RECEIVE_S = 10.0
"""Seconds for receiving and authenticating a request."""
SEND_S = 10.0
OTHERS_AT_ONCE = 2
"""Credentials of peers outside ``PeerGroup.TRUSTED`` that munged decodes at a time."""
MAX_NONCES = 200_000
NONCE_LIFE_S = 3 * wire.TTL_S
"""Longer than a credential is valid around its encoding time, so no credential outlives its nonce."""
_MUNGE = b"MUNGE:"

Result = TypeVar("Result")


class FreshNonces:
    """Recent nonces: munged's own replay cache does not survive its restart."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()

    def fresh(self, nonce: str, now: float) -> bool:
        """Record a nonce; returns whether it was new.  ``now`` in seconds of a monotonic clock."""
        while self._seen and next(iter(self._seen.values())) < now - NONCE_LIFE_S:
            self._seen.popitem(last=False)
        if nonce in self._seen or len(self._seen) >= MAX_NONCES:
            return False
        self._seen[nonce] = now
        return True


class Server:
    """Serves connections that ``listening`` has accepted; belongs to the event loop."""

    def __init__(
        self,
        requests: Answering | None,
        munge: Munge,
        allowed: frozenset[int],
        authority: Authority | None = None,
        *,
        users: UserAccess | None = None,
        duty: Duty | None = None,
        descriptors: int = 65536,
    ) -> None:
        """``allowed`` are the uids that may send all requests; without ``authority`` from any host.

        ``users`` answers all other uids; without it they are refused. While this vhpcd is a standby by
        ``duty`` there are no ``requests``; ``begin`` supplies them.
        """
        self._requests = requests
        self._duty = duty or Duty()
        self._connections = 0
        self._munge = munge
        self._allowed = allowed
        self._authority = authority
        self._users = users
        self._nonces = FreshNonces()
        self._log = RateLimitedLog(log)
        self._admission = Admission(scaled(SHARES, descriptors), self._dropped)
        self._attempts = Attempts()
        self._known: Counter[str] = Counter()
        # munged answers in well under a millisecond; with several threads one hanging call blocks no other.
        self._threads = ThreadPoolExecutor(8, "munge")
        self._others = ThreadPoolExecutor(OTHERS_AT_ONCE, "others")
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        self._at_once = asyncio.Semaphore(OTHERS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._presence = Presence()
        self._uids: PeerUids | None = None
        with contextlib.suppress(OSError):
            self._uids = PeerUids()

    def begin(self, requests: Answering, users: UserAccess, lose: Lose) -> None:
        """From now on answer requests; ``lose`` is told which nodes of clusters are silent."""
        self._requests, self._users = requests, users
        self._presence.tell(lose)

    async def close(self) -> None:
        """Close all connections; their changes are durable, and clients ask again."""
        self._presence.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for threads in (self._threads, self._others):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._uids is not None:
            self._uids.close()

    def accepted(self, connection: socket.socket, place: tuple[str, int]) -> None:
        """Serve an accepted connection; ``place`` is the address of its other end."""
        try:
            own = connection.getsockname()[:2]
        except OSError:
            return connection.close()
        address = plain(place[0])
        origin = Origin(address, plain(own[0]) == address)
        group = self._group(origin, place, own)
        if group is not PeerGroup.TRUSTED and not self._attempts.another(origin.address):
            self._log.warning("%s connects too often; its connections are closed for a while", origin.address)
            return connection.close()
        peer = Peer(origin.address, group, lambda: _cancel(task))
        begun: list[Peer] = []
        task = asyncio.get_running_loop().create_task(self._talk(connection, peer, origin, begun))

        def over(_: object) -> None:
            self._tasks.discard(task)
            if not begun:  # it was dropped before it had a turn
                connection.close()

        self._tasks.add(task)
        task.add_done_callback(over)
        self._admission.enter(peer)
        return None

    def _group(self, origin: Origin, place: tuple[str, int], own: tuple[str, int]) -> PeerGroup:
        privileged = place[1] < PRIVILEGED_PORTS
        if origin.own_host:
            uid = 0 if privileged else self._uids.of(place, own) if self._uids is not None else None
            if uid is None:
                return PeerGroup.MEMBER
            return PeerGroup.TRUSTED if uid in self._allowed else PeerGroup.OTHER
        if self._authority is None or not self._authority.knows(origin.address):
            return PeerGroup.OTHER
        return PeerGroup.TRUSTED if privileged else PeerGroup.MEMBER

    def _dropped(self, peer: Peer, why: str) -> None:
        self._log.warning("a connection from %s is closed: %s", peer.address, why)

    async def _talk(self, connection: socket.socket, peer: Peer, origin: Origin, begun: list[Peer]) -> None:
        begun.append(peer)
        self._connections += 1
        opened = Connection(connection)
        try:
            await self._converse(opened, peer, origin)
        except (OSError, EOFError, TimeoutError):
            pass  # the peer is slow or has disconnected; it asks again when it needs an answer
        except asyncio.CancelledError:
            pass  # it was dropped, or vhpcd stops
        finally:
            self._admission.leave(peer)
            self._presence.over(opened)
            self._connections -= 1
            connection.close()

    async def _converse(self, connection: Connection, peer: Peer, origin: Origin) -> None:
        """One request, one answer; the connection of a node of a cluster stays until its next question."""
        async with asyncio.timeout(RECEIVE_S):
            frame = await self._receive(connection, peer)
            if frame is None:
                return
            credential, stale = await self._authenticate(frame, peer)
        self._admission.leave(peer)
        if credential is None:
            return
        with self._counted(peer.address) as counted:
            if not counted:
                return
            try:
                envelope = wire.unwrap(credential.payload, "request")
            except ValueError as err:
                self._log.warning("invalid request from uid %d at %s: %s", credential.uid, peer.address, err)
                return
            answer: wire.Answer | None = stale or self._duty.refusal()
            answer = answer or self._object(envelope, credential, peer.address)
            answer = answer or await self._ask(envelope, credential.uid, origin, connection)
            if answer is None:
                return  # the client has gone away
            if self._duty.over:
                return  # another vhpcd may be active by now: its answer counts
            payload = _wrapped(envelope, answer, self._duty.epoch)
            sealed = await self._in_thread(
                peer,
                lambda: self._munge.encode(payload, ttl_s=wire.TTL_S, only_uid=credential.uid),
            )
            async with asyncio.timeout(SEND_S):
                await connection.send(wire.HEADER.pack(len(sealed)) + sealed)
            await self._presence.hold(connection)

    @contextlib.contextmanager
    def _counted(self, address: str) -> Iterator[bool]:
        """Count an authenticated connection meanwhile; False when there is no room for it."""
        if self._known.total() >= MAX_KNOWN or self._known[address] >= MAX_KNOWN_EACH:
            self._log.warning("too many connections wait for an answer; one from %s is closed", address)
            yield False
            return
        self._known[address] += 1
        try:
            yield True
        finally:
            self._known[address] -= 1
            if not self._known[address]:
                del self._known[address]

    async def _receive(self, connection: Connection, peer: Peer) -> bytes | None:
        """One frame; None when it is invalid.  None of its bytes is authenticated yet."""
        header = b""
        while len(header) < wire.HEADER.size:
            header += await connection.receive(wire.HEADER.size - len(header))
        (length,) = wire.HEADER.unpack(header)
        if not 0 < length <= wire.MAX_MESSAGE:
            self._log.warning("a message of %d bytes announced by %s, dropped", length, peer.address)
            return None
        chunks: list[bytes] = []
        held = 0
        while held < length:
            chunk = await connection.receive(length - held)
            chunks.append(chunk)
            held += len(chunk)
            self._admission.grew(peer, len(chunk))
        return b"".join(chunks)

    async def _authenticate(self, frame: bytes, peer: Peer) -> tuple[Credential | None, wire.Failure | None]:
        """Its credential; with a failure for the answer when only the credential's time is wrong."""
        if not frame.startswith(_MUNGE):
            self._log.warning("message from %s: it is not a MUNGE credential", peer.address)
            return None, None
        try:
            async with self._turn(peer):
                credential = await self._in_thread(peer, lambda: self._munge.decode(frame))
        except (CredentialExpiredError, CredentialRewoundError) as err:
            self._log.warning("message from %s: %s", peer.address, err.line())
            return err.credential, wire.Failure(kind="fabric", what=err.what, why=err.why, hint=err.hint)
        except MungeError as err:
            self._log.warning("message from %s: %s", peer.address, err.line())
            return None, None
        return credential, None

    @contextlib.asynccontextmanager
    async def _turn(self, peer: Peer) -> AsyncIterator[None]:
        """Wait for munged: trusted peers do not wait, others one after the other for each address."""
        if peer.group is PeerGroup.TRUSTED:
            yield
            return
        lock, users = self._turns.get(peer.address, (asyncio.Lock(), 0))
        self._turns[peer.address] = (lock, users + 1)
        try:
            async with lock, self._at_once:
                yield
        finally:
            lock, users = self._turns.pop(peer.address)
            if users > 1:
                self._turns[peer.address] = (lock, users - 1)

    async def _in_thread(self, peer: Peer, call: Callable[[], Result]) -> Result:
        threads = self._threads if peer.group is PeerGroup.TRUSTED else self._others
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def _object(self, envelope: wire.Envelope, credential: Credential, address: str) -> wire.Failure | None:
        """Why this authentic message is refused; None when it is accepted."""
        if credential.uid not in self._allowed:
            refusal = self._refused(credential.uid, address) if self._users is None else None
            if refusal := refusal or (self._users.another(credential.uid) if self._users else None):
                return refusal
        if not wire.readable(envelope.version):
            spoken = f"protocol {wire.VERSION}" + (
                f" and from {wire.OLDEST} on" * (wire.OLDEST < wire.VERSION)
            )
            return wire.Failure(
                kind="fabric",
                what=f"vhpcd does not speak protocol {envelope.version}",
                why=f"vhpcd {__version__} speaks {spoken}",
                hint="install one version of vhpc on all hosts",
            )
        if not self._nonces.fresh(envelope.nonce, asyncio.get_running_loop().time()):
            self._log.warning("replayed request of uid %d from %s", credential.uid, address)
            return wire.Failure(kind="fabric", what="vhpcd has seen this request before")
        return None

    async def _ask(
        self, envelope: wire.Envelope, uid: int, origin: Origin, connection: Connection
    ) -> wire.Answer | None:
        """The answer, or None when the client goes away before there is one."""
        try:
            request = wire.read_request(envelope)
        except ValueError as err:
            self._log.warning("a request of uid %d at %s cannot be read: %s", uid, origin.address, err)
            return wire.Failure(kind=wire.UNUSABLE, what="vhpcd cannot read the request", why=str(err)[:300])
        answer = await connection.unless_gone(self._answer(request, uid, origin, connection))
        return answer and self._with_origin(answer, origin)

    async def _answer(
        self, request: wire.Request, uid: int, origin: Origin, connection: Connection
    ) -> wire.Answer:
        if isinstance(request, wire.Together):
            answers = [await self._answer(one, uid, origin, connection) for one in request.requests]
            return wire.Answers(answers=tuple(map(_without_list, answers)))
        if self._authority is not None:
            try:
                await self._authority.check(request, origin)
            except VhpcError as err:
                self._log.warning("uid %d at %s is refused: %s", uid, origin.address, err.line())
                return wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
        assert self._requests is not None, "a standby has refused the request"
        everything = uid in self._allowed and not isinstance(request, wire.AsUser)
        if everything and isinstance(request, AskRoster):
            self._presence.asked(connection, (request.generation, request.node), far=not origin.own_host)
            answer = await self._requests.answer(request, uid)
            await self._presence.ready(connection)
            return answer
        if everything or self._users is None:
            return await self._requests.answer(request, uid)
        return await self._users.answer(request, uid) or self._refused(uid, origin.address)

    def _refused(self, uid: int, address: str) -> wire.Failure:
        self._log.warning("uid %d at %s is refused: not root or SlurmUser", uid, address)
        return wire.Failure(
            kind="user",
            what=f"vhpcd refuses uid {uid}",
            why="only root and SlurmUser may send this request",
        )

    def _with_origin(self, answer: wire.Answer, origin: Origin) -> wire.Answer:
        """Adds to a status the values that only the server knows."""
        if not isinstance(answer, Status):
            return answer
        answer = msgspec.structs.replace(answer, connections=self._connections)
        if self._authority is None:
            return answer
        names = self._authority.speaks_for(origin)
        return msgspec.structs.replace(answer, seen_at=origin.address, speaks_for=names)


def _without_list(answer: wire.Answer) -> wire.Done | UsageKept | wire.Failure:
    """The answer to a request of Together, whose types have no others."""
    assert isinstance(answer, wire.Done | UsageKept | wire.Failure)
    return answer


def _wrapped(request: wire.Envelope, answer: wire.Answer, epoch: int) -> bytes:
    """An answer in the version of its request, or in vhpcd's own if vhpcd does not read that version."""
    version = request.version if wire.readable(request.version) else wire.VERSION
    try:
        return wire.wrap("answer", request.nonce, answer, version, epoch)
    except VhpcError as err:
        failure = wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
        return wire.wrap("answer", request.nonce, failure, version, epoch)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
