# SPDX-License-Identifier: Apache-2.0
"""Takes the files of a source into a tree; runs in the sandbox. Standard library only."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vhpc_slurm.architecture import Architecture, named
from vhpc_slurm.importing import diskformat, diskguest
from vhpc_slurm.importing.archives import (
    Archive,
    Container,
    Folder,
    checked,
    read_docker,
    read_fetched,
    read_layout,
)
from vhpc_slurm.importing.hashing import FileHash
from vhpc_slurm.importing.layers import Budget, apply, unpack
from vhpc_slurm.importing.process import (
    created_of,
    labels_of,
    left_out_labels,
    left_out_variables,
    process_of,
)
from vhpc_slurm.importing.source import DISKS
from vhpc_slurm.importing.tree import Content, Node, RefusedError, Tree

FOLDERS = {"dir", "fetched", "oci"}
"""Kinds of sources that are folders."""
BOOTABLE_LABEL = "containers.bootc"


@dataclass
class Taken:
    """The parts that were taken from a source.

    Attributes:
        tree: names and attributes of its files.
        tars: their contents, by number of layer.
        process: the command of the container.
        labels: of the container.
        created: when the container was made; empty: unknown.
        special: number of devices and pipes that were left out.
        bootable: whether it brings its own kernel.
        source_digest: its digest, perhaps still at work; ``digest`` waits for it.
    """

    tree: Tree
    tars: list[Path] = field(default_factory=list)
    process: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    created: str = ""
    special: int = 0
    bootable: bool = False
    source_digest: str | FileHash = ""

    def digest(self) -> str:
        """``sha256:HEX`` of the source, empty for a folder; after all reads of its contents.

        Raises:
            RefusedError: the source has changed meanwhile.
        """
        return self.source_digest if isinstance(self.source_digest, str) else self.source_digest.digest()


def take(request: dict[str, Any], source: Path, boot: Path, out: Path, step: Callable[[str], None]) -> Taken:
    """Take a source.

    Args:
        request: what is wanted: ``kind``, ``name``, ``variant``, ``arch``, ``compression``, ``cmdline``, and
            limits.
        source: the file or folder.
        boot: folder with the files of an image of the site.
        out: folder to unpack into.
        step: is told what is done.

    Raises:
        RefusedError: it is damaged, hostile or too large.
    """
    kind, budget = request["kind"], Budget(request["max_bytes"])
    taken = Taken(Tree(request["max_files"]))
    if kind == "dir":
        taken.special = take_folder(taken.tree, source, budget)
    elif kind == "tar" or kind in DISKS:
        taken.bootable = kind in DISKS
        tar, taken.source_digest = _one_tar(request, source, boot, out, budget, step)
        taken.tars.append(tar)
        taken.special = apply(taken.tree, 0, tar)
    else:
        container = read_container(kind, source, request["name"], request["variant"], named(request["arch"]))
        taken.tars, taken.special = take_layers(taken.tree, container, out, budget, step)
        taken.source_digest = container.digest
        taken.process = process_of(container.config)
        taken.labels = labels_of(container.config)
        for line in (left_out_variables(container.config), left_out_labels(container.config)):
            if line:
                step(line)
        taken.created = created_of(container.config)
        taken.bootable = is_bootable(container.config)
    return taken


def _one_tar(
    request: dict[str, Any],
    source: Path,
    boot: Path,
    out: Path,
    budget: Budget,
    step: Callable[[str], None],
) -> tuple[Path, str | FileHash]:
    """The files of a tar or a disk as an uncompressed tar, and the digest of the source."""
    if request["kind"] in DISKS:
        disk, limit = out / "disk.raw", request["max_bytes"]
        with source.open("rb") as file:
            digest = diskformat.convert(file, request["kind"], disk, limit, step)
        tar = diskguest.read_files(disk, boot, request["cmdline"], out, limit, step, named(request["arch"]))
        disk.unlink()
        budget.take(tar.stat().st_size)
        return tar, digest
    if not request["compression"]:
        in_place = FileHash(source)
        budget.take(in_place.size)
        return source, in_place
    step("unpacking")
    tar = out / "layer-0"
    with source.open("rb") as file:
        return tar, unpack(file, request["compression"], tar, budget)


def take_layers(
    tree: Tree, container: Container, out: Path, budget: Budget, step: Callable[[str], None]
) -> tuple[list[Path], int]:
    """Unpack a container's layers into ``out`` and apply them to a tree.

    Returns:
        the unpacked tars, and the number of devices and pipes that were left out.

    Raises:
        RefusedError: a layer is damaged, hostile or not the one of its digest.
    """
    tars, special = [], 0
    for number, layer in enumerate(container.layers):
        step(f"layer {number + 1} of {len(container.layers)}")
        tars.append(out / f"layer-{number}")
        with checked(container, layer) as file:
            diff_id = unpack(file, layer.compression, tars[-1], budget)
        if diff_id != layer.diff_id:
            raise RefusedError(f"layer {number + 1}, unpacked, is {diff_id} instead of {layer.diff_id}")
        special += apply(tree, number, tars[-1])
    return tars, special


def take_folder(tree: Tree, top: Path, budget: Budget) -> int:
    """Add a folder's files, as root's; their mode, time and links are kept. Returns what was left out.

    Raises:
        RefusedError: a file or folder cannot be read, or they are too many.
    """
    special = 0
    seen: dict[tuple[int, int], str] = {}
    stack = [""]
    while stack:
        above = stack.pop()
        try:
            entries = sorted(os.scandir(top / above), key=lambda entry: entry.name)
        except OSError as err:
            raise RefusedError(f"cannot read the folder {above[:80] or '.'}: {err.strerror}") from err
        for entry in entries:
            path = f"{above}/{entry.name}" if above else entry.name
            about = entry.stat(follow_symlinks=False)
            mode, mtime = stat.S_IMODE(about.st_mode), max(0, int(about.st_mtime))
            if stat.S_ISDIR(about.st_mode):
                tree.put(path, Node(0, mode, mtime=mtime, children={}))
                stack.append(path)
            elif stat.S_ISLNK(about.st_mode):
                tree.put(path, Node(0, mode, mtime=mtime, target=str(Path(entry.path).readlink())))
            elif stat.S_ISREG(about.st_mode):
                first = seen.setdefault((about.st_dev, about.st_ino), path) if about.st_nlink > 1 else path
                if first != path:
                    tree.link(path, first, 0)
                    continue
                if not os.access(entry.path, os.R_OK):
                    raise RefusedError(f"cannot read {path[:80]!r}: the mode of the file forbids it")
                budget.take(about.st_size)
                pieces = ((0, 0, about.st_size),) if about.st_size else ()
                tree.put(path, Node(0, mode, mtime=mtime, content=Content(entry.path, about.st_size, pieces)))
            else:
                special += 1
    return special


def check_type(kind: str, source: Path) -> None:
    """RefusedError if it is no folder or no file, such as a pipe, on which a reader would wait."""
    mode = source.stat().st_mode
    if kind in FOLDERS and not stat.S_ISDIR(mode):
        raise RefusedError("it is not a folder")
    if kind not in FOLDERS and not stat.S_ISREG(mode):
        raise RefusedError("it is not a regular file")
    if not os.access(source, os.R_OK):
        raise RefusedError("cannot read it: its mode forbids it")


def read_container(kind: str, source: Path, name: str, variant: str, architecture: Architecture) -> Container:
    """An image of an archive or a layout; RefusedError if it is damaged or has no such image."""
    if kind == "fetched":
        return read_fetched(Folder(source), architecture)
    if kind == "oci":
        return read_layout(Folder(source), name, variant, architecture)
    if kind == "docker-archive":
        return read_docker(Archive(source), name, architecture)
    return read_layout(Archive(source), name, variant, architecture)


def is_bootable(config: dict[str, Any]) -> bool:
    """Whether a container says that it is a whole system with a kernel (bootc)."""
    wanted = config.get("config")
    labels = wanted.get("Labels") if isinstance(wanted, dict) else None
    return isinstance(labels, dict) and labels.get(BOOTABLE_LABEL) in ("1", "true")
