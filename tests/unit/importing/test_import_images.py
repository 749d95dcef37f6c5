# SPDX-License-Identifier: Apache-2.0
"""Imports as a whole, but for the process that reads the source: manifests, catalogues, and kills."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from site_catalog import publish, whole

from vhpc_slurm.bootfiles import newc
from vhpc_slurm.catalog import FolderCatalog, edit
from vhpc_slurm.catalog import publish as publishing
from vhpc_slurm.catalog.changes import STAGING
from vhpc_slurm.catalog.manifest import Manifest
from vhpc_slurm.cli import options
from vhpc_slurm.cli.images.imports import import_ as import_verb
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import imports
from vhpc_slurm.importing.imports import Imported, import_image
from vhpc_slurm.importing.offer import Offer
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

DIGEST = f"sha256:{'12' * 32}"
GOOD = {
    "digest": DIGEST,
    "special": 2,
    "process": {
        "entrypoint": ["/bin/sh", "-c"],
        "environment": {"A": "b"},
        "arguments": [],
        "user": "",
        "working_dir": "",
    },
}


class Site:
    """A site with an image whose kernel imports get, and a source."""

    def __init__(self, top: Path) -> None:
        self.catalog, self.own, self.source = top / "site", top / "own/catalog", top / "c.tar"
        self.kernel = publish(self.catalog, "base", b"root of the base")
        self.source.write_bytes(b"a tar")
        self.images = Images(catalog=str(self.catalog), import_kernel="base")
        self.result: dict[str, Any] = GOOD
        self.root: Callable[[Path], object] = lambda path: path.write_bytes(b"new root")

    def worker(self, source: Source, out: Path, *_: object) -> dict[str, Any]:
        self.root(out / "root.erofs")
        return self.result

    def run(self, name: str = "mine", **changes: Any) -> Imported:
        images = changes.pop("images", self.images)
        source = Source.parse(str(changes.pop("source", self.source)))
        ref = ImageRef.parse(name)
        return import_image(images, source, ref, self.own, changes.pop("kernel", ""), lambda _: None)

    def manifest(self) -> Manifest:
        image = FolderCatalog(self.own).resolve(ImageRef.parse("mine"))
        return FolderCatalog(self.own).read_manifest(image.digest)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setattr(imports, "run_worker", found.worker)
    return found


def test_an_import_has_the_sites_kernel_and_the_sources_root(site: Site) -> None:
    done = site.run("mine:v1")
    image = FolderCatalog(site.own).resolve(ImageRef.parse("mine:v1"))
    assert (done.image, done.digest, done.source_digest) == ("mine:v1", image.digest, DIGEST)
    assert (done.changed, done.special, done.size) == (True, 2, 8)
    assert image.manifest.kernel.sha256 == hashlib.sha256(b"kernel").hexdigest()
    assert image.manifest.root.sha256 == hashlib.sha256(b"new root").hexdigest()
    assert whole(site.own) == ["mine:v1"]
    manifest = FolderCatalog(site.own).read_manifest(image.digest)
    assert manifest.process.entrypoint == ("/bin/sh", "-c")
    assert manifest.process.environment == {"A": "b"}
    assert manifest.labels == {"vhpc/kernel-image": f"base:latest@{site.kernel}"}
    assert (manifest.provenance.source, manifest.provenance.source_digest) == ("tar:c.tar", DIGEST)
    modes = {oct(path.stat().st_mode)[-3:] for path in site.own.rglob("*") if path.name != ".lock"}
    assert modes <= {"755", "644"}


def test_an_image_of_a_registry_is_fetched_and_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def fetch(reference: str, folder: Path, *limits: object) -> None:
        seen.append(reference)
        (folder / "manifest.json").write_text("{}")

    def worker(source: Source, out: Path, *_: object) -> dict[str, Any]:
        seen.extend((str(source), source.kind, (source.path / "manifest.json").exists()))
        return site.worker(source, out)

    def look(source: Source, _timeout_s: float) -> Offer:
        return Offer(replace(source, digest=f"sha256:{'7' * 64}"), None)

    monkeypatch.setattr(imports, "fetch", fetch)
    monkeypatch.setattr(imports, "look", look)
    monkeypatch.setattr(imports, "run_worker", worker)
    site.run(source="docker://host/a:1")
    assert seen == [f"host/a@sha256:{'7' * 64}", "docker://host/a:1", "fetched", True]
    manifest = site.manifest()
    assert manifest.provenance.source == "docker://host/a:1"


def test_a_new_catalogue_is_readable_for_vhpcd(site: Site) -> None:
    before = os.umask(0o077)
    try:
        site.own = site.own / "deep/catalog"
        site.run()
    finally:
        os.umask(before)
    for path in (*site.own.rglob("*"), site.own, site.own.parent):
        if path.name != ".lock":
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.promise("import.container")
def test_equal_sources_give_one_digest(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = site.run()
    monkeypatch.setattr("time.gmtime", lambda: (2030, 1, 1, 0, 0, 0, 0, 1, 0))
    again = site.run()
    assert (again.digest, again.changed) == (first.digest, False)
    site.root = lambda path: path.write_bytes(b"other root")
    assert site.run().changed
    assert len(list((site.own / "blobs/sha256").iterdir())) == 4
    edit.collect(site.own, 0)
    assert len(list((site.own / "blobs/sha256").iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": f"mine@{DIGEST}"}, "cannot be a new name"),
        ({"images": Images(catalog="/nonexistent")}, "the site has not chosen a kernel"),
        ({"kernel": "none"}, "image none:latest is unknown"),
        ({"kernel": "own/base"}, "kernels are those of the site's images"),
        ({"source": "/nonexistent/c.tar"}, "/nonexistent/c.tar does not exist"),
    ],
)
def test_an_impossible_import_is_refused_first(site: Site, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        site.run(**changes)
    assert not site.own.exists()


def test_a_kernel_whose_manifest_is_unusable_is_refused(site: Site) -> None:
    raw = json.dumps({"schema": 1, "kernel": {}}).encode()
    with pytest.raises(UserError, match="unusable manifest"):
        _with_manifest(site, raw)


def _with_manifest(site: Site, raw: bytes) -> None:
    digest = hashlib.sha256(raw).hexdigest()
    (site.catalog / f"manifests/sha256/{digest}.json").write_bytes(raw)
    (site.catalog / "names/base/latest").write_text(f"sha256:{digest}\n")
    site.run()


@pytest.mark.promise("attack.import-process")
@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"process": []}, ""),
        ({"process": ["x"]}, "its configuration"),
        ({"process": {"entrypoint": "sh"}}, "its configuration"),
        ({"process": {"entrypoint": [1]}}, "its configuration"),
        ({"process": {"unknown": 1}}, "its configuration"),
        ({"process": {"user": "x" * 200}}, "its configuration"),
        ({"process": {"working_dir": "relative"}}, "its configuration"),
        ({"process": {"environment": {"": "x"}}}, "its configuration"),
        ({"process": {"environment": {"A=B": "x"}}}, "its configuration"),
        ({"process": {"environment": {"A": "\0"}}}, "has a NUL character"),
        ({"process": {"user": "a\nb"}}, "has control characters"),
        ({"digest": 7}, "cannot publish the image"),
        ({"digest": "sha256:x"}, "cannot publish the image"),
    ],
)
def test_a_result_that_makes_no_manifest_is_refused(site: Site, result: dict[str, Any], says: str) -> None:
    site.result = result
    if not says:
        site.run()
        return
    with pytest.raises(UserError, match=says):
        site.run()
    assert whole(site.own) == []


@pytest.mark.promise("attack.import-process")
@pytest.mark.parametrize(
    ("root", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.symlink_to("/etc/passwd"), "cannot read"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
)
def test_a_root_that_is_not_a_file_is_not_published(
    site: Site, root: Callable[[Path], object], says: str
) -> None:
    site.root = root
    with pytest.raises(UserError, match=says):
        site.run()
    assert not list(site.own.glob(f"{STAGING}*"))
    assert not list((site.own / "blobs/sha256").iterdir())


def test_a_broken_kernel_is_not_copied(site: Site) -> None:
    path = site.catalog / "blobs/sha256" / hashlib.sha256(b"kernel").hexdigest()
    path.write_bytes(b"other!")
    with pytest.raises(UserError, match="its kernel is sha256:"):
        site.run()
    assert whole(site.own) == []


@pytest.mark.promise("import.killed")
def test_files_of_a_killed_import_are_removed_by_the_next(site: Site) -> None:
    site.run()
    left = site.own / f"{STAGING}left"
    (left / "out").mkdir(parents=True)
    (left / "out/layer-0").write_bytes(b"x")
    site.run("other")
    assert not left.exists()
    left.mkdir()
    (left / "x").write_bytes(b"abc")
    assert [(item.name, item.size) for item in edit.collect(site.own, 0).removed] == [(left.name, 3)]
    assert not left.exists()


def test_a_running_import_is_not_disturbed(site: Site) -> None:
    def other(path: Path) -> None:
        site.root = lambda inner: inner.write_bytes(b"inner")
        site.run("inner")
        path.write_bytes(b"outer")

    site.root = other
    site.run("outer")
    assert sorted(whole(site.own)) == ["inner:latest", "outer:latest"]


def test_a_source_with_its_own_kernel_gives_all_parts(site: Site) -> None:
    def write(root: Path) -> None:
        for path, data in (
            (root, b"new root"),
            (root.with_name("kernel"), b"own"),
            (root.with_name("initrd"), b"rd"),
        ):
            path.write_bytes(data)

    site.root = write
    site.result = GOOD | {
        "own": {"init": "/usr/lib/systemd/systemd", "drivers": {"nvidia": "570.1"}, "verity": True}
    }
    site.run()
    image = FolderCatalog(site.own).resolve(ImageRef.parse("mine"))
    assert image.manifest.kernel.sha256 == hashlib.sha256(b"own").hexdigest()
    assert image.manifest.initrd.sha256 == hashlib.sha256(b"rd").hexdigest()
    assert image.manifest.init == "/usr/lib/systemd/systemd"
    assert image.manifest.driver_versions == (("nvidia", "570.1"),)
    assert image.manifest.min_memory_mib >= 512
    manifest = FolderCatalog(site.own).read_manifest(image.digest)
    assert manifest.kernel.media_type == "application/vnd.vhpc.kernel.bzimage"
    assert whole(site.own) == ["mine:latest"]


def coreutils_list(data: bytes) -> bytes:
    """The chunk list as docs/image-format.md has it made, by split and sha256sum."""
    command = ["split", "--bytes=4194304", "--filter=sha256sum", "-"]
    lines = subprocess.run(command, input=data, check=True, capture_output=True, text=False).stdout
    return bytes.fromhex("".join(line.split()[0] for line in lines.decode().splitlines()))


def test_a_large_root_has_its_own_chunk_list_and_gc_keeps_it(site: Site) -> None:
    data = b"chunk" * 2_000_000
    site.root = lambda path: path.write_bytes(data)
    image = FolderCatalog(site.own).resolve(ImageRef.parse(site.run().image))
    root, expected = image.manifest.root, coreutils_list(data)
    assert (root.chunks, root.chunk_size) == (hashlib.sha256(expected).hexdigest(), 4194304)
    listed = site.own / "blobs/sha256" / root.chunks
    edit.collect(site.own, 0)
    assert listed.read_bytes() == expected
    assert len(expected) == 3 * 32
    site.root = lambda path: path.write_bytes(b"small")
    assert site.run().changed
    image = FolderCatalog(site.own).resolve(ImageRef.parse("mine"))
    assert image.manifest.root.chunks == "", "one chunk needs no list"
    edit.collect(site.own, 0)
    assert not listed.exists()


def test_an_import_keeps_the_drivers_that_the_sites_initrd_loads(site: Site) -> None:
    """nvidia is loaded by the initrd, virtio_blk is built in or a module of the base's root."""
    archive = newc.Archive()
    archive.file("modules/load", b"virtio_console.ko\n-nvidia.ko\nnvidia-uvm.ko\n")
    data = archive.to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    (site.catalog / "blobs/sha256" / sha256).write_bytes(data)
    name = site.catalog / "names/base/latest"
    raw = json.loads((site.catalog / f"manifests/sha256/{site.kernel[7:]}.json").read_text())
    raw["initrd"] |= {"sha256": sha256, "size": len(data)}
    raw["drivers"] = {"nvidia": "570.86.15", "nvidia_uvm": "570.86.15", "virtio_blk": ""}
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    digest = hashlib.sha256(text).hexdigest()
    (site.catalog / f"manifests/sha256/{digest}.json").write_bytes(text)
    name.write_text(f"sha256:{digest}\n")
    site.run()
    image = FolderCatalog(site.own).resolve(ImageRef.parse("mine"))
    assert image.manifest.driver_versions == (("nvidia", "570.86.15"), ("nvidia_uvm", "570.86.15"))


