# SPDX-License-Identifier: Apache-2.0
"""A catalogue is read, and never believed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

KERNEL, INITRD, ROOT = b"kernel bytes", b"initrd bytes", b"root bytes"

DATA = Path(__file__).parents[2] / "data/manifests"
BASE: dict[str, Any] = json.loads((DATA / "manifest.json").read_text())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(**changes: Any) -> dict[str, Any]:
    parts = (("kernel", KERNEL), ("initrd", INITRD), ("root", ROOT))
    blobs = {part: BASE[part] | {"sha256": sha256(data), "size": len(data)} for part, data in parts}
    return BASE | blobs | {"min_memory_mib": 192, "drivers": {"virtio_blk": ""}} | changes


def canonical(fields: dict[str, Any]) -> bytes:
    """As jq -cSj encodes it."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def publish(catalog: Path, fields: dict[str, Any] | bytes, name: str = "debian-minimal/latest") -> str:
    """Write an image by the words of docs/image-format.md, with none of our code."""
    raw = fields if isinstance(fields, bytes) else canonical(fields)
    for part in ("blobs/sha256", "manifests/sha256"):
        (catalog / part).mkdir(parents=True, exist_ok=True)
    for data in (KERNEL, INITRD, ROOT):
        (catalog / "blobs/sha256" / sha256(data)).write_bytes(data)
    (catalog / "manifests/sha256" / f"{sha256(raw)}.json").write_bytes(raw)
    path = catalog / "names" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"sha256:{sha256(raw)}\n")
    return f"sha256:{sha256(raw)}"


def refusal(catalog: Path, ref: str = "debian-minimal") -> str:
    with pytest.raises(UserError) as caught:
        FolderCatalog(catalog).resolve(ImageRef.parse(ref))
    return caught.value.line()


def test_a_name_resolves_to_digest_and_manifest(tmp_path: Path) -> None:
    digest = publish(tmp_path, manifest())
    image = FolderCatalog(tmp_path).resolve(ImageRef.parse("debian-minimal"))
    assert image.digest == digest
    assert str(image.ref) == "debian-minimal:latest"
    assert image.manifest.min_memory_mib == 192
    assert image.manifest.drivers == ("virtio_blk",)
    assert (image.manifest.root.file, image.manifest.root.size) == ("root", 10)
    # printf 'root bytes' | sha256sum
    assert image.manifest.root.sha256 == "6b30d6663cf18a4f3d03cab69f6b295ab43a79ec810f6cfbd683313bcfd91799"


def test_a_manifest_of_another_encoder_is_resolved(tmp_path: Path) -> None:
    digest = publish(tmp_path, (DATA / "manifest.json").read_bytes(), "newer/9.5")
    newer = FolderCatalog(tmp_path).resolve(ImageRef.parse("newer:9.5"))
    assert digest == "sha256:e07365e21d5b6b08114ad620a66e32f75f852c4fbb7ea7c9cd5fd1db45ce1216"
    assert (newer.digest, newer.manifest.schema) == (digest, 1)
    assert (newer.manifest.name, newer.manifest.tag) == ("newer", "9.5")
    assert FolderCatalog(tmp_path).read_manifest(newer.digest).labels["site/owner"] == "hpc-support"


def test_a_name_follows_new_images_while_digests_stay(tmp_path: Path) -> None:
    first = publish(tmp_path, manifest())
    second = publish(tmp_path, manifest(description="newer"))
    assert first != second
    assert FolderCatalog(tmp_path).resolve(ImageRef.parse("debian-minimal")).digest == second
    assert (tmp_path / "manifests/sha256" / f"{first[7:]}.json").exists()


def test_an_unknown_image_lists_similar_names(tmp_path: Path) -> None:
    publish(tmp_path, manifest())
    publish(tmp_path, manifest(), "rocky9/latest")
    line = refusal(tmp_path, "debian-minmal")
    assert line == (
        "image debian-minmal:latest is unknown (did you mean debian-minimal:latest? see: vhpc image ls)"
    )


def test_an_unknown_tag_lists_the_known_tags(tmp_path: Path) -> None:
    publish(tmp_path, manifest(), "debian-minimal/12")
    publish(tmp_path, manifest(), "debian-minimal/13")
    assert "did you mean debian-minimal:12 or debian-minimal:13?" in refusal(tmp_path, "debian-minimal:14")


def test_a_digest_pins_the_image_if_its_name_moves(tmp_path: Path) -> None:
    first = publish(tmp_path, manifest(description="first"))
    publish(tmp_path, manifest(description="second"))
    pinned = ImageRef.parse(f"debian-minimal@{first}")
    image = FolderCatalog(tmp_path).resolve(pinned)
    assert (image.digest, image.manifest.description) == (first, "first")
    assert str(image) == f"debian-minimal:latest@{first}"


def test_a_mistyped_digest_is_not_called_a_broken_image(tmp_path: Path) -> None:
    digest = publish(tmp_path, manifest())
    mistyped = f"debian-minimal@sha256:{'0' * 64}"
    assert refusal(tmp_path, mistyped) == (
        f"image debian-minimal:latest@sha256:{'0' * 64} is unknown: the catalogue has no image of this "
        "digest: it is mistyped, or the image was removed (the digest that the name has now: vhpc image show "
        "debian-minimal:latest)"
    )
    (tmp_path / "manifests/sha256" / f"{digest[7:]}.json").unlink()
    assert f"is broken: the catalogue has no manifest {digest}" in refusal(tmp_path, "debian-minimal")


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("nosuch", ""),
        ("hpc", "did you mean debian-hpc:latest? "),
        ("debian-hcp", "did you mean debian-hpc:latest? "),
        ("debian-hpc:12", "did you mean debian-hpc:latest? "),
        ("rocky8", "did you mean rocky9:9.5? "),
    ],
)
def test_names_that_are_far_are_not_suggested(tmp_path: Path, wanted: str, meant: str) -> None:
    publish(tmp_path, manifest(), "debian-hpc/latest")
    publish(tmp_path, manifest(), "rocky9/9.5")
    assert refusal(tmp_path, wanted).endswith(f"is unknown ({meant}see: vhpc image ls)")


