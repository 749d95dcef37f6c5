"""vhpcd: the controller service.

It listens to root and SlurmUser only, and believes nothing that munged has not
vouched for.  What an unauthenticated peer can cost is bounded: connections in
all and per address, bytes held before authentication, and time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import pwd
import resource
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vhpc_slurm import __version__
from vhpc_slurm.config import Config, load
from vhpc_slurm.controller import protocol as wire
from vhpc_slurm.controller.dispatch import Dispatcher
from vhpc_slurm.controller.service import LeaseService
from vhpc_slurm.controller.store import LeaseStore, SqliteStore
from vhpc_slurm.controller.writer import Writer
from vhpc_slurm.errors import FabricError, NodeError, VhpcError
from vhpc_slurm.fabric.backend import NetworkBackend
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.munge import (
    Credential,
    CredentialExpiredError,
    CredentialRewoundError,
    Munge,
    MungeError,
)
from vhpc_slurm.slurm import connect

log = logging.getLogger("vhpcd")

MAX_CONNECTIONS = 8192
MAX_PER_ADDRESS = 1024
MAX_PENDING_BYTES = 64 << 20
"""Held by all connections together before their peers are known."""
RECEIVE_S = 10.0
SEND_S = 10.0
AGAIN_S = 1.0
"""So long at least lies between two audits of which the first found something."""
MAX_NONCES = 200_000
NONCE_LIFE_S = 3 * wire.TTL_S
"""Longer than a credential lives on either side of its encoding time, so none outlives its nonce."""


class FreshNonces:
    """Nonces seen lately: munged's own memory of credentials does not survive its restart."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()

    def fresh(self, nonce: str, now: float) -> bool:
        """Whether this nonce is new; it is not from now on.  Times in seconds of any steady clock."""
        while self._seen and next(iter(self._seen.values())) < now - NONCE_LIFE_S:
            self._seen.popitem(last=False)
        if nonce in self._seen or len(self._seen) >= MAX_NONCES:
            return False
        self._seen[nonce] = now
        return True


