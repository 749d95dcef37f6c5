# SPDX-License-Identifier: Apache-2.0
"""Containers as files: what real tools write is read, what lies about itself is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers import CONFIG, INDEX, LAYER, MANIFEST, Layout, as_archive, digest, entry, tar
from import_rig import listing

from vhpc_slurm.importing import worker
from vhpc_slurm.importing.archives import Archive, Folder, read_docker, read_layout
from vhpc_slurm.importing.layers import Budget
from vhpc_slurm.importing.tree import RefusedError, Tree

ONE, TWO = tar("a/", ("a/one", "1")), tar("a/.wh.one", ("two", "2"))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def files_of(container: Any, out: Path) -> dict[str, str]:
    tree = Tree(1000)
    out.mkdir()
    paths, _ = worker.take_layers(tree, container, out, Budget(1 << 24))
    return listing(tree, paths)


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
def test_what_skopeo_writes_is_read(layout: Layout, tmp_path: Path, kind: str) -> None:
    configuration = {
        "Entrypoint": ["/a b"],
        "Cmd": ["x"],
        "Env": ["A=b=c", "E="],
        "User": "7",
        "WorkingDir": "/w",
    }
    layout.write(layout.image([ONE, TWO], "mine", configuration=configuration))
    target = tmp_path / "copy"
    name = "mine:1" if kind == "docker-archive" else "mine"
    command = ["skopeo", "copy", "--quiet", f"oci:{layout.top}:mine", f"{kind}:{target}:{name}"]
    subprocess.run(command, check=True)
    if kind == "docker-archive":
        container = read_docker(Archive(target), "mine:1")
        assert container.digest == read_docker(Archive(target), "").digest
    else:
        container = read_layout(Folder(target) if kind == "oci" else Archive(target), "mine")
    assert files_of(container, tmp_path / "out") == {"a": "dir", "two": "2"}
    assert worker.process_of(container.config) == {
        "entrypoint": ["/a b"],
        "arguments": ["x"],
        "environment": {"A": "b=c", "E": ""},
        "user": "7",
        "working_dir": "/w",
    }


def test_the_image_for_this_platform_is_taken(layout: Layout, tmp_path: Path) -> None:
    other = layout.image(
        [ONE], platform={"architecture": "arm64", "os": "linux"}, config={"architecture": "arm64"}
    )
    proof = layout.image([ONE], platform={"architecture": "unknown", "os": "unknown"})
    ours = layout.image([TWO], platform={"architecture": "amd64", "os": "linux"})
    index = layout.json({"schemaVersion": 2, "manifests": [other, proof, ours]}, INDEX)
    layout.write(index | {"annotations": {"org.opencontainers.image.ref.name": "all"}})
    for name in ("all", ""):
        container = read_layout(Folder(layout.top), name)
        assert container.digest == ours["digest"]
    assert files_of(container, tmp_path / "out") == {"two": "2"}


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(RefusedError) as caught:
        call()
    return str(caught.value)


def test_one_of_several_images_has_to_be_named(layout: Layout) -> None:
    layout.write(layout.image([ONE], "one"), layout.image([TWO], "two"))
    files = Folder(layout.top)
    assert refusal(lambda: read_layout(files, "")).endswith(
        "write one of their names after the path: one, two"
    )
    assert refusal(lambda: read_layout(files, "three")) == "it has no image named 'three' for linux on amd64"
    assert read_layout(files, "two").layers[0].diff_id == digest(TWO)


def change_blob(layout: Layout, described: dict[str, Any], data: bytes) -> None:
    (layout.top / "blobs/sha256" / described["digest"].removeprefix("sha256:")).write_bytes(data)


def lying_layer(**changes: Any) -> Callable[[Layout], dict[str, Any]]:
    def make(layout: Layout) -> dict[str, Any]:
        honest = layout.blob(gzip.compress(ONE, mtime=0), f"{LAYER}+gzip")
        return layout.image([ONE], manifest={"layers": [honest | changes]})

    return make


def changed(which: str) -> Callable[[Layout], dict[str, Any]]:
    """A part has other bytes than its digest."""

    def make(layout: Layout) -> dict[str, Any]:
        found = layout.image([ONE])
        manifest = json.loads((layout.top / "blobs/sha256" / found["digest"][7:]).read_bytes())
        parts = {"manifest": found, "config": manifest["config"], "layer": manifest["layers"][0]}
        change_blob(layout, parts[which], b"{}" if which != "layer" else gzip.compress(TWO, mtime=0))
        return found

    return make


def nested(layout: Layout, depth: int) -> dict[str, Any]:
    found = layout.image([ONE])
    for _ in range(depth):
        found = layout.json({"manifests": [found]}, INDEX)
    return found


EMPTY = hashlib.sha256(b"").hexdigest()
HOSTILE: dict[str, tuple[Callable[[Layout], dict[str, Any]], str]] = {
    "manifest-bytes": (changed("manifest"), "a manifest has other bytes than its digest"),
    "config-bytes": (changed("config"), "a configuration has other bytes than its digest"),
    "layer-bytes": (changed("layer"), "the layer sha256:.* has other bytes"),
    "layer-size": (lying_layer(size=1), "has .* bytes instead of 1"),
    "layer-no-size": (lying_layer(size="1"), "a layer has no size"),
    "layer-missing": (lying_layer(digest="sha256:" + "0" * 64), "it has no file blobs/sha256/0000"),
    "layer-traversal": (lying_layer(digest="sha256:../../../../etc/shadow"), "a layer has no sha256 digest"),
    "layer-sha512": (lying_layer(digest="sha512:" + "0" * 128), "a layer has no sha256 digest"),
    "layer-type": (lying_layer(mediaType="application/x-evil"), "unknown type 'application/x-evil'"),
    "layer-other-format": (lying_layer(mediaType=LAYER), "is not a sound tar|is .* instead of"),
    "diff-id": (
        lambda layout: layout.image([ONE], config={"rootfs": {"diff_ids": [digest(TWO)]}}),
        "layer 1, unpacked, is sha256:.* instead of sha256:",
    ),
    "too-few-diff-ids": (
        lambda layout: layout.image([ONE], config={"rootfs": {"diff_ids": []}}),
        "1 layers, but .* has 0",
    ),
    "no-rootfs": (lambda layout: layout.image([ONE], config={"rootfs": None}), "no valid 'rootfs'"),
    "bad-diff-id": (
        lambda layout: layout.image([ONE], config={"rootfs": {"diff_ids": ["x"]}}),
        "not a sha256",
    ),
    "many-layers": (
        lambda layout: layout.image([ONE], config={"rootfs": {"diff_ids": [f"sha256:{EMPTY}"] * 1025}}),
        "more than 1024 layers",
    ),
    "other-system": (
        lambda layout: layout.image([ONE], config={"os": "windows"}),
        "it is for windows on amd64",
    ),
    "other-machine": (lambda layout: layout.image([ONE], config={"architecture": "arm64"}), "linux on arm64"),
    "no-layers": (lambda layout: layout.image([ONE], manifest={"layers": {}}), "no valid 'layers'"),
    "layer-is-text": (
        lambda layout: layout.image([ONE], manifest={"layers": ["x"]}),
        "a layer has no sha256 digest",
    ),
    "config-no-object": (
        lambda layout: layout.image([ONE], manifest={"config": layout.blob(b"[]", CONFIG)}),
        "not a JSON object",
    ),
    "config-no-json": (
        lambda layout: layout.image([ONE], manifest={"config": layout.blob(b"{", CONFIG)}),
        "is not JSON",
    ),
    "config-nested": (
        lambda layout: layout.image([ONE], manifest={"config": layout.blob(b"[" * 100000, CONFIG)}),
        "is not JSON",
    ),
    "config-large": (
        lambda layout: layout.image([ONE], manifest={"config": layout.blob(b" " * ((4 << 20) + 1), CONFIG)}),
        "a configuration has (more than 4 MiB|other bytes)",
    ),
    "no-digest": (lambda layout: {"mediaType": MANIFEST, "size": 1}, "an entry without a sha256 digest"),
    "unknown-entry": (
        lambda layout: layout.blob(b"{}", "application/json"),
        "it has no image for linux on amd64",
    ),
    "indexes": (lambda layout: nested(layout, 6), "indexes in indexes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_layout_that_lies_is_refused(layout: Layout, tmp_path: Path, case: str) -> None:
    make, says = HOSTILE[case]
    layout.write(make(layout))
    with pytest.raises(RefusedError, match=says):
        files_of(read_layout(Folder(layout.top), ""), tmp_path / "out")
    with pytest.raises(RefusedError, match=says):
        files_of(read_layout(Archive(as_archive(layout.top, tmp_path / "tar")), ""), tmp_path / "out2")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"[]", "index.json is not a JSON object"),
        (b"{}", "an index has no valid 'manifests'"),
        (b'{"manifests": ["x"]}', "an entry without a sha256 digest"),
        (b"\xff", "index.json is not JSON"),
        (b" " * ((4 << 20) + 1), "index.json has more than 4 MiB"),
        (None, "it has no file index.json"),
    ],
    ids=["array", "empty", "no-digest", "no-text", "large", "none"],
)
def test_a_bad_index_is_refused(layout: Layout, index: bytes | None, says: str) -> None:
    if index is not None:
        (layout.top / "index.json").write_bytes(index)
    assert says in refusal(lambda: read_layout(Folder(layout.top), ""))


def test_a_pipe_in_a_layout_is_not_waited_for(layout: Layout) -> None:
    os.mkfifo(layout.top / "index.json")
    assert refusal(lambda: read_layout(Folder(layout.top), "")) == "its index.json is not a regular file"


def docker(tmp_path: Path, manifest: Any, **files: bytes) -> Archive:
    parts = [("manifest.json", json.dumps(manifest).encode()), *files.items()]
    (tmp_path / "docker.tar").write_bytes(tar(*parts, entry("again", tarfile.SYMTYPE, linkname="layer")))
    return Archive(tmp_path / "docker.tar")


def docker_config(*tars: bytes) -> bytes:
    found = {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [digest(data) for data in tars]}}
    return json.dumps(found).encode()


def test_dockers_links_between_equal_layers_are_followed(tmp_path: Path) -> None:
    manifest = [{"Config": "config", "RepoTags": ["a:latest"], "Layers": ["layer", "again"]}]
    files = docker(tmp_path, manifest, config=docker_config(ONE, ONE), layer=ONE)
    assert files_of(read_docker(files, "docker.io/library/a"), tmp_path / "out") == {"a": "dir", "a/one": "1"}


@pytest.mark.parametrize(
    ("manifest", "config", "says"),
    [
        ({}, b"", "manifest.json is not a JSON array"),
        (["x"], b"", "not a list of images"),
        ([], b"", "no such image"),
        ([{}, {}], b"", "several images"),
        ([{"Config": 1}], b"", "no valid 'Config'"),
        ([{"Config": "none", "Layers": []}], b"", "it has no file none"),
        ([{"Config": "../config", "Layers": []}], b"", "it has no file ../config"),
        ([{"Config": "config", "Layers": ["layer"]}], docker_config(TWO), "layer 1, unpacked, is"),
        ([{"Config": "config", "Layers": ["layer"]}], docker_config(), "1 layers, but .* has 0"),
        ([{"Config": "config", "Layers": ["none"]}], docker_config(ONE), "it has no file none"),
        ([{"Config": "config", "Layers": [1]}], docker_config(ONE), "1 layers, but"),
        ([{"Config": "config", "Layers": ["layer"]}], b"{}", "it is for None on None"),
    ],
)
def test_a_docker_archive_that_lies_is_refused(
    tmp_path: Path, manifest: Any, config: bytes, says: str
) -> None:
    with pytest.raises(RefusedError, match=says):
        files_of(read_docker(docker(tmp_path, manifest, config=config, layer=ONE), ""), tmp_path / "out")


@pytest.mark.parametrize("data", [b"", b"x" * 1024, gzip.compress(ONE)], ids=["empty", "text", "gzip"])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert "not a sound, uncompressed tar" in refusal(lambda: Archive(tmp_path / "x"))


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ([], "no valid 'config'"),
        ({"Env": ["NAME"]}, "'NAME', which is not NAME=VALUE"),
        ({"Env": "A=b"}, "no valid 'Env'"),
        ({"Env": 1}, "no valid 'Env'"),
    ],
)
def test_a_bad_configuration_is_refused(configuration: Any, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        worker.process_of({"config": configuration})
