# SPDX-License-Identifier: Apache-2.0
"""Images of users' own on a node: read with the user's rights, and not shared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from vhpc_slurm.catalog.manifest import decode_manifest
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.store import blobsource, images, pins
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="run as root: the test starts processes of other users"
)
RAW = (Path(__file__).parents[3] / "data/manifests/manifest.json").read_bytes()
ALICE = Account("alice", 65531, 65531, "", "/", "/bin/sh", (("alice", 65531),))
BOB = Account("bob", 65532, 65532, "", "/", "/bin/sh", (("bob", 65532),))
ROOT = b"root" * 300_000


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's is not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="vhpc-own-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(name="layout")
def layout_of_site(top: Path) -> Layout:
    return layout_with(top, 120)


def layout_with(top: Path, stage_timeout_s: int) -> Layout:
    raw = {
        "images": {"user_catalog": f"{top}/{{user}}", "store": f"{top}/store", "catalog": f"{top}/site"},
        "guests": {"stage_timeout_s": stage_timeout_s},
    }
    return Layout(msgspec.convert(raw, Config))


def blob(name: str, data: bytes) -> Blob:
    return Blob(name, hashlib.sha256(data).hexdigest(), len(data))


def image() -> ImageIdentity:
    manifest = replace(
        decode_manifest(RAW),
        kernel=blob("kernel", b"kernel"),
        initrd=blob("initrd", b"initrd"),
        root=blob("root", ROOT),
    )
    return ImageIdentity(ImageRef("mine", own=True), "sha256:" + "a" * 64, manifest)


def publish(top: Path, owner: Account) -> Path:
    """The blobs in a private catalogue of a user; returns the root's."""
    folder = top / owner.name / "blobs/sha256"
    folder.mkdir(parents=True)
    for data in (b"kernel", b"initrd", ROOT):
        (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)
    for path in (top / owner.name, *(top / owner.name).rglob("*")):
        os.chown(path, owner.uid, owner.gid)
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder / hashlib.sha256(ROOT).hexdigest()


def stage(layout: Layout, account: Account) -> images.StagedImage:
    copying = images.stage(layout, image(), account)
    while True:
        try:
            next(copying)
        except StopIteration as done:
            staged: images.StagedImage = done.value
            return staged


def test_a_private_image_is_read_with_its_owners_rights(top: Path, layout: Layout) -> None:
    publish(top, ALICE)
    staged = stage(layout, ALICE)
    assert staged.root.read_bytes() == ROOT
    assert staged.root.parent == top / "store/own/65531/sha256"
    assert staged.root.stat().st_uid == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in (staged.root, *staged.root.parents[:3])] == [
        0o644, 0o711, 0o711, 0o711,
    ]  # fmt: skip
    assert not (top / "store/blobs").exists()


@pytest.mark.promise("attack.private-image")
def test_no_user_gets_anothers_image_by_its_digests(top: Path, layout: Layout) -> None:
    publish(top, ALICE)
    stage(layout, ALICE)
    with pytest.raises(UserError, match="kernel cannot be read: No such file or directory"):
        stage(layout, BOB)


def to_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def of_root(path: Path) -> None:
    os.chown(path, 0, 0)


def shorter(path: Path) -> None:
    os.truncate(path, 1000)


def flipped(path: Path) -> None:
    path.write_bytes(ROOT[:-1] + b"!")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o666)
    os.chown(path, ALICE.uid, ALICE.gid)


@pytest.mark.promise("user.catalogue")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Path.unlink, "root cannot be read: No such file"),
        (of_root, "root cannot be read: Permission denied"),
        (to_zero, "image own/mine:latest is damaged: root: it has sha256"),
        (shorter, "and 1000 bytes, the manifest says"),
        (flipped, "root: it has sha256"),
        (pipe, "and 0 bytes, the manifest says"),
    ],
)
def test_a_bad_own_image_is_its_users_error(
    top: Path, layout: Layout, change: Callable[[Path], object], says: str
) -> None:
    change(publish(top, ALICE))
    with pytest.raises(UserError) as caught:
        stage(layout, ALICE)
    assert says in caught.value.line()
    left = [path.name for path in (top / "store/own/65531/sha256").iterdir() if path.suffix == ".part"]
    assert left == []


@pytest.mark.promise("attack.catalogue-read")
def test_a_link_to_a_file_of_root_shows_the_user_nothing(top: Path, layout: Layout) -> None:
    """The user names the digest of a file that only root may read, and links to it."""
    secret = top / "secret"
    secret.write_bytes(ROOT)
    secret.chmod(0o600)
    path = publish(top, ALICE)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(UserError, match="root cannot be read: Permission denied"):
        stage(layout, ALICE)


@pytest.mark.promise("attack.catalogue-read")
def test_a_hard_link_to_a_file_of_root_stages_nothing(top: Path, layout: Layout) -> None:
    """As on a kernel without fs.protected_hardlinks: the digest is known, the bytes are not the user's."""
    secret = top / "secret"
    secret.write_bytes(ROOT)
    secret.chmod(0o600)
    path = publish(top, ALICE)
    path.unlink()
    path.hardlink_to(secret)
    with pytest.raises(UserError, match="root cannot be read: Permission denied"):
        stage(layout, ALICE)
    about = secret.stat()
    assert (about.st_uid, stat.S_IMODE(about.st_mode), about.st_nlink) == (0, 0o600, 2)
    assert not [path for path in (top / "store").rglob("*") if path.name.startswith(blob("", ROOT).sha256)]


@pytest.mark.promise("user.catalogue")
def test_a_file_system_that_hangs_costs_only_the_users_job(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that does not end stands for one that waits for a file system of the user's choice."""
    publish(top, ALICE)
    marker = f"{os.getpid()}{time.monotonic_ns()}"
    stuck = top / "dd"
    stuck.write_text(f"#!/bin/sh\nexec sleep {marker}\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(blobsource, "DD", str(stuck))
    with pytest.raises(UserError, match="could not be copied within 1 s") as caught:
        stage(layout_with(top, 1), ALICE)
    assert "your catalogue" in caught.value.line()
    assert [line for line in _processes() if marker in line] == []


def _processes() -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_bytes().decode("utf-8", "replace"))
    return lines


def test_a_full_store_removes_unused_own_images_too(top: Path, layout: Layout) -> None:
    publish(top, ALICE)
    staged = stage(layout, ALICE)
    assert {path.name for path in pins.unused(layout)} == {
        path.name for path in (staged.kernel, staged.initrd, staged.root)
    }
    pins.pin(layout, image(), "42.0.0123abcd")
    assert pins.unused(layout) == []
    assert time.time() - staged.root.stat().st_mtime < 600
