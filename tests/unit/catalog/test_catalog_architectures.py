# SPDX-License-Identifier: Apache-2.0
"""Names with images of several architectures: who gets which, and how they are changed and removed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from site_catalog import ARM, publish

from vhpc_slurm import pointers
from vhpc_slurm.catalog import FolderCatalog, SeveralArchitecturesError, edit
from vhpc_slurm.catalog.publish import prepare
from vhpc_slurm.catalog.publish import publish as publish_image
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller.api.architectures import Architectures
from vhpc_slurm.controller.leases.jobimage import look_up
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import ImageIdentity, ImageRef, JobRequest
from vhpc_slurm.slurm.hosts import parse_node_resources
from vhpc_slurm.slurm.port import NodeResources, SlurmError

HEX = "ab" * 32
# Slurm 24.11: the first line of `scontrol -o show node`, without what follows
NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 Gres=(null) OS=Linux 6.12 Arch=riscv64 RealMemory=2000
NodeName=g1 Arch=aarch64 CoresPerSocket=72 CPUAlloc=0 Gres=gpu:1 OS=Linux 6.12 RealMemory=480000
NodeName=new CoresPerSocket=1 CPUAlloc=0 Gres=(null) RealMemory=2000
"""
JOB = JobRequest(1, 0, 1000, 1000, "alice", "/w", ImageRef("base"))
NODE_KINDS = {"n1": "x86_64", "g1": "aarch64"}


def both(catalog: Path) -> tuple[str, str]:
    """Digests of the images for x86_64 and aarch64 that one name has, as docs/image-format.md writes it."""
    old = publish(catalog, "base", b"old")
    arm = publish(catalog, "arm", b"arm", **ARM)
    (catalog / "names/base/latest").write_text(f"{old}\n{arm} aarch64\n")
    (catalog / "names/arm/latest").write_text(f"{arm} aarch64\n")
    return old, arm


def test_a_node_gets_the_image_of_its_architecture(tmp_path: Path) -> None:
    old, arm = both(tmp_path)
    catalog = FolderCatalog(tmp_path)
    assert catalog.resolve(ImageRef("base"), "x86_64").digest == old
    assert catalog.resolve(ImageRef("base"), "aarch64").digest == arm
    assert catalog.resolve(ImageRef("arm")).digest == arm
    with pytest.raises(SeveralArchitecturesError, match=f"choose one: base:latest@{arm} .aarch64., .*{old}"):
        catalog.resolve(ImageRef("base"))


@pytest.mark.parametrize(
    ("name", "arch", "there"), [("arm", "x86_64", "aarch64"), ("base", "ppc64le", "aarch64 and x86_64")]
)
def test_another_architecture_is_refused_in_one_line(
    tmp_path: Path, name: str, arch: str, there: str
) -> None:
    both(tmp_path)
    with pytest.raises(UserError, match=f"image {name}:latest is for {there}, not for {arch}") as caught:
        FolderCatalog(tmp_path).resolve(ImageRef(name), arch)
    assert "\n" not in caught.value.line()


def test_a_digest_of_another_architecture_is_refused(tmp_path: Path) -> None:
    old, _ = both(tmp_path)
    with pytest.raises(UserError, match="is for x86_64, not for aarch64"):
        FolderCatalog(tmp_path).resolve(ImageRef("base", digest=old), "aarch64")


def test_a_list_shows_each_architecture(tmp_path: Path) -> None:
    old, arm = both(tmp_path)
    found = [(str(one.ref), one.identity.digest) for one in FolderCatalog(tmp_path).images() if one.identity]
    assert found == [("arm:latest", arm), ("base:latest", arm), ("base:latest", old)]
    image = FolderCatalog(tmp_path).resolve(ImageRef("base", digest=arm))
    assert FolderCatalog(tmp_path).labels(image) == ["arm:latest", "base:latest"]


def test_publishing_replaces_the_image_of_that_architecture(tmp_path: Path) -> None:
    _, arm = both(tmp_path)
    prepare(tmp_path)
    whole = FolderCatalog(tmp_path)
    newer = {**_manifest(tmp_path, arm), "description": "newer"}
    done = publish_image(tmp_path, ImageRef("base"), newer, {})
    assert whole.pointers_of(ImageRef("base")).keys() == {"x86_64", "aarch64"}
    assert whole.resolve(ImageRef("base"), "aarch64").digest == done.digest != arm