def test_labels_of_the_container_and_of_the_user_are_kept(site: Site) -> None:
    given = {"org.opencontainers.image.version": "1.2", "a": "container"}
    site.result = GOOD | {"labels": given, "own_commands": ["/usr/bin/srun", "/bin/squeue"]}
    ref, source = ImageRef.parse("mine"), Source.parse(str(site.source))
    import_image(site.images, source, ref, site.own, "", lambda _: None, {"a": "user", "team/owner": "x"})
    manifest = site.manifest()
    assert manifest.labels == {
        "org.opencontainers.image.version": "1.2",
        "a": "user",
        "team/owner": "x",
        "vhpc/covered-commands": "/usr/bin/srun, /bin/squeue",
        "vhpc/kernel-image": f"base:latest@{site.kernel}",
    }


@pytest.mark.parametrize("text", ["x", "=y", "A=b", "vhpc/kernel-image=x", "a=two\nlines"])
def test_an_invalid_label_is_refused_before_reading(
    site: Site, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "config", lambda: Config(images=site.images))
    with pytest.raises(UserError, match="is not a label: KEY=VALUE is expected"):
        import_verb("absent.tar", "mine", label=[text], catalog=site.own)


def test_a_variant_of_a_tar_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "config", lambda: Config(images=site.images))
    with pytest.raises(UserError, match="has no variants: --variant is for docker://NAME"):
        import_verb("absent.tar", "mine", variant="v3", catalog=site.own)


