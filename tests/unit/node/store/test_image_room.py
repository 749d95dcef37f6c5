# SPDX-License-Identifier: Apache-2.0
"""Room in the node's store: a full one fails or requeues jobs, and is never the node's fault."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from node_rig import GENERATION, node_layout, publish, with_root
from peers_rig import finish
from stepd import needs_root

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.store import images, pins, room
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
MIB = 1 << 20


@pytest.fixture(name="store")
def small_store(layout: Layout) -> Iterator[Path]:
    """A store on a real file system of 100 MiB; copies leave 64 free."""
    store = Path(layout.config.images.store)
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", str(store)], check=True)
    yield store
    subprocess.run(["umount", str(store)], check=True)


def image_of(layout: Layout, size: int, fill: bytes) -> ImageIdentity:
    """The small image with a root of so many bytes."""
    return with_root(layout, fill * size)


@pytest.mark.promise("store.full")
@needs_root
def test_of_two_images_that_fit_alone_one_is_refused_at_once(
    layout: Layout, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy has written one MiB, and has reserved the rest."""
    first, second = image_of(layout, 20 * MIB, b"1"), image_of(layout, 21 * MIB, b"2")
    monkeypatch.setattr(images, "CHECK_S", 0.0)
    copying = images.stage(layout, first)
    root = store / "blobs/sha256" / f".{first.manifest.root.sha256}.part"
    while not root.exists() or root.stat().st_size == 0:
        next(copying)
    assert root.stat().st_size < 20 * MIB
    with pytest.raises(FabricError, match=r"no room for image tiny:1: its root.erofs needs 21 MiB, 1"):
        finish(images.stage(layout, second))
    assert root.exists(), "a copy that goes on is not removed"
    for _ in copying:
        pass
    assert hashlib.sha256((store / "blobs/sha256" / first.manifest.root.sha256).read_bytes()).hexdigest() == (
        first.manifest.root.sha256
    )
    finish(images.stage(layout, second))  # the first one has no pin, so it goes
    assert not (store / "blobs/sha256" / first.manifest.root.sha256).exists()


