# SPDX-License-Identifier: Apache-2.0
"""Nodes of one lease on this machine, each with a store and an address, and the real server and client.

Credentials are not munge's, so that tests can forge them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pace import limit
from vhpc_slurm.catalog import with_list
from vhpc_slurm.config import Config
from vhpc_slurm.model import Blob, ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.munge import Credential, CredentialError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import offers, tree
from vhpc_slurm.node.store.peers.client import Lineage, Pace
from vhpc_slurm.node.store.peers.server import Limits, Place, Server
from vhpc_slurm.node.store.peers.wire import Seal

GENERATION = "42.0.0123abcd"
Act = Callable[[socket.socket, dict[str, object]], None]
QUICK = Pace(
    connect_s=1.0,
    reply_s=2.0,
    parent_s=0.2,
    start_s=0.5,
    silent_s=0.5,
    stall_s=1.0,
    again_s=0.02,
    look_s=0.05,
)


class PlainSeal:
    """Credentials that name their sender and prove nothing."""

    def __init__(self, uid: int = 0) -> None:
        self.uid = uid

    def encode(self, payload: bytes, *, ttl_s: int = 0, only_uid: int | None = None) -> bytes:
        assert only_uid == 0, "others must not read it"
        return json.dumps([self.uid, payload.decode()]).encode()

    def decode(self, credential: bytes) -> Credential:
        try:
            uid, text = json.loads(credential)
        except ValueError as err:
            raise CredentialError("munge credential refused", "it is damaged") from err
        return Credential(text.encode(), uid, 0)


def publish(catalog: Path, size: int, chunk: int, *, listed: bool = True, seed: int = 1) -> ImageIdentity:
    """An image with a root of so many bytes, and its chunk list by the words of docs/image-format.md."""
    folder = catalog / "blobs/sha256"
    folder.mkdir(parents=True, exist_ok=True)

    def put(name: str, data: bytes) -> Blob:
        digest = hashlib.sha256(data).hexdigest()
        (folder / digest).write_bytes(data)
        return Blob(name, digest, len(data))

    numbers = random.Random(seed)
    data = b"".join(numbers.randbytes(min(1 << 20, size - at)) for at in range(0, size, 1 << 20))
    root = put("root", data)
    if listed:
        hashes = b"".join(hashlib.sha256(data[at : at + chunk]).digest() for at in range(0, size, chunk))
        root = dataclasses.replace(root, chunks=put("list", hashes).sha256, chunk_size=chunk)
    manifest = ImageManifest(
        schema=1,
        name="",
        tag="",
        arch="x86_64",
        kernel=put("kernel", b"kernel" * 50),
        initrd=put("initrd", b"initrd" * 50),
        root=root,
        root_format="erofs",
        init="agent",
        cmdline="",
        min_memory_mib=64,
        firmware="bios",
        drivers=(),
        agent_version="1",
    )
    return ImageIdentity(ImageRef("tiny"), "sha256:" + "0" * 64, manifest)


@dataclass
class Node:
    """One node: its files, and its address."""

    name: str
    address: str
    layout: Layout

    @property
    def store(self) -> Path:
        return self.layout.blobs

    def part(self, blob: Blob) -> Path:
        return offers.part_of(self.store / blob.sha256)


class Lease:
    """A lease of so many nodes; only the first one has a catalogue with anything in it."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        pace: Pace = QUICK,
        limits: Limits | None = None,
        seal: Seal | None = None,
    ) -> None:
        self.seal: Seal
        self.folder, self.pace, self.seal = folder, pace, seal or PlainSeal()
        self.names = tuple(f"n{rank}" for rank in range(count))
        self.nodes = [self._node(rank) for rank in range(count)]
        self.catalog = folder / "catalog"
        self.found_at = "127.0.0.1"
        self.limits = limits or Limits(poll_s=0.005, wait_s=0.1, any_port=True)
        self.server = Server(self.seal, self.limits)
        self.port = 0
        self._thread: threading.Thread | None = None

    def _node(self, rank: int) -> Node:
        top = self.folder / f"n{rank}"
        raw = {
            "paths": {part: str(top / part) for part in ("state", "run", "log")},
            "images": {
                "catalog": str(self.folder / ("catalog" if rank == 0 else "no-catalog")),
                "store": str(top / "store"),
            },
        }
        address = f"127.9.{rank >> 8}.{rank & 255}"
        return Node(f"n{rank}", address, Layout(msgspec.convert(raw, Config)))

    def read_catalogue(self, rank: int, stage_timeout_s: int = 60) -> None:
        """Let a node read the catalogue, too."""
        raw = msgspec.to_builtins(self.nodes[rank].layout.config)
        raw["images"]["catalog"] = str(self.catalog)
        raw["guests"]["stage_timeout_s"] = stage_timeout_s
        self.nodes[rank].layout = Layout(msgspec.convert(raw, Config))

    def addresses(self, node: str) -> frozenset[str]:
        # the kernel chooses this address for connections to any address of the loopback network
        return frozenset({self.found_at}) if node in self.names else frozenset()

    def listener(self, rank: int) -> socket.socket:
        """A socket at a node's address and the lease's port."""
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((self.nodes[rank].address, self.port))
        made.listen(64)
        self.port = made.getsockname()[1]
        return made

    def offer(self, rank: int, image: ImageIdentity, *, alive: bool = True, without: str = "") -> None:
        """Write what a node offers; its Prolog is this process."""
        node = self.nodes[rank]
        node.layout.job(42).mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        started = process.start_time(pid) or 0
        offered = offers.Offer(
            GENERATION,
            node.name,
            self.names,
            None,
            tuple(blob for blob in with_list(image.manifest) if blob.sha256 != without),
            (pid, started if alive else 1),
        )
        offers.write(node.layout, offered)

    def serve(self, ranks: Sequence[int], image: ImageIdentity) -> None:
        """Have these nodes serve, all in one thread."""
        for rank in ranks:
            self.offer(rank, image)
            self.server.add(self.listener(rank), Place(self.nodes[rank].layout, self.addresses))
        self._thread = threading.Thread(target=self.server.run, args=(600.0, 600.0))
        self._thread.start()

    def close(self) -> None:
        self.server.stop()
        if self._thread is not None:
            self._thread.join(10.0)

    def lineage(self, rank: int, *, seal: Seal | None = None) -> Lineage:
        hosts = {node.name: node.address for node in self.nodes}
        return Lineage(
            generation=GENERATION,
            own=self.names[rank],
            sources=tree.sources(self.names, self.names[rank]),
            host=hosts.__getitem__,
            port=self.port,
            seal=seal or self.seal,
            pace=self.pace,
        )

    def staging(self, rank: int, image: ImageIdentity) -> Generator[None, None, images.StagedImage]:
        return images.stage(self.nodes[rank].layout, image, None, self.lineage(rank))

    def stage(self, rank: int, image: ImageIdentity) -> dict[str, int]:
        """Stage the image on a node; returns bytes by their source."""
        return dict(finish(self.staging(rank, image)).sources)


