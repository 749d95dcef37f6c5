# SPDX-License-Identifier: Apache-2.0
"""A node that serves wrong bytes, too slowly, without end or not at all costs time and no job."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged
from peers_rig import GENERATION, QUICK, Lease, finish, frame, impostor, lease, publish, reply, wait_for
from stepd import needs_root

from vhpc_slurm.catalog import chunk_list
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.munge import Munge
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.peers import process as serving
from vhpc_slurm.node.store.peers import tree
from vhpc_slurm.node.store.peers.client import Lineage

CHUNK = 1 << 16
SIZE = 6 * CHUNK + 1000
Send = Callable[[socket.socket, bytes], None]


def wrong_bytes(link: socket.socket, data: bytes) -> None:
    link.sendall(frame(data[:CHUNK]) + frame(b"x" * CHUNK) + frame(data[2 * CHUNK :]))


def nothing(link: socket.socket, data: bytes) -> None:
    link.recv(1)


def waits(link: socket.socket, data: bytes) -> None:
    for _ in range(1000):
        link.sendall(struct.pack(">I", 0))
        time.sleep(0.05)


def single_bytes(link: socket.socket, data: bytes) -> None:
    for at in range(1000):
        link.sendall(frame(data[at : at + 1]))
        time.sleep(0.05)


def half(link: socket.socket, data: bytes) -> None:
    link.sendall(frame(data[: 2 * CHUNK]) + frame(data[2 * CHUNK : 3 * CHUNK])[:500])


def huge_frame(link: socket.socket, data: bytes) -> None:
    link.sendall(struct.pack(">I", 1 << 30) + data)


def everything(link: socket.socket, data: bytes) -> None:
    link.sendall(frame(data[: 3 * CHUNK]) + frame(data[3 * CHUNK :]))


def other_bytes(link: socket.socket, data: bytes) -> None:
    everything(link, b"x" * len(data))


def gone(link: socket.socket, data: bytes) -> None:
    link.sendall(frame(data[:CHUNK]) + struct.pack(">I", 0xFFFFFFFF))


def serves(image: ImageIdentity, job: Lease, send: Send, **fields: Any) -> Any:
    """A node that serves everything but the root well; the root it sends its own way."""

    def act(link: socket.socket, ask: dict[str, object]) -> None:
        data = (job.catalog / "blobs/sha256" / str(ask["sha256"])).read_bytes()
        assert ask["start"] == 0
        if ask["sha256"] == image.manifest.root.sha256:
            reply(link, ask, **({"has": len(data)} | fields))
            send(link, data)
        else:
            reply(link, ask, has=len(data))
            link.sendall(frame(data))

    return act


@pytest.mark.promise("peers.job", "attack.peer-answer")
@pytest.mark.parametrize(
    ("send", "kept"),
    [
        (wrong_bytes, 1),
        (nothing, 0),
        (waits, 0),
        (single_bytes, 0),
        (half, 2),
        (huge_frame, 0),
        (gone, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_bad_parent_costs_the_chunks_it_did_not_give(tmp_path: Path, send: Send, kept: int) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.read_catalogue(1)
        with impostor(job.listener(0), serves(image, job, send)):
            began = time.monotonic()
            found = job.stage(1, image)
        assert found["catalogue"] == SIZE - kept * CHUNK
        assert time.monotonic() - began < 40.0, "before the slowest of them has sent all"
        path = job.nodes[1].store / image.manifest.root.sha256
        assert hashlib.sha256(path.read_bytes()).hexdigest() == image.manifest.root.sha256


def test_an_ancestor_is_asked_when_the_parent_is_bad(tmp_path: Path) -> None:
    """Node 3 asks node 1, then node 0; it cannot read the catalogue."""
    with lease(tmp_path, 4) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        job.stage(0, image)
        with impostor(job.listener(1), serves(image, job, wrong_bytes)):
            found = job.stage(3, image)
        assert set(found) == {"n0", "n1"}
        assert SIZE - CHUNK <= found["n0"] < SIZE + CHUNK


@pytest.mark.promise("attack.peer-answer")
@pytest.mark.parametrize(
    "fields", [{"nonce": "0" * 32}, {"uid": 1000}, {"problem": "go away"}, {"has": "many"}], ids=str
)
def test_an_answer_that_root_did_not_give_is_not_used(tmp_path: Path, fields: dict[str, Any]) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.read_catalogue(1)
        with impostor(job.listener(0), serves(image, job, everything, **fields)):
            assert job.stage(1, image)["catalogue"] == SIZE


def test_wrong_bytes_without_a_chunk_list_are_found_at_the_end(tmp_path: Path) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK, listed=False)
        job.read_catalogue(1)
        with impostor(job.listener(0), serves(image, job, other_bytes)):
            found = job.stage(1, image)
        assert found["catalogue"] == SIZE
        path = job.nodes[1].store / image.manifest.root.sha256
        assert hashlib.sha256(path.read_bytes()).hexdigest() == image.manifest.root.sha256


@pytest.mark.promise("peers.job")
def test_a_parent_too_slow_for_the_deadline_is_left(tmp_path: Path) -> None:
    """A chunk in 0.9 s: never without progress, but it would take 6 s in all, and 4 s are left."""

    def slow(link: socket.socket, data: bytes) -> None:
        for at in range(0, SIZE, CHUNK):
            time.sleep(0.9)
            link.sendall(frame(data[at : at + CHUNK]))

    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.pace = dataclasses.replace(QUICK, silent_s=3.5)
        job.read_catalogue(1, stage_timeout_s=4)
        with impostor(job.listener(0), serves(image, job, slow)):
            found = job.stage(1, image)
        assert SIZE - 3 * CHUNK <= found["catalogue"] < SIZE


def test_unreachable_peers_cost_one_wait_for_an_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lease(tmp_path, 4) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.read_catalogue(3)
        job.listener(0).close()
        assert set(job.stage(3, image)) == {"catalogue"}
        assert caplog.text.count("no other node serves the image") == 1, "not for each of three blobs"


def test_a_damaged_catalogue_is_the_images_error(tmp_path: Path) -> None:
    with lease(tmp_path, 1) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        root = job.catalog / "blobs/sha256" / image.manifest.root.sha256
        with root.open("r+b") as file:
            file.seek(3 * CHUNK)
            file.write(b"!!!!")
        with pytest.raises(UserError, match="wrong bytes in chunk 3 of the catalogue"):
            job.stage(0, image)
        assert not list(job.nodes[0].store.glob(".*.part"))


def test_a_missing_chunk_list_costs_no_job(tmp_path: Path) -> None:
    """The parent stops offering it; the child does not wait for it, and gets the rest of the image there."""
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        listed = chunk_list(image.manifest.root)
        assert listed is not None
        (job.catalog / "blobs/sha256" / listed.sha256).unlink()
        job.serve([0], image)
        assert job.stage(0, image)["catalogue"] == SIZE + 600
        job.offer(0, image, without=listed.sha256)
        assert job.stage(1, image) == {"n0": SIZE + 600}


@pytest.mark.promise("peers.job")
def test_a_server_that_dies_in_the_middle_costs_the_rest(tmp_path: Path) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, 64 * CHUNK, CHUNK)
        job.serve([0], image)
        job.stage(0, image)
        (job.nodes[0].store / image.manifest.root.sha256).rename(job.nodes[0].part(image.manifest.root))
        os.truncate(job.nodes[0].part(image.manifest.root), 10 * CHUNK)
        job.read_catalogue(1)
        staging, part = job.staging(1, image), job.nodes[1].part(image.manifest.root)
        with ThreadPoolExecutor(1) as threads:
            copied = threads.submit(finish, staging)
            wait_for(lambda: part.exists() and part.stat().st_size == 10 * CHUNK, "ten chunks come")
            job.close()
            assert dict(copied.result(20).sources)["catalogue"] == 54 * CHUNK


@pytest.mark.promise("attack.peer-bytes")
@needs_root
@pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
def test_the_process_serves_with_munge_and_ends(tmp_path: Path, daemon: Munged) -> None:
    """The process that Prolog starts, its own port, real credentials; the nodes are names of this host."""
    raw = {
        "paths": {part: str(tmp_path / part) for part in ("state", "run", "log")},
        "images": {"catalog": str(tmp_path / "catalog"), "store": str(tmp_path / "store")},
        "controller": {"munge_socket": str(daemon.socket)},
    }
    image = publish(tmp_path / "catalog", SIZE, CHUNK)
    config = msgspec.convert(raw, Config)
    layout = Layout(config)
    finish(images.stage(layout, image))
    names = ("localhost", "127.0.0.1")
    rig = cast(Lease, SimpleNamespace(names=names, nodes=[SimpleNamespace(name="localhost", layout=layout)]))
    Lease.offer(rig, 0, image)
    with serving.listen(0) as listener, (tmp_path / "log").open("w") as log:
        port = listener.getsockname()[1]
        ref = serving.start(config, listener, GENERATION, log.fileno())
    try:
        raw["images"] = {"catalog": "/nowhere", "store": str(tmp_path / "other")}
        sources, seal = tree.sources(names, names[1]), Munge(str(daemon.socket))
        asking = Lineage(GENERATION, names[1], sources, str, port, seal)
        other = Layout(msgspec.convert(raw, Config))
        found = dict(finish(images.stage(other, image, None, asking)).sources)
        assert found == {"localhost": SIZE + 600 + 7 * 32}
        status = Path(f"/proc/{ref.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert [one.pid for one, name in process.marked(GENERATION) if name == GENERATION] == [ref.pid]
    finally:
        process.end(ref)
    assert "Traceback" not in (tmp_path / "log").read_text()