def test_a_tag_moves_all_architectures_and_gc_keeps_them(tmp_path: Path) -> None:
    old, arm = both(tmp_path)
    images = edit.tag(tmp_path, ImageRef("base"), ImageRef("mine"))
    assert {image.digest for image in images} == {old, arm}
    edit.remove(tmp_path, ImageRef("arm"))
    assert set(edit.remove(tmp_path, ImageRef("base"))) == {old, arm}
    assert edit.collect(tmp_path, 0).removed == ()
    assert (tmp_path / "names/mine/latest").read_text() == f"{old}\n{arm} aarch64\n"
    edit.remove(tmp_path, ImageRef("mine"))
    gone = {one.name for one in edit.collect(tmp_path, 0).removed if one.kind == "manifest"}
    assert {f"sha256:{name}" for name in gone} == {old, arm}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256:",
        f"sha256:{HEX} aarch64 x",
        f"sha256:{HEX}\nsha256:{HEX}",
        f"sha256:{HEX} aarch64\nsha256:{HEX} aarch64",
        f"sha256:{HEX} AARCH64",
        f"sha256:{HEX}\n\nsha256:{HEX} aarch64",
    ],
)
def test_other_texts_are_no_pointers(text: str) -> None:
    assert pointers.parse(text) == {}


def test_the_file_of_one_x86_image_is_as_before() -> None:
    found = {"aarch64": f"sha256:{HEX}", "x86_64": f"sha256:{HEX}"}
    assert pointers.encode({"x86_64": f"sha256:{HEX}"}) == f"sha256:{HEX}\n".encode()
    assert pointers.parse(pointers.encode(found).decode()) == found


def test_a_job_gets_the_image_of_its_nodes(tmp_path: Path) -> None:
    old, arm = both(tmp_path)
    config = Config(images=Images(catalog=str(tmp_path)))
    for nodes, digest in (({"n1": "x86_64"}, old), ({"g1": "aarch64", "g2": "aarch64"}, arm)):
        found = look_up(config, JOB, nodes)
        assert isinstance(found, ImageIdentity)
        assert found.digest == digest
    with pytest.raises(FabricError, match="Slurm does not tell the architecture"):
        look_up(config, JOB)


def test_emulated_architectures_come_after_that_of_the_nodes(tmp_path: Path) -> None:
    old, arm = both(tmp_path)
    images = Images(catalog=str(tmp_path))
    config = Config(images=images, guests=Guests(accelerator="tcg", emulated=("aarch64",)))
    refs = (ImageRef("base"), old), (ImageRef("base", digest=arm), arm), (ImageRef("arm"), arm)
    for ref, digest in refs:
        found = look_up(config, replace(JOB, image=ref), {"n1": "x86_64"})
        assert isinstance(found, ImageIdentity)
        assert found.digest == digest
        usual = look_up(Config(images=images), replace(JOB, image=ref), {"n1": "x86_64"})
        assert isinstance(usual, UserError) == (digest == arm)


def test_a_job_on_several_architectures_is_refused_in_one_line(tmp_path: Path) -> None:
    both(tmp_path)
    found = look_up(Config(images=Images(catalog=str(tmp_path))), JOB, NODE_KINDS)
    assert isinstance(found, UserError)
    assert found.line() == (
        "the job's nodes have several architectures: aarch64 (such as g1) and x86_64 (such as n1) "
        "(an image is for one: ask for nodes of one, with --constraint or --partition)"
    )


class Slurm:
    """A Slurm that tells its nodes, or fails."""

    def __init__(self) -> None:
        self.asked, self.fails = 0, False

    def node_resources(self) -> tuple[NodeResources, ...]:
        self.asked += 1
        if self.fails:
            raise SlurmError("scontrol failed", "slurmctld is down")
        return parse_node_resources(NODES)


def test_slurm_is_asked_only_about_unknown_nodes() -> None:
    slurm: Any = Slurm()
    known = Architectures(slurm)
    assert known.of(["n1", "g1"]) == NODE_KINDS
    assert known.of(["g1"]) == {"g1": "aarch64"}
    assert slurm.asked == 1
    assert known.of(["g1", "new"]) == {"g1": "aarch64"}
    slurm.fails = True
    assert known.of(["n1", "new"]) == {"n1": "x86_64"}


def _manifest(catalog: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FolderCatalog(catalog).manifest_of(digest, ""))
    return found
