# SPDX-License-Identifier: Apache-2.0
"""A user's own catalogue, read by a process that has other rights than the user."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vhpc_slurm.catalog import Owner, catalog_for, own_catalog, resolve_for
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

RAW = (Path(__file__).parents[2] / "data/manifests/manifest.json").read_bytes()
DIGEST = "sha256:e07365e21d5b6b08114ad620a66e32f75f852c4fbb7ea7c9cd5fd1db45ce1216"
ME = Owner("alice", os.getuid())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The catalogue of alice, who is the user that runs the test."""
    top = tmp_path / "alice/images"
    for part in ("manifests/sha256", "names/cuda"):
        (top / part).mkdir(parents=True)
    (top / f"manifests/sha256/{DIGEST[7:]}.json").write_bytes(RAW)
    (top / "names/cuda/latest").write_text(f"{DIGEST}\n")
    return top


def resolved(folder: Path, text: str = "own/cuda", owner: Owner = ME) -> str:
    images = Images(user_catalog=str(folder.parents[1] / "{user}/images"))
    return str(resolve_for(images, ImageRef.parse(text), owner))


def refusal(folder: Path, text: str = "own/cuda", owner: Owner = ME) -> str:
    with pytest.raises(UserError) as caught:
        resolved(folder, text, owner)
    return caught.value.line()


def test_a_name_and_a_digest_lead_to_the_image(folder: Path) -> None:
    assert resolved(folder) == f"own/cuda:latest@{DIGEST}"
    assert resolved(folder, f"own/anything:1@{DIGEST}") == f"own/anything:1@{DIGEST}"


def test_without_the_sites_permission_there_are_no_own_images() -> None:
    with pytest.raises(UserError, match=r"images\.user_catalog is not set"):
        resolve_for(Images(), ImageRef.parse("own/cuda"), ME)


@pytest.mark.parametrize("user", ["..", ".", "a/b", "../root", "", "a\nb", "-x"])
def test_a_user_name_cannot_lead_elsewhere(user: str) -> None:
    with pytest.raises(UserError, match="cannot have an image catalogue"):
        own_catalog(Images(user_catalog="/home/{user}/images"), user)


def test_missing_parts_are_named(folder: Path) -> None:
    see = "see: vhpc image ls --own; make it: vhpc image import SOURCE"
    assert refusal(folder, "own/cuda:2") == (
        f"image own/cuda:2 is unknown (did you mean own/cuda:latest? {see} own/cuda:2)"
    )
    assert refusal(folder, "own/no") == f"image own/no:latest is unknown ({see} own/no:latest)"
    mistyped = f"own/cuda@sha256:{'0' * 64}"
    assert "has no image of this digest: it is mistyped" in refusal(folder, mistyped)
    folder.rename(folder.with_name("elsewhere"))
    line = refusal(folder)
    assert line.startswith("alice has no image catalogue of their own: ")
    assert line.endswith("(make one there: vhpc image import SOURCE own/NAME; see also: vhpc image ls)")


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("cuda", "own/cuda:latest"),
        ("cuad:2", "own/cuda:latest"),
        ("own/base", "base:latest"),
        ("own/bass", "base:latest"),
    ],
)
def test_the_other_catalogue_is_suggested(folder: Path, wanted: str, meant: str) -> None:
    site = folder.parents[1] / "site"
    for part in ("manifests/sha256", "names/base"):
        (site / part).mkdir(parents=True)
    (site / f"manifests/sha256/{DIGEST[7:]}.json").write_bytes(RAW)
    (site / "names/base/latest").write_text(f"{DIGEST}\n")
    images = Images(catalog=str(site), user_catalog=str(folder.parents[1] / "{user}/images"))
    with pytest.raises(UserError, match=rf"is unknown \(did you mean {meant}\? see: vhpc image ls"):
        resolve_for(images, ImageRef.parse(wanted), ME)


def test_names_for_a_hint_are_not_read_through_links(folder: Path) -> None:
    link(folder / "names/cuda")
    images = Images(catalog=str(folder / "none"), user_catalog=str(folder.parents[1] / "{user}/images"))
    with pytest.raises(UserError) as caught:
        resolve_for(images, ImageRef.parse("cuda"), ME)
    assert "own/cuda" not in caught.value.line()


