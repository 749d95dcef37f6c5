# SPDX-License-Identifier: Apache-2.0
"""Nodes of a lease pass an image on: the reader of the catalogue, the blobs that are served, and their
receivers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers_rig import GENERATION, Lease, Node, PlainSeal, finish, lease, publish, wait_for
from stepd import needs_root

from vhpc_slurm import rootport
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.peers import client, tree
from vhpc_slurm.node.store.peers.client import Pace, PeerSource
from vhpc_slurm.node.store.peers.server import Limits
from vhpc_slurm.node.store.peers.wire import PeerError

CHUNK = 1 << 16
SIZE = 20 * CHUNK + 1000


def whole(node: Node, image: ImageIdentity) -> bool:
    """Whether a node's store has the bytes that the image's digests say."""
    blobs = (image.manifest.kernel, image.manifest.initrd, image.manifest.root)
    return all(hashlib.sha256((node.store / b.sha256).read_bytes()).hexdigest() == b.sha256 for b in blobs)


def total(image: ImageIdentity) -> int:
    manifest = image.manifest
    return sum(blob.size for blob in (manifest.kernel, manifest.initrd, manifest.root))


def test_eight_cold_nodes_read_the_catalogue_once(tmp_path: Path) -> None:
    """Only the first node has a catalogue: another one that read it would fail."""
    with lease(tmp_path, 8) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve(range(4), image)
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            sources = list(threads.map(lambda rank: job.stage(rank, image), range(8)))
        assert all(whole(node, image) for node in job.nodes)
        lists = 21 * 32
        assert sources[0] == {"catalogue": total(image) + lists}
        parents = {1: "n0", 2: "n0", 3: "n1", 4: "n1", 5: "n2", 6: "n2", 7: "n3"}
        assert {rank: set(sources[rank]) for rank in parents} == {r: {p} for r, p in parents.items()}
        assert {sum(found.values()) for found in sources} == {total(image) + lists}


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16384:
        pytest.skip("needs 16,384 open files: raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (16384, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.promise("peers.job")
@pytest.mark.usefixtures("many_files")
def test_a_thousand_cold_nodes_read_the_catalogue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 100 at a time, in turn in one thread; one more serves them all."""
    monkeypatch.setattr(rootport, "TRIES", 0)
    monkeypatch.setattr(images, "CHECK_S", -1.0)
    monkeypatch.setattr(client, "END_S", 0.0)
    patient = Pace(10.0, 10.0, 0.0, 60.0, 60.0, 60.0, 0.0, 0.0)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vhpc-peers-") as folder,
        lease(Path(folder), 1000, pace=patient, limits=Limits(any_port=True, request_s=60, send_s=60)) as job,
    ):
        image = publish(job.catalog, 8 * 4096, 4096)
        job.serve(range(1000), image)
        later, running = iter(range(1000)), dict[int, Any]()
        found: dict[int, Counter[str]] = {}
        while len(found) < 1000:
            for rank in itertools.islice(later, 100 - len(running)):
                running[rank] = job.staging(rank, image)
            for rank, staging in list(running.items()):
                try:
                    next(staging)
                except StopIteration as end:
                    found[rank] = Counter(dict(end.value.sources))
                    del running[rank]
        assert all(whole(node, image) for node in job.nodes)
    size = total(image) + 8 * 32
    assert sum(one["catalogue"] for one in found.values()) == size, "once, by a single node"
    depth = {0: 0}
    for rank in range(1, 1000):
        (source,) = found[rank]
        depth[rank] = depth[int(source[1:])] + 1
    assert max(depth.values()) == 9, "as deep as a binary tree of 1,000 nodes"
    fan = Counter(next(iter(found[rank])) for rank in range(1, 1000))
    assert max(fan.values()) == 2


def test_a_child_receives_while_its_parent_still_copies(tmp_path: Path) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        for part in ("kernel", "initrd"):
            blob = getattr(image.manifest, part)
            job.nodes[0].store.mkdir(parents=True, exist_ok=True)
            shutil.copy(job.catalog / "blobs/sha256" / blob.sha256, job.nodes[0].store)
        root, hashes = image.manifest.root, image.manifest.root.chunks
        data = (job.catalog / "blobs/sha256" / root.sha256).read_bytes()
        shutil.copy(job.catalog / "blobs/sha256" / hashes, job.nodes[0].store)
        part_file = job.nodes[0].part(root)
        part_file.write_bytes(data[: 3 * CHUNK + 777])
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            copied = threads.submit(job.stage, 1, image)
            own = job.nodes[1].part(root)
            wait_for(lambda: own.exists() and own.stat().st_size == 3 * CHUNK, "three whole chunks come")
            time.sleep(0.2)
            assert own.stat().st_size == 3 * CHUNK, "what the parent has not verified does not"
            with part_file.open("ab") as file:
                file.write(data[3 * CHUNK + 777 :])
            part_file.rename(job.nodes[0].store / root.sha256)
            assert set(copied.result(20)) == {"n0"}
        assert whole(job.nodes[1], image)


