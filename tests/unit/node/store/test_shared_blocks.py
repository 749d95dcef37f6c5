# SPDX-License-Identifier: Apache-2.0
"""Copies that share blocks where the file system can: on a real Btrfs, and on file systems that cannot."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from node_rig import node_layout, publish, with_root
from peers_rig import finish
from stepd import needs_root

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity
from vhpc_slurm.node.store import images
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
MIB = 1 << 20
MKFS = shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin:/usr/bin")
needs_btrfs = pytest.mark.skipif(MKFS is None, reason="apt install btrfs-progs")


@pytest.fixture(name="btrfs")
def small_btrfs(tmp_path: Path) -> Iterator[Path]:
    assert MKFS is not None
    disk, folder = tmp_path / "disk", tmp_path / "btrfs"
    disk.touch()
    os.truncate(disk, 256 * MIB)
    subprocess.run([MKFS, "-q", str(disk)], check=True)
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", str(disk), str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def used(folder: Path) -> int:
    subprocess.run(["sync", "-f", str(folder)], check=True)
    space = os.statvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def on(folder: Path, layout: Layout) -> Layout:
    """Catalogue and store on one file system."""
    raw = msgspec.to_builtins(layout.config)
    raw["images"] |= {"catalog": str(folder / "catalog"), "store": str(folder / "store")}
    return Layout(msgspec.convert(raw, Config))


def image_of(layout: Layout, size: int) -> ImageIdentity:
    return with_root(layout, random.Random(1).randbytes(size))


@pytest.mark.promise("store.reflink")
@needs_root
@needs_btrfs
def test_a_store_shares_blocks_with_a_catalogue_on_its_disk(btrfs: Path, layout: Layout) -> None:
    layout = on(btrfs, layout)
    image = image_of(layout, 40 * MIB)
    before = used(btrfs)
    staged = finish(images.stage(layout, image))
    assert hashlib.sha256(staged.root.read_bytes()).hexdigest() == image.manifest.root.sha256
    assert used(btrfs) - before < 10 * MIB
    assert dict(staged.sources).keys() == {"catalogue"}
    assert staged.copied > 40 * MIB
    catalogue = btrfs / "catalog/blobs/sha256" / image.manifest.root.sha256
    with catalogue.open("r+b") as file:
        file.write(b"changed later")
    assert hashlib.sha256(staged.root.read_bytes()).hexdigest() == image.manifest.root.sha256


@pytest.mark.promise("store.reflink")
@needs_root
@needs_btrfs
def test_shared_blocks_are_verified_like_a_copy(btrfs: Path, layout: Layout) -> None:
    layout = on(btrfs, layout)
    image = image_of(layout, 4 * MIB)
    catalogue = btrfs / "catalog/blobs/sha256" / image.manifest.root.sha256
    with catalogue.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"!")
    with pytest.raises(UserError, match=r"is damaged: root.erofs: it has sha256"):
        finish(images.stage(layout, image))
    assert sorted(path.name for path in (btrfs / "store/blobs/sha256").glob("*[!k]")) == sorted(
        blob.sha256 for blob in (image.manifest.kernel, image.manifest.initrd)
    )


@needs_root
@needs_btrfs
def test_a_copied_file_shares_its_blocks_on_one_file_system(btrfs: Path, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(30 * MIB)
    (btrfs / "a").write_bytes(data)
    before = used(btrfs)
    files.copy(btrfs / "a", btrfs / "b")
    assert used(btrfs) - before < 5 * MIB
    files.copy(btrfs / "a", tmp_path / "c")
    assert (btrfs / "b").read_bytes() == (tmp_path / "c").read_bytes() == data


def test_a_copy_has_the_bytes_and_never_replaces_a_file(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(3 * MIB + 17)
    (tmp_path / "a").write_bytes(data)
    files.copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    with pytest.raises(FileExistsError):
        files.copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    with pytest.raises(OSError, match="not a regular file"):
        files.copy(Path("/dev/zero"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.promise("disk.full-kernel")
@needs_root
def test_a_kernel_without_room_in_the_run_folder_drains_nothing(layout: Layout) -> None:
    """On a file system of 40 MiB, as a small /run."""
    staged = finish(images.stage(layout, publish(layout)))
    run = Path(layout.config.paths.run)
    run.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(run)], check=True)
    try:
        assert [path.read_bytes()[:7] for path in images.private_copies(staged, run)] == [
            b"vmlinuz",
            b"initrdi",
        ]
        for name in ("kernel", "initrd"):
            (run / name).unlink()
        os.truncate(staged.initrd, 20 * MIB)
        (run / "of other jobs").write_bytes(bytes(10 * MIB))
        with pytest.raises(
            FabricError, match=r"no room in .* for kernel and initrd of a guest \(20 MiB\): 30 MiB"
        ):
            images.private_copies(staged, run)
        os.truncate(staged.initrd, 30 * MIB)
        with pytest.raises(UserError, match=r"too large for this node: they have 30 MiB, .* 40 MiB"):
            images.private_copies(staged, run)
        assert sorted(path.name for path in run.iterdir()) == ["of other jobs"]
    finally:
        subprocess.run(["umount", str(run)], check=True)


@pytest.mark.promise("disk.full-kernel")
@needs_root
def test_a_run_folder_that_becomes_full_drains_nothing(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs look at the same time and both see room."""
    staged = finish(images.stage(layout, publish(layout)))
    os.truncate(staged.initrd, 20 * MIB)
    run = Path(layout.config.paths.run)
    run.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "none", str(run)], check=True)
    monkeypatch.setattr(images, "_check_room", lambda *_: None)
    try:
        with pytest.raises(FabricError, match=r"no room in .*No space left"):
            images.private_copies(staged, run)
        assert not list(run.iterdir())
    finally:
        subprocess.run(["umount", str(run)], check=True)