def finish(staging: Generator[None, None, images.StagedImage]) -> images.StagedImage:
    while True:
        try:
            next(staging)
        except StopIteration as end:
            staged: images.StagedImage = end.value
            return staged


@contextlib.contextmanager
def lease(folder: Path, count: int, **settings: object) -> Iterator[Lease]:
    made = Lease(folder, count, **settings)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def impostor(listener: socket.socket, act: Act) -> Iterator[None]:
    """A program at a node's address that answers requests as it likes; ``act`` gets socket and request."""

    def answer(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, ValueError, struct.error):
            link.settimeout(10)
            (length,) = struct.unpack(">I", link.recv(4, socket.MSG_WAITALL))
            _, text = json.loads(link.recv(length, socket.MSG_WAITALL))
            act(link, json.loads(text))

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threading.Thread(target=answer, args=(link,), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def reply(link: socket.socket, ask: dict[str, object], *, uid: int = 0, **fields: object) -> None:
    """Send the answer of docs/image-format.md, with changes."""
    message = {"type": "reply", "nonce": ask["nonce"], "has": 0, "problem": ""} | fields
    sealed = json.dumps([uid, json.dumps(message)]).encode()
    link.sendall(struct.pack(">I", len(sealed)) + sealed)


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + limit(seconds)
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.01)
