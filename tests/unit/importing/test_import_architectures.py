# SPDX-License-Identifier: Apache-2.0
"""An import is for the architecture of its kernel; of several kernels, the wanted one is taken."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from site_catalog import ARM, BASE, publish

from vhpc_slurm.catalog import FolderCatalog
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import imports
from vhpc_slurm.importing.source import Source
from vhpc_slurm.model import ImageRef

PLAIN = {key: value for key, value in BASE.items() if key not in ("verity", "chunks")}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    """A site whose kernel for imports is there for both architectures."""
    monkeypatch.setattr("site_catalog.BASE", PLAIN)
    top = tmp_path / "site"
    arm = publish(top, "base", b"root", **ARM)
    pc = publish(top, "base", b"root")
    (top / "names/base/latest").write_text(f"{pc}\n{arm} aarch64\n")
    return Images(catalog=str(top), import_kernel="base")


@pytest.mark.parametrize(
    ("machine", "wanted", "arch"),
    [
        ("x86_64", "", "x86_64"),
        ("aarch64", "", "aarch64"),
        ("x86_64", "aarch64", "aarch64"),
        ("aarch64", "x86_64", "x86_64"),
    ],
)
def test_the_kernel_is_of_this_host_or_as_asked(
    images: Images, monkeypatch: pytest.MonkeyPatch, machine: str, wanted: str, arch: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert imports.kernel_of_site(images, "", wanted).manifest.arch == arch


def test_an_architecture_without_a_kernel_is_refused(images: Images) -> None:
    with pytest.raises(UserError, match="is for aarch64 and x86_64, not for ppc64le"):
        imports.kernel_of_site(images, "", "ppc64le")


def test_an_import_keeps_the_image_of_the_other_architecture(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def worker(source: Source, out: Path, *_: Any) -> dict[str, Any]:
        asked.append(source.arch)
        (out / "root.erofs").write_bytes(b"a root for " + source.arch.encode())
        return {}

    monkeypatch.setattr(imports, "run_worker", worker)
    tar, own = tmp_path / "c.tar", tmp_path / "own"
    tar.write_bytes(b"a tar")
    for arch in ("x86_64", "aarch64"):
        imports.import_image(
            images, Source.parse(str(tar)), ImageRef("mine"), own, "", lambda _: None, arch=arch
        )
    assert asked == ["x86_64", "aarch64"]
    for arch in asked:
        assert FolderCatalog(own).resolve(ImageRef("mine"), arch).manifest.arch == arch
