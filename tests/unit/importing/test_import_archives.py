# SPDX-License-Identifier: Apache-2.0
"""Containers as files: what real tools write is read (what is refused: ``test_import_hostile``)."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers import INDEX, Layout, digest, entry, tar
from import_rig import listing

from vhpc_slurm.architecture import AARCH64
from vhpc_slurm.importing import taking
from vhpc_slurm.importing.archives import Archive, Folder, read_docker, read_layout
from vhpc_slurm.importing.layers import Budget
from vhpc_slurm.importing.process import process_of
from vhpc_slurm.importing.tree import RefusedError, Tree

ONE, TWO = tar("a/", ("a/one", "1")), tar("a/.wh.one", ("two", "2"))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def files_of(container: Any, out: Path) -> dict[str, str]:
    tree = Tree(1000)
    out.mkdir()
    paths, _ = taking.take_layers(tree, container, out, Budget(1 << 24), lambda _: None)
    return listing(tree, paths)


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
def test_archives_of_skopeo_are_read(layout: Layout, tmp_path: Path, kind: str) -> None:
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
    assert process_of(container.config) == {
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


def test_the_image_of_the_wanted_architecture_is_taken(layout: Layout) -> None:
    """Of an index for linux/amd64 and linux/arm64/v8, as docker's official images have."""
    platform = {"architecture": "arm64", "os": "linux", "variant": "v8"}
    arm = layout.image([ONE], platform=platform, config={"architecture": "arm64"})
    plain = {"architecture": "arm64", "os": "linux"}
    bare = layout.image([ONE, TWO], platform=plain, config={"architecture": "arm64"})
    ours = layout.image([TWO], platform={"architecture": "amd64", "os": "linux"})
    layout.write(layout.json({"schemaVersion": 2, "manifests": [arm, ours]}, INDEX))
    files = Folder(layout.top)
    assert read_layout(files, "", "", AARCH64).digest == arm["digest"]
    assert read_layout(files, "", "v8", AARCH64).digest == arm["digest"]
    assert read_layout(files, "").digest == ours["digest"]
    layout.write(layout.json({"schemaVersion": 2, "manifests": [bare, ours]}, INDEX))
    assert read_layout(Folder(layout.top), "", "v8", AARCH64).digest == bare["digest"]
    layout.write(layout.json({"schemaVersion": 2, "manifests": [ours]}, INDEX))
    assert refusal(lambda: read_layout(Folder(layout.top), "", "", AARCH64)) == (
        "it has no image for linux on arm64"
    )


def test_the_lowest_variant_of_a_processor_is_taken(layout: Layout) -> None:
    """The output of docker buildx for linux/amd64 and linux/amd64/v3, with attestations."""
    amd64 = {"architecture": "amd64", "os": "linux"}
    v3 = layout.image([ONE], platform=amd64 | {"variant": "v3"})
    baseline = layout.image([TWO], platform=amd64)
    about = layout.image([ONE, TWO], platform={"architecture": "unknown", "os": "unknown"})
    proof = layout.image([TWO, ONE]) | {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    inner = layout.json({"schemaVersion": 2, "manifests": [v3, baseline, about, proof]}, INDEX)
    outer = layout.json({"schemaVersion": 2, "manifests": [inner]}, INDEX)
    name = {"annotations": {"org.opencontainers.image.ref.name": "latest"}}
    for entries in ([outer | name], [inner], [v3, baseline, proof]):
        layout.write(*entries)
        files = Folder(layout.top)
        assert read_layout(files, "").digest == baseline["digest"]
        assert read_layout(files, "", "v3").digest == v3["digest"]
        assert refusal(lambda: read_layout(files, "", "v9")) == "it has no variant 'v9', only v1, v3"  # noqa: B023
    layout.write(layout.json({"schemaVersion": 2, "manifests": [v3]}, INDEX) | name)
    assert read_layout(Folder(layout.top), "latest").digest == v3["digest"]


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