class Server:
    """The listening side of vhpcd."""

    def __init__(self, dispatcher: Dispatcher, munge: Munge, allowed: frozenset[int]) -> None:
        """``allowed`` are the uids that are listened to."""
        self._dispatcher = dispatcher
        self._munge = munge
        self._allowed = allowed
        self._nonces = FreshNonces()
        # munged answers in well under a millisecond; a few threads keep one that hangs from blocking all.
        self._threads = ThreadPoolExecutor(8, "munge")
        self._by_address: Counter[str] = Counter()
        self._pending_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Begin to accept; FabricError when the address cannot be had."""
        try:
            return await asyncio.start_server(self._accept, host, port, backlog=1024)
        except OSError as err:
            raise FabricError(
                f"vhpcd cannot listen on {host} port {port}",
                err.strerror or str(err),
                "is another vhpcd running?",
            ) from err

    async def close(self) -> None:
        """Drop all connections; what they changed is durable already, and clients ask again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        self._dispatcher.connections += 1
        self._by_address[address] += 1
        try:
            if self._dispatcher.connections > MAX_CONNECTIONS or self._by_address[address] > MAX_PER_ADDRESS:
                log.warning("too many connections, one of %s dropped", address)
                return
            await self._converse(reader, writer, address)
        except (OSError, EOFError, TimeoutError):
            pass  # a peer that is slow or gone: it asks again if it still wants to know
        except asyncio.CancelledError:
            pass  # vhpcd ends
        finally:
            self._tasks.discard(task)
            self._dispatcher.connections -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
            writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        """One request, one answer."""
        async with asyncio.timeout(RECEIVE_S):
            frame = await self._receive(reader, address)
        if frame is None:
            return
        credential, stale = await self._authenticate(frame, address)
        if credential is None:
            return
        try:
            envelope = wire.unwrap(credential.payload, "request")
        except ValueError as err:
            log.warning("no request from uid %d at %s: %s", credential.uid, address, err)
            return
        answer: wire.Answer | None = stale or self._object(envelope, credential, address)
        if answer is None:
            answer = await self._ask(envelope, credential.uid, reader)
        if answer is None:
            return  # the client has gone away
        payload = wire.wrap("answer", envelope.nonce, answer)
        sealed = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._munge.encode(payload, ttl_s=wire.TTL_S, only_uid=credential.uid)
        )
        async with asyncio.timeout(SEND_S):
            writer.write(wire.HEADER.pack(len(sealed)) + sealed)
            await writer.drain()

    async def _receive(self, reader: asyncio.StreamReader, address: str) -> bytes | None:
        """One frame; None when it is none.  Nobody has vouched for any of its bytes yet."""
        (length,) = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
        if not 0 < length <= wire.MAX_MESSAGE:
            log.warning("a message of %d bytes announced by %s, dropped", length, address)
            return None
        chunks: list[bytes] = []
        held = 0
        try:
            while held < length:
                chunk = await reader.read(min(length - held, 65536))
                if not chunk:
                    return None
                chunks.append(chunk)
                held += len(chunk)
                self._pending_bytes += len(chunk)
                if self._pending_bytes > MAX_PENDING_BYTES:
                    log.warning("too many bytes from unknown peers, one of %s dropped", address)
                    return None
        finally:
            self._pending_bytes -= held
        return b"".join(chunks)

    async def _authenticate(
        self, frame: bytes, address: str
    ) -> tuple[Credential | None, wire.Failure | None]:
        """Who wrote it and what; with a failure to tell him when only the time was wrong."""
        try:
            loop = asyncio.get_running_loop()
            credential = await loop.run_in_executor(self._threads, self._munge.decode, frame)
        except (CredentialExpiredError, CredentialRewoundError) as err:
            log.warning("message from %s: %s", address, err.line())
            return err.credential, wire.Failure(kind="fabric", what=err.what, why=err.why, cure=err.cure)
        except MungeError as err:
            log.warning("message from %s: %s", address, err.line())
            return None, None
        return credential, None

    def _object(self, envelope: wire.Envelope, credential: Credential, address: str) -> wire.Failure | None:
        """Why this authentic message is not acted on; None when it is."""
        if credential.uid not in self._allowed:
            log.warning("uid %d at %s is not listened to", credential.uid, address)
            return wire.Failure(
                kind="user",
                what=f"vhpcd does not listen to uid {credential.uid}",
                why="only root and SlurmUser may ask",
            )
        if envelope.version != wire.VERSION:
            return wire.Failure(
                kind="fabric",
                what=f"vhpcd does not speak protocol {envelope.version}",
                why=f"vhpcd {__version__} speaks protocol {wire.VERSION}",
                cure="install one version of vhpc on all hosts",
            )
        if not self._nonces.fresh(envelope.nonce, asyncio.get_running_loop().time()):
            log.warning("replayed request of uid %d from %s", credential.uid, address)
            return wire.Failure(kind="fabric", what="vhpcd has seen this request before")
        return None

    async def _ask(
        self, envelope: wire.Envelope, uid: int, reader: asyncio.StreamReader
    ) -> wire.Answer | None:
        """The answer, or None when the client goes away before there is one."""
        try:
            request = wire.read_request(envelope)
        except ValueError as err:
            return wire.Failure(kind="fabric", what="vhpcd cannot read the request", why=str(err)[:300])
        answer = asyncio.ensure_future(self._dispatcher.answer(request, uid))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()
            gone.cancel()


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT; VhpcError when it cannot begin."""
    settings = config.controller
    allowed = frozenset({0, _uid(settings.slurm_user, "controller.slurm_user")})
    munge = Munge(settings.munge_socket)
    munge.decode(munge.encode(b"vhpcd begins"))
    with _only_one(Path(settings.database)):
        store = SqliteStore(settings.database)
        writer = Writer(store)
        # A backend asks from the fabric's thread.
        network = backend(config.fabric, lambda *known: writer.submit(store.keys.knows, *known).result())
        _validate(network, store)
        service = LeaseService(
            store,
            network,
            reserve_mib=config.guests.memory_reserve_mib,
            config=config,
            quarantine_s=config.fabric.quarantine_s,
            lost_after_s=config.fabric.lost_after_s,
            refuse_exhausted=config.fabric.exhausted == "refuse",
        )
        dispatcher = Dispatcher(config, service, network, connect(config), writer)
        server = Server(dispatcher, munge, allowed)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listener = await server.listen(settings.listen, settings.port)
        log.info("vhpcd %s listens on %s port %d", __version__, settings.listen, settings.port)
        await dispatcher.begin()
        rounds = asyncio.create_task(_reconcile_for_ever(dispatcher, settings.reconcile_interval_s))
        audits = asyncio.create_task(_audit_for_ever(dispatcher, config.fabric.audit_interval_s))
        await stop.wait()
        log.info("vhpcd ends")
        listener.close()
        rounds.cancel()
        audits.cancel()
        await server.close()
        dispatcher.close()
        store.close()


def _validate(network: NetworkBackend, store: LeaseStore) -> None:
    """Say what is wrong with the fabric; leases are served nevertheless, and get ready when it is right."""
    try:
        network.validate(store.keys.book())
    except FabricError as err:
        log.error("the fabric cannot serve: %s", err.line())


async def _audit_for_ever(dispatcher: Dispatcher, interval_s: float) -> None:
    try:
        dispatcher.watch()
    except FabricError as err:
        log.error("the fabric is looked at every %g s only: %s", interval_s, err.line())
    failures = 0
    while True:
        try:
            found = await dispatcher.audit()
            failures = 0
        except VhpcError as err:
            found = True
            failures += 1
            if failures in (1, 2) or not failures % 20:
                log.error("the fabric is not proven (%d times by now): %s", failures, err.line())
        except Exception:
            found = True
            log.exception("not audited")
        if found:
            # What vhpcd does about it is noticed as well.
            await asyncio.sleep(min(AGAIN_S, interval_s))
        await dispatcher.audit_due(interval_s)


async def _reconcile_for_ever(dispatcher: Dispatcher, interval_s: float) -> None:
    while True:
        try:
            await dispatcher.reconcile()
        except VhpcError as err:
            log.warning("not reconciled: %s", err.line())
        except Exception:
            log.exception("not reconciled")
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _only_one(database: Path) -> Iterator[None]:
    """Hold the lock of the database; two writers of leases would hand out the same things twice."""
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{database}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as err:
        raise NodeError(
            f"vhpcd cannot use {database}", str(err), "create its folder, owned by its user"
        ) from err
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
            raise NodeError(f"vhpcd runs already on {database}", f"as process {owner}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _uid(name: str, key: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise NodeError(f"there is no user {name!r}", f"{key} of vhpc.toml names it") from None


def main(arguments: list[str] | None = None) -> int:
    """Process entry point."""
    parser = argparse.ArgumentParser(
        prog="vhpcd",
        description="vhpc's controller service: leases of virtual clusters, for root and SlurmUser.",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="default: /etc/vhpc/vhpc.toml")
    parser.add_argument(
        "--foreground", action="store_true", help="accepted for service managers; vhpcd never forks"
    )
    parser.add_argument("--version", action="version", version=f"vhpcd {__version__}")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    os.umask(0o077)
    try:
        config = load(options.config)
        if os.geteuid() not in (0, _uid(config.controller.user, "controller.user")):
            raise NodeError(
                f"vhpcd must run as {config.controller.user} or root",
                "clients accept answers of no other user",
                "see controller.user in vhpc.toml",
            )
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(serve(config))
    except VhpcError as err:
        print(f"vhpcd: {err.line()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