def test_without_a_chunk_list_only_whole_blobs_are_passed_on(tmp_path: Path) -> None:
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK, listed=False)
        job.serve([0], image)
        root = image.manifest.root
        job.nodes[0].store.mkdir(parents=True)
        job.nodes[0].part(root).write_bytes(b"x" * CHUNK)
        source = PeerSource.ask(job.lineage(1), "n0", root, 0)
        assert source.has == 0
        source.close()
        assert job.stage(0, image)["catalogue"] >= total(image)
        assert set(job.stage(1, image)) == {"n0"}
        assert whole(job.nodes[1], image)


@pytest.mark.parametrize("pid", ["alive", "dead"])
def test_a_lost_parent_costs_one_copy_of_the_rest(tmp_path: Path, pid: str) -> None:
    """The parent has a few chunks and no copy runs there; its Prolog is dead or does nothing."""
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        job.stage(0, image)
        root = image.manifest.root
        (job.nodes[0].store / root.sha256).rename(job.nodes[0].part(root))
        os.truncate(job.nodes[0].part(root), 5 * CHUNK)
        job.offer(0, image, alive=pid == "alive")
        job.read_catalogue(1)
        found = job.stage(1, image)
        assert found["catalogue"] == SIZE - 5 * CHUNK
        assert found["n0"] == total(image) - SIZE + 21 * 32 + 5 * CHUNK
        assert whole(job.nodes[1], image)


def refusal(job: Lease, blob: Blob, **changes: object) -> str:
    """Why a request is refused."""
    asking = dataclasses.replace(job.lineage(1), **changes)  # type: ignore[arg-type]
    with pytest.raises(PeerError) as caught:
        PeerSource.ask(asking, "n0", blob, 0)
    return str(caught.value)


@pytest.mark.promise("attack.peer-bytes")
def test_only_root_of_a_node_of_the_lease_gets_bytes(tmp_path: Path) -> None:
    closed = "it closed the connection without an answer"
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        job.stage(0, image)
        root = image.manifest.root
        assert refusal(job, root, seal=PlainSeal(1000)) == closed
        assert refusal(job, root, own="n7") == closed
        job.found_at = "127.0.0.2"
        assert refusal(job, root) == closed, "another host has that name"
        job.found_at = "127.0.0.1"
        PeerSource.ask(job.lineage(1), "n0", root, 0).close()


@pytest.mark.promise("attack.peer-bytes")
def test_no_other_image_and_no_other_job_is_served(tmp_path: Path) -> None:
    with lease(tmp_path, 2) as job:
        image, other = publish(job.catalog, SIZE, CHUNK), publish(job.catalog, SIZE, CHUNK, seed=2)
        job.serve([0], image)
        job.stage(0, image)
        job.stage(0, other)
        assert refusal(job, other.manifest.root) == "no such blob is offered"
        gone = GENERATION.replace("42", "43", 1)
        assert refusal(job, image.manifest.root, generation=gone) == f"{gone} offers nothing here"
        source = PeerSource.ask(job.lineage(1), "n0", image.manifest.root, 0)
        assert source.has == SIZE
        source.close()


@pytest.mark.promise("attack.peer-port")
def test_silent_and_invalid_connections_are_closed(tmp_path: Path) -> None:
    with lease(tmp_path, 2, limits=Limits(request_s=0.3, any_port=True)) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        job.stage(0, image)
        place = (job.nodes[0].address, job.port)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4oops", b"\0\0\x20\0" + b"x" * 9000):
            with socket.create_connection(place, 5) as link:
                link.settimeout(60)
                link.sendall(data)
                with contextlib.suppress(ConnectionError):
                    assert link.recv(1) == b""
        for link in [socket.create_connection(place, 5) for _ in range(70)]:
            link.settimeout(60)
            assert link.recv(1) == b""
            link.close()
        assert set(job.stage(1, image)) == {"n0"}, "and the server still serves"


