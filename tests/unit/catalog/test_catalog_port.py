# SPDX-License-Identifier: Apache-2.0
"""The port to a catalogue: all implementations answer the same questions in the same way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from site_catalog import publish

from vhpc_slurm.catalog import Catalog, FolderCatalog, Owner, UnknownImageError, catalog_for
from vhpc_slurm.catalog.port import NoManifestError
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Blob, ImageIdentity, ImageRef


class InMemory(Catalog):
    """A catalogue without files, as one behind a network would be."""

    def __init__(self, folder: FolderCatalog) -> None:
        """``folder`` has what this one gets."""
        self._names = {ref.label: folder.pointers_of(ref) for ref in folder.refs()}
        digests = {digest for found in self._names.values() for digest in found.values()}
        self._manifests = {digest: folder.manifest_of(digest, "") for digest in digests}

    def refs(self) -> list[ImageRef]:
        return [ImageRef.parse(name) for name in self._names]

    def pointers_of(self, ref: ImageRef) -> dict[str, str]:
        if ref.label not in self._names:
            raise UnknownImageError(ref, self.refs())
        return self._names[ref.label]

    def manifest_of(self, digest: str, image: str) -> bytes:
        if digest not in self._manifests:
            raise NoManifestError(f"image {image} is broken", digest, self.repair)
        return self._manifests[digest]

    def signatures_of(self, image: ImageIdentity) -> bytes:
        return b"signature" if image.digest in self._manifests else b""

    def blob_path(self, blob: Blob) -> Path:
        raise NotImplementedError


@pytest.fixture(params=["of the site", "own", "in memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    digest = publish(tmp_path, "base", b"root")
    publish(tmp_path, "other", b"root", tag="2")
    (tmp_path / "signatures/sha256").mkdir(parents=True)
    (tmp_path / "signatures/sha256" / digest[7:]).write_bytes(b"signature")
    if request.param == "in memory":
        return InMemory(FolderCatalog(tmp_path))
    owner = Owner("alice", os.geteuid()) if request.param == "own" else None
    return catalog_for(Images(catalog=str(tmp_path), user_catalog=str(tmp_path)), owner)


def test_names_digests_and_signatures(catalog: Catalog) -> None:
    assert [(ref.name, ref.tag) for ref in catalog.refs()] == [("base", "latest"), ("other", "2")]
    image = catalog.resolve(ImageRef("base"))
    assert catalog.resolve(ImageRef("other", "2")).digest == image.digest, "the content is the same"
    assert catalog.resolve(ImageRef("anything", digest=image.digest)).manifest.root == image.manifest.root
    assert catalog.read_manifest(image.digest).root.sha256 == image.manifest.root.sha256
    assert catalog.read_signed(image).signatures == b"signature"
    assert [entry.problem for entry in catalog.images()] == ["", ""]
    by_digest = catalog.resolve(ImageRef("anything", digest=image.digest))
    assert [label.removeprefix("own/") for label in catalog.labels(by_digest)] == ["base:latest", "other:2"]


def test_unknown_names_and_digests_are_the_users_mistake(catalog: Catalog) -> None:
    with pytest.raises(UnknownImageError, match=r"image bas:latest is unknown \(did you mean .*base:latest"):
        catalog.resolve(ImageRef("bas"))
    with pytest.raises(UserError, match="no image of this digest"):
        catalog.resolve(ImageRef("base", digest=f"sha256:{'0' * 64}"))


def test_a_name_that_is_a_folder_leaves_no_descriptor_open(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "names/base/folder").mkdir()

    def opened() -> list[Path]:
        """Descriptors below the folder of this test: other threads of the process have others."""
        links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return [link for link in links if os.path.realpath(link).startswith(f"{tmp_path}/")]

    before = len(opened())
    for _ in range(3):
        with pytest.raises(UserError):
            catalog.resolve(ImageRef("base", "folder"))
    assert len(opened()) == before
