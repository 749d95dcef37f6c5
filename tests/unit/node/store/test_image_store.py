# SPDX-License-Identifier: Apache-2.0
"""The node's store of images: its content is whole and right, and a bad image harms no other job."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from node_rig import GENERATION, node_layout, publish
from stepd import needs_root

from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import Blob, ImageIdentity
from vhpc_slurm.node.store import copying as blob_copy
from vhpc_slurm.node.store import images, journal, part, pins
from vhpc_slurm.node.store.layout import Layout

# Tests that start or count slurmstepds see each other's: one worker runs them all.
pytestmark = pytest.mark.xdist_group("slurmstepd")

layout = node_layout


def stage(layout: Layout, image: ImageIdentity, pause_s: float = 0.0) -> images.StagedImage:
    """Drive the copy to its end."""
    copying = images.stage(layout, image)
    while True:
        try:
            next(copying)
            time.sleep(pause_s)
        except StopIteration as end:
            staged: images.StagedImage = end.value
            return staged


@pytest.mark.promise("image.same", "attack.image-file")
def test_a_staged_image_has_the_bytes_its_digests_say(layout: Layout) -> None:
    image = publish(layout)
    staged = stage(layout, image)
    for path, blob in ((staged.kernel, image.manifest.kernel), (staged.root, image.manifest.root)):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == blob.sha256
        assert path.stat().st_mode & 0o777 == 0o644
    inode = staged.root.stat().st_ino
    assert stage(layout, image).root.stat().st_ino == inode, "a second staging copies nothing"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("flip:root.erofs", "root.erofs: it has sha256"),
        ("longer:initrd", "initrd: it has 6001 bytes, the manifest says 6000"),
        ("absent:vmlinuz", "vmlinuz is not in the catalogue"),
    ],
)
def test_a_broken_image_is_the_users_error_and_leaves_nothing(layout: Layout, damage: str, said: str) -> None:
    image = publish(layout, damage=damage)
    with pytest.raises(UserError, match=said):
        stage(layout, image)
    store = Path(layout.config.images.store) / "blobs" / "sha256"
    assert not list(store.glob("*.part"))
    bad = {
        "root.erofs": image.manifest.root,
        "initrd": image.manifest.initrd,
        "vmlinuz": image.manifest.kernel,
    }
    assert not (store / bad[damage.split(":")[1]].sha256).exists()


@pytest.mark.promise("attack.blob")
@pytest.mark.parametrize("what", ["fifo", "folder", "device"])
def test_irregular_files_in_the_catalogue_block_no_hook(layout: Layout, what: str) -> None:
    image = publish(layout)
    blob = Path(layout.config.images.catalog) / "blobs/sha256" / image.manifest.root.sha256
    blob.unlink()
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[what](blob)
    with pytest.raises(UserError, match=r"root\.erofs: it is not a regular file"):
        stage(layout, image)


def huge(layout: Layout, size: int) -> ImageIdentity:
    """An image whose root is a sparse file of so many bytes."""
    image = publish(layout)
    blob = Blob("root.erofs", "ab" * 32, size)
    path = Path(layout.config.images.catalog) / "blobs/sha256" / blob.sha256
    path.touch()
    os.truncate(path, size)
    return dataclasses.replace(image, manifest=dataclasses.replace(image.manifest, root=blob))


def test_an_image_too_large_for_any_store_is_refused_unread(layout: Layout) -> None:
    with pytest.raises(UserError, match=r"too large for this node: its files have 2097152 MiB"):
        stage(layout, huge(layout, 2 << 40))
    assert [name for name, _ in images.stored(layout)] != ["ab" * 32]


@pytest.mark.promise("attack.blob")
@needs_root
def test_a_full_store_removes_images_that_no_job_uses(layout: Layout) -> None:
    """On a real file system of 100 MiB."""
    store = Path(layout.config.images.store)
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(store)], check=True)
    try:
        image = publish(layout)
        staged = stage(layout, image)
        pins.pin(layout, image, GENERATION)
        old, older = (store / "blobs/sha256" / (letter * 64) for letter in "ab")
        for path, age in ((old, 100), (older, 200)):
            path.write_bytes(b"x" * (15 << 20))
            os.utime(path, (time.time() - age,) * 2)
        torn = store / "blobs/sha256" / f".{'c' * 64}.part"
        torn.write_bytes(b"x" * (1 << 20))
        # 64 MiB stay free: the torn copy and the older blob have to go, the other one may stay
        with pytest.raises(UserError, match="is damaged"):
            stage(layout, huge(layout, 15 << 20))
        assert (torn.exists(), older.exists(), old.exists()) == (False, False, True)
        (store / "of others").write_bytes(b"x" * (10 << 20))
        with pytest.raises(FabricError, match=r"no room for image tiny:1: its root.erofs needs 30 MiB, 2"):
            stage(layout, huge(layout, 30 << 20))
        assert not old.exists()
        assert staged.root.exists(), "in use"
        assert not list(store.glob("blobs/sha256/.*.part"))
    finally:
        subprocess.run(["umount", str(store)], check=True)


def test_a_failed_or_killed_copy_leaves_no_obstacle(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    image = publish(layout)
    store = Path(layout.config.images.store) / "blobs" / "sha256"
    store.mkdir(parents=True)
    (store / f".{image.manifest.kernel.sha256}.part").write_bytes(b"torn")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FabricError, match="No space left"):
            stage(layout, image)
    assert not list(store.glob(".*.part"))
    assert stage(layout, image).kernel.exists()


def test_a_copy_can_be_cancelled_and_has_a_deadline(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_copy, "CHUNK", 1000)
    monkeypatch.setattr(part, "PLAIN", 1000)
    monkeypatch.setattr(images, "CHECK_S", 0.0)

    copying = images.stage(layout, publish(layout))
    next(copying)
    with pytest.raises(journal.Stopped):
        copying.throw(journal.Stopped("the job has ended"))
    raw = msgspec.to_builtins(layout.config)
    raw["guests"]["stage_timeout_s"] = 1
    slow = Layout(msgspec.convert(raw, Config))
    with pytest.raises(FabricError, match="could not be copied within 1 s"):
        stage(slow, publish(slow), pause_s=0.4)
    (kept,) = (Path(layout.config.images.store) / "blobs/sha256").glob(".*.part")
    size = kept.stat().st_size
    assert dict(stage(layout, publish(layout)).sources)["kept"] == size > 0, (
        "the next copy goes on from there"
    )
    assert not kept.exists()


def test_pins_come_and_go_and_name_their_images(layout: Layout) -> None:
    image = publish(layout)
    stage(layout, image)
    assert len(pins.unused(layout)) == 3
    pins.pin(layout, image, GENERATION)
    assert list(pins.pins(layout)) == [(image.digest, GENERATION)]
    assert pins.unused(layout) == []
    pins.unpin(layout, image.digest, GENERATION)
    pins.unpin(layout, image.digest, GENERATION)
    assert list(pins.pins(layout)) == []
    assert len(pins.unused(layout)) == 3