@pytest.mark.promise("attack.peer-bytes")
@needs_root
def test_a_port_that_every_user_can_have_is_not_served(tmp_path: Path) -> None:
    with lease(tmp_path, 2, limits=Limits()) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        with socket.create_connection((job.nodes[0].address, job.port), 5) as link:
            assert link.recv(1) == b""
        job.stage(0, image)
        assert set(job.stage(1, image)) == {"n0"}, "root has ports below 1024"


@pytest.mark.promise("image.resume")
def test_a_killed_copy_continues_from_its_verified_chunks(tmp_path: Path) -> None:
    with lease(tmp_path, 1) as job:
        image = publish(job.catalog, 64 * CHUNK, CHUNK)
        code = (
            "import sys, time; sys.path[:0] = sys.argv[3:]\n"
            "from pathlib import Path; from peers_rig import Lease, publish\n"
            "from vhpc_slurm.node.store import images, copying\n"
            "copying.CHUNK = 10_000; images.CHECK_S = -1.0\n"
            "job = Lease(Path(sys.argv[1]), 1); image = publish(job.catalog, 64 * 65536, 65536)\n"
            "for _ in job.staging(0, image): time.sleep(0.01)\n"
        )
        folders = [str(Path(__file__).parent), *(path for path in sys.path if path)]
        killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), "-", *folders])
        part = job.nodes[0].part(image.manifest.root)
        wait_for(lambda: part.exists() and part.stat().st_size >= 5 * CHUNK, "it copies")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        kept = part.stat().st_size // CHUNK * CHUNK
        assert 5 * CHUNK <= kept < 64 * CHUNK
        found = job.stage(0, image)
        assert found == {"kept": kept, "catalogue": 64 * CHUNK - kept}
        assert whole(job.nodes[0], image)


@pytest.mark.promise("image.resume")
@pytest.mark.parametrize("listed", [True, False])
def test_a_torn_copy_is_repaired_after_any_crash(tmp_path: Path, listed: bool) -> None:
    with lease(tmp_path, 1) as job:
        image = publish(job.catalog, SIZE, CHUNK, listed=listed)
        root = image.manifest.root
        data = (job.catalog / "blobs/sha256" / root.sha256).read_bytes()
        job.nodes[0].store.mkdir(parents=True)
        for left in (
            data[: 2 * CHUNK] + bytes(CHUNK),  # a power cut: size without bytes
            data[: CHUNK + 1],
            b"",
            b"x" * (SIZE + CHUNK),
            data,
        ):
            job.nodes[0].part(root).write_bytes(left)
            finish(job.staging(0, image))
            assert whole(job.nodes[0], image)
            assert not job.nodes[0].part(root).exists()
            (job.nodes[0].store / root.sha256).unlink()


@pytest.mark.parametrize("where", ["link", "hard link", "folder"])
def test_a_part_that_is_something_else_is_not_written_to(tmp_path: Path, where: str) -> None:
    with lease(tmp_path, 1) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.nodes[0].store.mkdir(parents=True)
        other, part = tmp_path / "other", job.nodes[0].part(image.manifest.root)
        other.write_bytes(b"precious")
        if where == "folder":
            part.mkdir()
        else:
            {"link": part.symlink_to, "hard link": part.hardlink_to}[where](other)
        with pytest.raises(NodeError, match="cannot store image"):
            job.stage(0, image)
        assert other.read_bytes() == b"precious"


def test_a_full_disk_ends_the_copy_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.pwrite, [0]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        written[0] += len(data)
        if written[0] > 7 * CHUNK:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    with lease(tmp_path, 1) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(FabricError, match=r"has no room for image .*No space left"):
                job.stage(0, image)
        assert not list(job.nodes[0].store.glob(".*.part"))
        assert job.stage(0, image)["catalogue"] == SIZE


def test_the_tree_has_every_node_once() -> None:
    names = [f"n{rank}" for rank in range(1000)]
    assert tree.sources(names, "n0") == ()
    assert tree.sources(names, "n6") == ("n2", "n0")
    assert tree.sources(names, "n999") == tuple(f"n{rank}" for rank in (499, 249, 124, 61, 30, 14, 6, 2, 0))
    children = Counter(tree.sources(names, name)[0] for name in names[1:])
    assert set(children) == {name for name in names if tree.is_asked(names, name)}
    assert tree.sources(names, "other") == ()