@pytest.mark.promise("store.full")
@needs_root
def test_a_store_that_others_fill_during_a_copy_drains_nothing(
    layout: Layout, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot reserve: ENOSPC comes in the middle."""
    monkeypatch.setattr(files, "reserve", lambda *_: False)
    monkeypatch.setattr(images, "CHECK_S", 0.0)
    image = image_of(layout, 30 * MIB, b"1")
    copying = images.stage(layout, image)
    for _ in range(5):
        next(copying)
    fill(store / "of others")
    with pytest.raises(FabricError, match="no room for image tiny:1"):
        list(copying)
    (store / "of others").unlink()
    assert finish(images.stage(layout, image)).root.exists()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB))


@needs_root
def test_room_is_made_once_more_for_a_copy_that_met_a_full_store(
    layout: Layout, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that no job uses any more takes the space meanwhile, and can be removed."""
    monkeypatch.setattr(files, "reserve", lambda *_: False)
    monkeypatch.setattr(images, "CHECK_S", 0.0)
    image, filled = image_of(layout, 30 * MIB, b"1"), False
    blob = store / "blobs/sha256" / ("a" * 64)
    for _ in (copying := images.stage(layout, image)):
        if not filled and list(blob.parent.glob(f".{image.manifest.root.sha256}.part")):
            filled = True
            fill(blob)
    assert filled
    assert not blob.exists()
    assert not list(copying)
    assert (blob.parent / image.manifest.root.sha256).stat().st_size == 30 * MIB


@pytest.mark.promise("store.full")
@needs_root
def test_an_image_whose_files_do_not_fit_together_fails_its_job(layout: Layout, store: Path) -> None:
    """A requeue would never help."""
    image = image_of(layout, 36 * MIB - 8192, b"1")
    with pytest.raises(UserError, match=r"too large for this node: its files have 36 MiB, .* store 36 MiB"):
        finish(images.stage(layout, image))
    assert not list(store.glob("blobs/sha256/.*.part"))


def limited(layout: Layout, **limits: int) -> Layout:
    raw = msgspec.to_builtins(layout.config)
    raw["images"] |= limits
    return Layout(msgspec.convert(raw, Config))


@pytest.mark.promise("store.limit")
def test_a_store_has_at_most_the_size_that_the_site_sets(layout: Layout) -> None:
    """On a file system with more space: the least recently used image goes, one that a job uses stays."""
    layout = limited(layout, store_max_mib=50)
    used, old, older, new = (image_of(layout, 15 * MIB, fill) for fill in (b"1", b"2", b"3", b"4"))
    room.pin(layout, used, GENERATION)
    for age, image in ((300, used), (200, older), (100, old)):
        staged = finish(images.stage(layout, image))
        os.utime(staged.root, (time.time() - age,) * 2)
    assert 45 * MIB <= room.used_of(layout) <= 50 * MIB
    finish(images.stage(layout, new))
    folder = Path(layout.config.images.store) / "blobs/sha256"
    there = [(folder / image.manifest.root.sha256).exists() for image in (used, older, old, new)]
    assert there == [True, False, True, True]
    assert room.used_of(layout) <= 50 * MIB
    room.pin(layout, new, "43.0.0123abcd")
    room.pin(layout, old, "44.0.0123abcd")
    with pytest.raises(FabricError, match=r"needs 15 MiB, [345] MiB are free"):
        finish(images.stage(layout, older))
    with pytest.raises(UserError, match="its files have 51 MiB, the node's image store 50 MiB"):
        finish(images.stage(layout, image_of(layout, 51 * MIB, b"5")))


@pytest.mark.promise("store.limit")
@needs_root
def test_the_space_that_the_site_keeps_is_not_for_images(layout: Layout, store: Path) -> None:
    """Of 100 MiB."""
    image = image_of(layout, 30 * MIB, b"1")
    with pytest.raises(UserError, match=r"too large for this node: its files have 30 MiB, .* 20 MiB"):
        finish(images.stage(limited(layout, store_keep_free_mib=80), image))
    assert finish(images.stage(limited(layout, store_keep_free_mib=60), image)).root.exists()
    assert os.statvfs(store).f_bavail * os.statvfs(store).f_frsize >= 60 * MIB


@pytest.mark.promise("store.full")
@needs_root
def test_a_pin_that_has_no_space_drains_nothing(layout: Layout, store: Path) -> None:
    (store / "pins").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "none", str(store / "pins")], check=True)
    try:
        with pytest.raises(FabricError, match="no room for image tiny:1: No space left"):
            room.pin(layout, publish(layout), GENERATION)
    finally:
        subprocess.run(["umount", str(store / "pins")], check=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_full_quota_are_the_same(layout: Layout, code: int) -> None:
    error = room.cannot_store(layout, publish(layout), OSError(code, os.strerror(code)))
    assert isinstance(error, FabricError)


def test_pins_that_come_and_go_meanwhile_hide_no_others(layout: Layout) -> None:
    """Threads pin and unpin one image, so its folder is made and removed, while a job of another
    continues."""
    image, other = publish(layout), dataclasses.replace(publish(layout), digest="sha256:" + "f" * 64)
    finish(images.stage(layout, image))
    room.pin(layout, other, "1.0.0123abcd")
    over, errors = threading.Event(), list[BaseException]()

    def come_and_go(generation: str) -> None:
        try:
            while not over.is_set():
                pins.pin(layout, image, generation)
                pins.unpin(layout, image.digest, generation)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=come_and_go, args=(f"{n}.0.0123abcd",)) for n in (2, 3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            assert pins.unused(layout) == []
            assert (other.digest, "1.0.0123abcd") in list(pins.pins(layout))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors


def test_reserved_space_does_not_change_a_files_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        if not files.reserve(file.fileno(), 5 * MIB):
            pytest.skip("this file system cannot reserve space: use ext4, XFS, Btrfs or a tmpfs for tests")
    assert path.stat().st_size == 0
    assert path.stat().st_blocks * 512 >= 5 * MIB
