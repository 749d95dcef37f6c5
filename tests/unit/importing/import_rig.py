# SPDX-License-Identifier: Apache-2.0
"""Runs the reader of imports in this process, without mkfs.erofs, and lists what the root has."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from vhpc_slurm.importing import layers, rootfs
from vhpc_slurm.importing.tree import Tree

MANY = 1 << 30


def applied(tmp_path: Path, *tars: bytes, max_nodes: int = 10000) -> tuple[Tree, list[Path]]:
    """The tree of some layers, and their files."""
    tree, paths = Tree(max_nodes), []
    for number, data in enumerate(tars):
        paths.append(tmp_path / f"layer-{number}")
        layers.unpack(io.BytesIO(data), "", paths[-1], layers.Budget(MANY))
        layers.apply(tree, number, paths[-1])
    return tree, paths


def root_tar(tree: Tree, paths: list[Path]) -> tarfile.TarFile:
    """The tar that mkfs.erofs reads."""
    out = io.BytesIO()
    rootfs.write_tar(tree, paths, out)
    out.seek(0)
    return tarfile.open(fileobj=out, mode="r:", errors="surrogateescape")


def listing(tree: Tree, paths: list[Path]) -> dict[str, str]:
    """Path -> what it is: "dir", "-> TARGET", "= OTHER NAME" or the content."""
    found = {}
    with root_tar(tree, paths) as archive:
        for info in archive:
            if info.isdir():
                text = "dir"
            elif info.issym():
                text = f"-> {info.linkname}"
            elif info.islnk():
                text = f"= {info.linkname}"
            else:
                file = archive.extractfile(info)
                assert file is not None
                text = file.read().decode()
            found[info.name.removeprefix("./") or "."] = text
    found.pop(".", None)
    return found
