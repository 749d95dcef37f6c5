# SPDX-License-Identifier: Apache-2.0
"""Hashing of an image on its way into a node's store; wrong bytes never get a digest's name."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from peers_rig import finish, lease, publish

from vhpc_slurm.errors import UserError
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store import part as written

CHUNK = 1 << 16
SIZE = 20 * CHUNK + 1000
LIST = 21 * 32


class CountingHashes:
    """hashlib of the module that writes copies; counts the bytes that are hashed."""

    def __init__(self) -> None:
        self.bytes = 0

    def sha256(self, data: bytes = b"") -> CountingHash:
        return CountingHash(self, data)


class CountingHash:
    def __init__(self, counter: CountingHashes, data: bytes) -> None:
        self._counter, self._hash = counter, hashlib.sha256()
        self.update(data)

    def update(self, data: bytes) -> None:
        self._counter.bytes += len(data)
        self._hash.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hash, name)


@pytest.mark.promise("image.hash")
@pytest.mark.parametrize("listed", [True, False])
def test_bytes_of_the_catalogue_are_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    counted = CountingHashes()
    monkeypatch.setattr(written, "hashlib", counted)
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK, listed=listed)
        manifest, store = image.manifest, job.nodes[0].store
        finish(images.stage(job.nodes[0].layout, image))
        assert counted.bytes == manifest.kernel.size + manifest.initrd.size + SIZE + LIST * listed
        root = store / manifest.root.sha256
        root.unlink()
        counted.bytes = 0
        job.serve([0], image)
        assert job.stage(0, image) == {"catalogue": SIZE}
        assert counted.bytes == SIZE, "also where other nodes get it while it is copied"
        assert hashlib.sha256(root.read_bytes()).hexdigest() == root.name


@pytest.mark.promise("image.hash")
def test_wrong_bytes_of_the_catalogue_are_not_kept(tmp_path: Path) -> None:
    """The first node learns of them from the digest of the whole, the node that asks it from the chunk."""
    with lease(tmp_path, 2) as job:
        image = publish(job.catalog, SIZE, CHUNK)
        job.serve([0], image)
        job.read_catalogue(1)
        root = job.catalog / "blobs/sha256" / image.manifest.root.sha256
        with root.open("r+b") as file:
            file.seek(2 * CHUNK)
            file.write(b"!!!!")
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for copy in [threads.submit(job.stage, rank, image) for rank in (0, 1)]:
                with pytest.raises(UserError, match="root: wrong bytes in chunk 2 of the catalogue"):
                    copy.result(30)
        for node in job.nodes:
            assert not node.part(image.manifest.root).exists()
            assert not (node.store / root.name).exists()


@pytest.mark.promise("image.hash")
def test_a_list_of_other_bytes_makes_no_file_right(tmp_path: Path) -> None:
    """A manifest may have the digest of one root and the chunk list of another: the digest decides."""
    with lease(tmp_path, 2) as job:
        image, other = (publish(job.catalog, SIZE, CHUNK, seed=seed) for seed in (1, 2))
        blobs, root = job.catalog / "blobs/sha256", image.manifest.root
        lying = dataclasses.replace(root, chunks=other.manifest.root.chunks)
        forged = dataclasses.replace(image, manifest=dataclasses.replace(image.manifest, root=lying))
        job.serve([0], forged)
        # a bad node has, under the name of the one root, the other one, as the list has it
        job.stage(0, other)
        shutil.copy(blobs / other.manifest.root.sha256, job.nodes[0].store / root.sha256)
        job.read_catalogue(1)
        found = job.stage(1, forged)
        assert found == {"n0": 600 + LIST + SIZE, "catalogue": SIZE}, "all came, was wrong, and came again"
        final = job.nodes[1].store / root.sha256
        assert hashlib.sha256(final.read_bytes()).hexdigest() == root.sha256
        # the catalogue has them, too
        shutil.copy(blobs / other.manifest.root.sha256, blobs / root.sha256)
        final.unlink()
        with pytest.raises(UserError, match=f"it has sha256 {other.manifest.root.sha256[:16]}"):
            finish(images.stage(job.nodes[1].layout, forged))
        assert not final.exists()