def link(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.promise("attack.catalogue-read")
@pytest.mark.parametrize(
    "path",
    [
        "", "names", "names/cuda", "names/cuda/latest", "manifests", "manifests/sha256",
        f"manifests/sha256/{DIGEST[7:]}.json",
    ],
)  # fmt: skip
def test_no_link_is_followed(folder: Path, path: str) -> None:
    assert resolved(folder)
    link(folder / path if path else folder)
    assert "a part of it is a link" in refusal(folder)


@pytest.mark.promise("attack.catalogue-read")
@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test gives files to another user")
@pytest.mark.parametrize(
    "path", ["", "names/cuda", "names/cuda/latest", f"manifests/sha256/{DIGEST[7:]}.json"]
)
def test_files_of_others_are_not_read(folder: Path, path: str) -> None:
    """Such as a hard link to a file that vhpcd may read and the user may not."""
    os.chown(folder / path if path else folder, 65534, 65534)
    assert "does not belong to alice" in refusal(folder)


@pytest.mark.promise("attack.catalogue-read")
@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test gives a file to another user")
@pytest.mark.parametrize(
    "path", ["names/cuda/latest", f"manifests/sha256/{DIGEST[7:]}.json", f"signatures/sha256/{DIGEST[7:]}"]
)
def test_a_hard_link_shows_nothing_of_its_owner(folder: Path, path: str) -> None:
    """The reader may read the other user's file, whose bytes are right, and so are those of the digest."""
    images = Images(user_catalog=str(folder.parents[1] / "{user}/images"))
    image = resolve_for(images, ImageRef.parse("own/cuda"), ME)
    (folder / "signatures/sha256").mkdir(parents=True)
    theirs = folder.parents[1] / "theirs"
    found = folder / path
    theirs.write_bytes(found.read_bytes() if found.exists() else b"secret")
    os.chown(theirs, 65534, 65534)
    found.unlink(missing_ok=True)
    found.hardlink_to(theirs)
    before = theirs.stat()
    with pytest.raises(UserError, match=f"{re.escape(path)} does not belong to alice") as caught:
        catalog_for(images, ME).read_signed(resolve_for(images, image.ref, ME))
    assert "secret" not in caught.value.line()
    after = theirs.stat()
    assert (after.st_uid, after.st_mode, after.st_mtime) == (65534, before.st_mode, before.st_mtime)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    path = folder / "names/cuda/latest"
    path.unlink()
    os.mkfifo(path)
    begun = time.monotonic()
    assert "not a regular file" in refusal(folder)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda top: (top / "names/cuda/latest").write_bytes(b"\xff" * 200), "no digest"),
        (lambda top: (top / "names/cuda/latest").write_text("sha256:../../../etc/shadow"), "no digest"),
        (
            lambda top: (top / f"manifests/sha256/{DIGEST[7:]}.json").write_bytes(RAW + b"\n"),
            f"manifest: expected {DIGEST}, found sha256:",
        ),
        (
            lambda top: (top / "names/cuda/latest").write_text("sha256:" + "0" * 64),
            "own/cuda:latest is broken: your catalogue has no manifest sha256:0",
        ),
    ],
)
def test_broken_images_are_refused(folder: Path, change: Callable[[Path], object], says: str) -> None:
    change(folder)
    assert says in refusal(folder)


def test_a_hostile_manifest_is_refused_here_too(folder: Path) -> None:
    raw = RAW[:-1] + b',"x":1}'
    digest = hashlib.sha256(raw).hexdigest()
    (folder / f"manifests/sha256/{digest}.json").write_bytes(raw)
    assert "unknown field" in refusal(folder, f"own/cuda@sha256:{digest}")


@pytest.mark.skipif(os.geteuid() != 0, reason="run as root: the test takes the rights of another user")
def test_a_folder_that_vhpcd_cannot_read_is_named_with_a_hint(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="vhpc-own-") as top:
        Path(top).chmod(0o755)
        private = shutil.copytree(folder, Path(top, "alice/images"))
        private.chmod(0o700)
        os.seteuid(65534)
        try:
            line = refusal(private)
        finally:
            os.seteuid(0)
    assert line.startswith(f"cannot read {private}")
    assert "Permission denied" in line
    assert "chmod a+rX" in line
