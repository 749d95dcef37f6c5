# SPDX-License-Identifier: Apache-2.0
"""Recipes, publishing and the command line of the image builder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from vmimages import labels, recipe
from vmimages.cli import INITRD_TYPE, KERNEL_TYPES, ROOT_TYPES
from vmimages.errors import BuildError
from vmimages.recipe import RESERVED_PARAMETERS, Recipe
from vmimages.store import Blob, canonical, publish

from vhpc_slurm.catalog import FolderCatalog, manifest
from vhpc_slurm.model import ImageRef

CHECKOUT = Path(__file__).parents[2]
BUILD = CHECKOUT / "vmimages/build"
RECIPES = sorted((CHECKOUT / "vmimages/recipes").glob("*.toml"))


def need(tool: str) -> str:
    path = shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


# --- recipes ----------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_and_named_as_their_file(path: Path) -> None:
    assert recipe.load(path).image.name == path.stem


def load_changed(tmp_path: Path, old: str, new: str) -> Recipe:
    text = (CHECKOUT / "vmimages/recipes/debian-minimal.toml").read_text()
    assert old in text
    path = tmp_path / "r.toml"
    path.write_text(text.replace(old, new, 1))
    return recipe.load(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[image]", "[imago]", "unknown key imago"),
        ("min_memory_mib", "min_memory", "unknown key image.min_memory"),
        ("min_memory_mib = 192", 'min_memory_mib = "192"', "image.min_memory_mib must be of type int"),
        ("min_memory_mib = 192", "min_memory_mib = true", "image.min_memory_mib must be of type int"),
        ("min_memory_mib = 192", "", "image.min_memory_mib is missing"),
        ('name = "debian-minimal"', 'name = "Debian"', "image.name"),
        ('"sudo"', '"sudo; rm"', "debian.packages"),
        ('"sudo"', "1", "debian.packages must be a list of strings"),
        ('suite = "trixie"', 'suite = "$(id)"', "debian.suite"),
        ('format = "vmlinux"', 'format = "zImage"', "kernel.format"),
        ("min_memory_mib = 192", "min_memory_mib = 192\nmin_cpus = 0", "image.min_cpus"),
        ('cmdline = "', 'cmdline = "vhpc.init=/bin/sh ', "vhpc.init="),
        ('cmdline = "', 'cmdline = "rdinit=/bin/sh ', "rdinit=/bin/sh"),
        ('cmdline = "cryptomgr', 'cmdline = \'"x" cryptomgr', "cannot read recipe"),
        ('uuid = "', 'uuid = "x', "root.uuid"),
        ("[image]", '[image]\nfirmware = "uefi"', "bzImage"),
        ("[image]", "[image", "cannot read recipe"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_key(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(BuildError) as caught:
        load_changed(tmp_path, old, new)
    assert why in str(caught.value)


def test_the_builder_and_vhpc_reserve_the_same_parameters() -> None:
    assert RESERVED_PARAMETERS == manifest.RESERVED_PARAMETERS


def test_the_key_of_a_base_has_all_that_makes_the_base(tmp_path: Path) -> None:
    original = load_changed(tmp_path, "[image]", "[image]")
    same = (("min_memory_mib = 192", "min_memory_mib = 1024"), ('cmdline = "', 'cmdline = "quiet '))
    other = (
        ('  "sudo",\n', ""),
        ('"overlay"', '"overlay", "fuse"'),
        ("epoch = 1", "epoch = 2"),
        ("trixie", "sid"),
    )
    for old, new in same:
        assert load_changed(tmp_path, old, new).base_key() == original.base_key()
    for old, new in other:
        assert load_changed(tmp_path, old, new).base_key() != original.base_key()


def test_the_license_line_of_a_script_makes_no_other_base(tmp_path: Path) -> None:
    (tmp_path / "with").write_text("#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\nset -eu\n")
    (tmp_path / "without").write_text("#!/bin/sh\nset -eu\n")
    assert recipe.steps(tmp_path / "with") == recipe.steps(tmp_path / "without")


# --- publishing -------------------------------------------------------------


def fields(**changes: object) -> dict[str, object]:
    return {
        "schema": 1,
        "agent_version": "0.1.0",
        "arch": "x86_64",
        "cmdline": "",
        "description": "für Tests",
        "drivers": {},
        "firmware": "bios",
        "init": "agent",
        "labels": {},
        "min_cpus": 1,
        "min_memory_mib": 64,
        "process": {"arguments": [], "entrypoint": [], "environment": {}, "user": "", "working_dir": ""},
        "provenance": {"builder": "", "created": "", "parent": "", "source": "", "source_digest": ""},
    } | changes


def made_at(time: str) -> dict[str, object]:
    return {"builder": "", "created": time, "parent": "", "source": "", "source_digest": ""}


def blobs(**changes: Path | bytes) -> dict[str, Blob]:
    data: dict[str, Path | bytes] = {"kernel": b"k", "initrd": b"i", "root": b"r"}
    types = {"kernel": KERNEL_TYPES["vmlinux"], "initrd": INITRD_TYPE, "root": ROOT_TYPES["erofs"]}
    return {field: Blob(types[field], part) for field, part in (data | changes).items()}


def test_published_images_are_read_by_the_catalogue(tmp_path: Path) -> None:
    root = tmp_path / "root.erofs"
    root.write_bytes(b"root" * 1000)
    catalog = tmp_path / "catalog"
    made = publish(catalog, "tiny", "latest", fields(), blobs(root=root))
    image = FolderCatalog(catalog).resolve(ImageRef.parse("tiny"))
    assert made.changed
    assert image.digest == made.digest
    assert image.manifest.root.sha256 == hashlib.sha256(b"root" * 1000).hexdigest()
    for blob in (image.manifest.kernel, image.manifest.initrd, image.manifest.root):
        FolderCatalog(catalog).verify_blob(blob, "tiny")
    left = sorted(str(p.relative_to(catalog)) for p in catalog.rglob("*") if p.name.startswith("."))
    assert left == [".lock"]
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in catalog.rglob("*"))


def test_a_large_root_is_published_with_its_chunk_list(tmp_path: Path) -> None:
    data = bytes(4 << 20) + b"root" * 1000
    publish(tmp_path, "tiny", "latest", fields(), blobs(root=data))
    root = FolderCatalog(tmp_path).resolve(ImageRef.parse("tiny")).manifest.root
    expected = hashlib.sha256(bytes(4 << 20)).digest() + hashlib.sha256(b"root" * 1000).digest()
    assert (root.chunks, root.chunk_size) == (hashlib.sha256(expected).hexdigest(), 4 << 20)
    assert (tmp_path / "blobs/sha256" / root.chunks).read_bytes() == expected


def test_publishing_the_same_again_keeps_the_digest(tmp_path: Path) -> None:
    first = publish(tmp_path, "tiny", "1", fields(), blobs())
    later = fields(provenance=made_at("2026-02-02T00:00:00Z"))
    again = publish(tmp_path, "tiny", "1", later, blobs())
    assert (again.digest, again.changed) == (first.digest, False)
    other = publish(tmp_path, "tiny", "1", fields(), blobs(initrd=b"j"))
    assert other.changed
    assert other.digest != first.digest


def test_publishing_keeps_the_image_of_another_architecture(tmp_path: Path) -> None:
    pc = publish(tmp_path, "tiny", "1", fields(), blobs()).digest
    kernel = {"kernel": Blob("application/vnd.vhpc.kernel.image", b"k")}
    arm = publish(tmp_path, "tiny", "1", fields(arch="aarch64"), blobs() | kernel).digest
    assert (tmp_path / "names/tiny/1").read_text() == f"{pc}\n{arm} aarch64\n"
    assert not publish(tmp_path, "tiny", "1", fields(arch="aarch64"), blobs() | kernel).changed
    assert FolderCatalog(tmp_path).resolve(ImageRef.parse("tiny:1"), "aarch64").digest == arm


@pytest.mark.promise("image.canonical")
def test_one_content_has_one_digest_under_all_names(tmp_path: Path) -> None:
    first = publish(tmp_path, "tiny", "1", fields(), blobs())
    assert publish(tmp_path, "other", "2", fields(), blobs()).digest == first.digest


def test_publishing_repairs_a_damaged_blob(tmp_path: Path) -> None:
    publish(tmp_path, "tiny", "1", fields(), blobs())
    path = tmp_path / "blobs/sha256" / hashlib.sha256(b"r").hexdigest()
    path.write_bytes(b"damaged")
    publish(tmp_path, "tiny", "1", fields(), blobs())
    assert path.read_bytes() == b"r"


def test_a_failed_publish_leaves_the_name_as_it_was(tmp_path: Path) -> None:
    first = publish(tmp_path, "tiny", "latest", fields(), blobs())
    with pytest.raises(BuildError, match="cannot publish"):
        publish(tmp_path, "tiny", "latest", fields(), blobs(initrd=b"new", root=tmp_path / "absent"))
    assert FolderCatalog(tmp_path).resolve(ImageRef.parse("tiny")).digest == first.digest
    assert not list(tmp_path.rglob(".new-*"))


# --- command line -----------------------------------------------------------


def build(*arguments: object, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": path} if path else {})
    return subprocess.run(
        [sys.executable, BUILD, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def test_help_names_every_option() -> None:
    done = build("--help")
    assert done.returncode == 0
    for option in (
        "--output",
        "--agent",
        "--init",
        "--tag",
        "--cache",
        "--mirror",
        "--refresh",
        "--label",
        "--json",
    ):
        assert option in done.stdout


def test_missing_tools_are_named_with_their_packages(tmp_path: Path, standin: Path, init: Path) -> None:
    done = build(
        RECIPES[0], "--output", tmp_path / "c", "--cache", tmp_path / "k", "--agent", standin, "--init", init,
        "--mirror", "http://a.example", "--security-mirror", "http://a.example", path=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("vmimages/build: not installed: mmdebstrap")
    assert "(apt-get install erofs-utils mmdebstrap" in done.stderr
    assert not (tmp_path / "c").exists()
    assert [p.suffix for p in (tmp_path / "k").iterdir()] == [".lock"]


@pytest.mark.long
def test_a_failing_tool_is_quoted_and_leaves_nothing(tmp_path: Path, standin: Path, init: Path) -> None:
    need("mmdebstrap")
    need("mkfs.erofs")
    nowhere = "http://127.0.0.1:9/debian"
    done = build(
        RECIPES[0], "--output", tmp_path / "c", "--cache", tmp_path / "k", "--agent", standin, "--init", init,
        "--mirror", nowhere, "--security-mirror", nowhere,
    )  # fmt: skip
    assert done.returncode == 1
    assert "mmdebstrap failed with exit status" in done.stderr
    assert nowhere in done.stderr
    assert not (tmp_path / "c").exists()
    assert [p.suffix for p in (tmp_path / "k").iterdir()] == [".lock"]


def labels_of(catalog: Path, digest: str) -> dict[str, str]:
    raw = (catalog / "manifests/sha256" / f"{digest.removeprefix('sha256:')}.json").read_bytes()
    whole = manifest.decode_whole(raw)
    assert isinstance(whole, manifest.Manifest)
    return whole.labels


@pytest.mark.parametrize(
    "label",
    [
        "x", "=y", "", "A=b", "a b=c", "vhpc/recipe=x", "a=two\nlines", "a=\x1b[1m", "-a=b", "ä=b",
        "a" * 129 + "=", "a=" + "b" * 1025,
    ],
)  # fmt: skip
def test_an_invalid_label_is_named_in_one_line(label: str) -> None:
    with pytest.raises(BuildError, match="is not a label") as caught:
        labels.parse([label])
    assert len(str(caught.value).splitlines()) == 1


def test_an_invalid_label_is_refused_before_the_build(tmp_path: Path) -> None:
    done = build(RECIPES[0], "--output", tmp_path / "c", "--label=a=two\nlines")
    assert done.returncode == 1
    assert "is not a label: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "c").exists()


def test_a_manifest_can_have_the_labels_that_are_accepted() -> None:
    own = {f"vhpc/{n}": "" for n in range(3)}
    most = labels.parse([f"{'k' * 125}{n:03}={'v' * 1024}" for n in range(61)])
    whole = fields(labels=labels.joined(most, own)) | {
        field: {"media_type": kind, "sha256": "0" * 64, "size": 1}
        for field, kind in (
            ("kernel", KERNEL_TYPES["vmlinux"]),
            ("initrd", INITRD_TYPE),
            ("root", ROOT_TYPES["erofs"]),
        )
    }
    manifest.decode_manifest(canonical(whole))
    with pytest.raises(BuildError, match="62 labels are too many: at most 61"):
        labels.joined(most | {"one": "more"}, own)


def test_a_cached_base_makes_a_build_without_any_tool(tmp_path: Path, standin: Path, init: Path) -> None:
    path = CHECKOUT / "vmimages/recipes/debian-minimal.toml"
    archive, security = "http://a.example/debian", "http://a.example/security"
    named = ("--mirror", archive, "--security-mirror", security)
    loaded = recipe.load(path)
    debian = replace(loaded.debian, mirror=archive, security_mirror=security)
    base = tmp_path / "cache" / replace(loaded, debian=debian).base_key()
    (base / "modules").mkdir(parents=True)
    (base / "modules/load").write_text("")
    tree = {"algorithm": "sha256", "data_size": 4096, "root_hash": "0" * 64}
    about = {"kernel_release": "6.12.0", "driver_versions": {}, "verity": tree}
    (base / "base.json").write_text(json.dumps(about))
    (base / "packages").write_text("")
    (base / "kernel").write_bytes(b"k")
    (base / "root.erofs").write_bytes(bytes(4096))
    command = (
        path, "--output", tmp_path / "c", "--cache", tmp_path / "cache", "--agent", standin, "--init", init,
        "--tag", "13", "--json", *named,
    )  # fmt: skip
    first = json.loads(build(*command, path="/usr/bin").stdout)
    again = json.loads(build(*command, path="/usr/bin").stdout)
    image = FolderCatalog(tmp_path / "c").resolve(ImageRef.parse("debian-minimal:13"))
    assert (first["image"], first["changed"], first["base_cached"]) == ("debian-minimal:13", True, True)
    assert (again["digest"], again["changed"]) == (first["digest"], False)
    assert image.digest == first["digest"]
    own = {"vhpc/kernel-release": "6.12.0", "vhpc/recipe": "debian-minimal", "vhpc/suite": "trixie"}
    assert labels_of(tmp_path / "c", image.digest) == own
    assert image.manifest.schema == 1
    assert image.manifest.agent_version == "0.0.1"
    given = ("--label", "team/owner=für alle", "--label", "a=1", "--label", "a=2")
    labelled = json.loads(build(*command, *given, path="/usr/bin").stdout)
    assert labelled["changed"]
    assert labels_of(tmp_path / "c", labelled["digest"]) == own | {"team/owner": "für alle", "a": "2"}
    other = json.loads(build(*command, *given[4:], *given[:2], path="/usr/bin").stdout)
    assert (other["digest"], other["changed"]) == (labelled["digest"], False), "in any order"
    assert image.manifest.cmdline == f"cryptomgr.notests no_timer_check vhpc.verity=1:{'0' * 64}"