@pytest.mark.parametrize(
    "ref", ["..:latest", "a/b", "debian-minimal:../../etc", "", "A", "x" * 65, "a@sha256:../x"]
)
def test_a_reference_never_leaves_the_catalogue(ref: str) -> None:
    with pytest.raises(UserError):
        ImageRef.parse(ref)


def test_an_empty_catalogue_is_reported_as_empty(tmp_path: Path) -> None:
    assert "is empty" in refusal(tmp_path / "absent")
    assert FolderCatalog(tmp_path / "absent").images() == []


def test_a_changed_manifest_is_refused_with_both_digests(tmp_path: Path) -> None:
    digest = publish(tmp_path, manifest())
    path = tmp_path / "manifests/sha256" / f"{digest[7:]}.json"
    path.write_bytes(path.read_bytes() + b" ")
    line = refusal(tmp_path)
    assert digest in line
    assert f"sha256:{sha256(path.read_bytes())}" in line
    assert line.startswith("image debian-minimal:latest is broken")


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    digest = publish(tmp_path, manifest())
    (tmp_path / "manifests/sha256" / f"{digest[7:]}.json").unlink()
    assert f"no manifest {digest}" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "latest", "sha256:12", "sha256:../../etc/passwd", "\x80"])
def test_a_name_without_digest_is_refused(tmp_path: Path, text: str) -> None:
    publish(tmp_path, manifest())
    (tmp_path / "names/debian-minimal/latest").write_bytes(text.encode("latin-1"))
    assert "its name file has no digest" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"schema": 3}, "schema 3, this vhpc knows 1"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"min_memory_mib": "192"}, "min_memory_mib"),
        ({"min_memory_mib": 0}, ">= 1 - at `$.min_memory_mib`"),
        ({"kernel": BASE["kernel"] | {"sha256": "../../x"}}, "at `$.kernel.sha256`"),
        ({"root": BASE["root"] | {"size": 0}}, "at `$.root.size`"),
        ({"root": BASE["root"] | {"media_type": "erofs init=/bin/sh"}}, "at `$.root.media_type`"),
        ({"firmware": "coreboot"}, "firmware"),
        ({"init": "sbin/init"}, "init"),
        ({"cmdline": "quiet\nx"}, "cmdline"),
    ],
)
def test_a_manifest_that_cannot_boot_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    publish(tmp_path, manifest(**changes))
    assert word in refusal(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"schema": 1}', b"\xff"])
def test_an_invalid_manifest_is_refused(tmp_path: Path, raw: bytes) -> None:
    publish(tmp_path, raw)
    assert "unusable manifest" in refusal(tmp_path)


def test_listing_shows_broken_images_among_sound_ones(tmp_path: Path) -> None:
    publish(tmp_path, manifest())
    publish(tmp_path, b"{}", "broken/latest")
    (tmp_path / "names/debian-minimal/.new-x").write_text("being written")
    entries = FolderCatalog(tmp_path).images()
    assert [(str(e.ref), e.identity is not None) for e in entries] == [
        ("broken:latest", False),
        ("debian-minimal:latest", True),
    ]
    assert "missing required field `schema`" in entries[0].problem


def test_a_damaged_blob_is_named_with_expected_and_actual_digest(tmp_path: Path) -> None:
    publish(tmp_path, manifest())
    image = FolderCatalog(tmp_path).resolve(ImageRef.parse("debian-minimal"))
    FolderCatalog(tmp_path).verify_blob(image.manifest.initrd, str(image.ref))
    (tmp_path / "blobs/sha256" / sha256(INITRD)).write_bytes(b"initrd BYTES")
    with pytest.raises(UserError) as caught:
        FolderCatalog(tmp_path).verify_blob(image.manifest.initrd, str(image.ref))
    line = caught.value.line()
    assert "initrd: expected sha256:" + sha256(INITRD) in line
    assert "found sha256:" + sha256(b"initrd BYTES") in line


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("names/debian-minimal/latest", "its name file has no digest"),
        ("manifests/sha256/{hex}.json", "the manifest sha256:{hex} is not a regular file"),
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, part: str, says: str) -> None:
    digest = publish(tmp_path, manifest()).removeprefix("sha256:")
    path = tmp_path / part.format(hex=digest)
    path.unlink()
    os.mkfifo(path)
    assert says.format(hex=digest) in refusal(tmp_path)
    assert [entry.identity for entry in FolderCatalog(tmp_path).images()] == [None]


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    publish(tmp_path, manifest())
    image = FolderCatalog(tmp_path).resolve(ImageRef.parse("debian-minimal"))
    (tmp_path / "blobs/sha256" / sha256(ROOT)).unlink()
    with pytest.raises(UserError, match="root: the catalogue has no blob"):
        FolderCatalog(tmp_path).verify_blob(image.manifest.root, str(image.ref))