@pytest.mark.promise("import.container")
def test_the_same_source_has_the_same_digest_on_any_day(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def created() -> str:
        manifest = site.manifest()
        return manifest.provenance.created

    first = site.run().digest
    assert created() == ""
    edit.remove(site.own, ImageRef.parse("mine"))
    monkeypatch.setattr("time.time", lambda: 4_000_000_000.0)
    assert site.run().digest == first
    site.result = {**GOOD, "created": "2026-11-23T03:24:56Z"}
    edit.remove(site.own, ImageRef.parse("mine"))
    assert site.run().digest != first
    assert created() == "2026-11-23T03:24:56Z"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    edit.remove(site.own, ImageRef.parse("mine"))
    site.run()
    assert created() == "2023-11-14T22:13:20Z"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UserError, match="SOURCE_DATE_EPOCH is 'yesterday', seconds since 1970 are expected"):
        site.run("other")


@pytest.mark.promise("image.gc")
def test_a_kernel_that_gc_removes_during_an_import_is_missed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue had the kernel when the import looked, and no image with a name needed it."""
    site.run("old")
    edit.remove(site.own, ImageRef.parse("old"))
    really, collected = publishing.publish, list[edit.Collection]()

    def late(*arguments: Any) -> publishing.Published:
        collected.append(edit.collect(site.own, 0.0))
        return really(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(imports, "publish", late)
        with pytest.raises(
            UserError, match=r"own/mine.*: its kernel was removed from the catalogue meanwhile"
        ):
            site.run("own/mine")
    assert hashlib.sha256(b"kernel").hexdigest() in {item.name for item in collected[0].removed}
    assert whole(site.own) == []
    site.run("own/mine")
    assert whole(site.own) == ["mine:latest"]
