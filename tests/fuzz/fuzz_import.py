# SPDX-License-Identifier: Apache-2.0
"""Fuzz what reads containers and images: tars of layers, the JSON of archives and registries, EROFS,
headers of qcow2, a source's own kernel with its tables and modules, ELF and newc.

The first line of an input names the reader, the rest is its data. A reader may refuse its
data by RefusedError; what it accepts must become a tar in which each path stands once and
inside of the root.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
from rig import InternalError, fuzz

from vhpc_slurm.architecture import X86_64
from vhpc_slurm.bootfiles import armkernel, elf, newc
from vhpc_slurm.bootfiles.errors import BootFileError
from vhpc_slurm.importing import archives, ownkernel, rootfs
from vhpc_slurm.importing.artifact import describe
from vhpc_slurm.importing.diskformat import check_qcow2
from vhpc_slurm.importing.erofs import FileSystem
from vhpc_slurm.importing.layers import Budget, apply, unpack
from vhpc_slurm.importing.offer import Artifact
from vhpc_slurm.importing.process import process_of
from vhpc_slurm.importing.tree import RefusedError, Tree

_folder = tempfile.TemporaryDirectory(prefix="vhpc-fuzz-")
_HERE = Path(_folder.name)
LIMIT = 1 << 20
MAGIC, CHECKSUM = slice(257, 262), slice(148, 156)


def with_checksums(data: bytes) -> bytes:
    """The data with correct checksums in what looks like a header, so that more of it is read."""
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
    for block in blocks:
        if len(block) == 512 and block[MAGIC] == b"ustar":
            block[CHECKSUM] = b" " * 8
            block[CHECKSUM] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


def _layers(raw: bytes) -> None:
    """Two layers, halves of the data."""
    half = len(raw) // 1024 * 512
    tree, paths = Tree(1000), []
    for number, part in enumerate((raw[:half], raw[half:])):
        path = _HERE / f"layer-{number}"
        path.write_bytes(with_checksums(part))
        apply(tree, number, path)
        paths.append(path)
    out = io.BytesIO()
    if sum(node.content.size for _, node in tree.walk() if node.content) > LIMIT:
        return
    rootfs.write_tar(tree, paths, out)
    out.seek(0)
    with tarfile.open(fileobj=out, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        names = [info.name.removeprefix("./") for info in archive]
    if len(names) != len(set(names)):
        raise InternalError("a path stands twice in the tar")
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise InternalError("a path leads out of the root")
    if len([name for name in names if name not in {"", "."}]) != len(list(tree.walk())):
        raise InternalError("the tar has other paths than the tree")


def _compressed(compression: str) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        path = _HERE / "unpacked"
        path.unlink(missing_ok=True)
        unpack(io.BytesIO(raw), compression, path, Budget(LIMIT))
        if path.stat().st_size > LIMIT:
            raise InternalError("more than the limit was unpacked")

    return read


class Lines:
    """Files that are lines: the first one has any name, blobs are found by their digests."""

    def __init__(self, raw: bytes) -> None:
        self._lines = raw.split(b"\n")

    def open(self, path: str) -> IO[bytes]:
        wanted = path.rpartition("/")[2]
        for line in self._lines:
            if hashlib.sha256(line).hexdigest() == wanted:
                return io.BytesIO(line)
        if path not in {"index.json", "manifest.json"}:
            raise RefusedError(f"it has no file {path}")
        return io.BytesIO(self._lines[0])


def _archive(raw: bytes) -> None:
    """An archive, and the bytes of the layers that it names."""
    path = _HERE / "archive"
    path.write_bytes(with_checksums(raw))
    container = archives.read_layout(archives.Archive(path), "")
    for layer in container.layers:
        with archives.checked(container, layer) as file:
            if len(file.read()) > len(raw):
                raise InternalError("a layer has more bytes than the archive")


def _document(read: Callable[[archives.Files, str], archives.Container]) -> Callable[[bytes], None]:
    def check(raw: bytes) -> None:
        container = read(Lines(raw), "")
        process_of(container.config)
        if any(".." in layer.path for layer in container.layers if layer.digest):
            raise InternalError("a layer leads out of the layout")

    return check


def _configuration(raw: bytes) -> None:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        process_of(config)


def _offer(raw: bytes) -> None:
    """The manifest of a registry."""
    path = _HERE / "offer"
    path.write_bytes(raw)
    found = describe(path)
    if found == {"container": True}:
        return
    with contextlib.suppress(msgspec.ValidationError):
        image = msgspec.convert(found, Artifact)
        if any(
            not part.sha256.isalnum() for part in (image.manifest, image.kernel, image.initrd, image.root)
        ):
            raise InternalError("a digest is no name of a file")


def _erofs(raw: bytes) -> None:
    fd = os.memfd_create("root")
    try:
        os.write(fd, raw)
        system = FileSystem(fd)
        for path, inode in system.walk(1000):
            system.xattrs(inode)
            if {b"", b".", b".."} & set(path.split(b"/")):
                raise InternalError("a path leads out of the root")
    finally:
        os.close(fd)


def _qcow2(raw: bytes) -> None:
    """A header, and a disk of 16 GiB; what is accepted must fit into the file and into memory."""
    check_qcow2(io.BytesIO(raw), 16 << 30)
    entries = int.from_bytes(raw[36:40], "big")
    if entries * 8 > len(raw) or int.from_bytes(raw[60:64], "big"):
        raise InternalError("a table outside of the file, or a snapshot, was accepted")


def _kernel(raw: bytes) -> None:
    """A layer with a kernel, its tables and its modules; the initrd of the site is sound."""
    tar, initrd = _HERE / "system", _HERE / "initrd"
    tar.write_bytes(with_checksums(raw))
    tree = Tree(1000)
    apply(tree, 0, tar)
    site = newc.Archive()
    for name in ("init", "vhpc-agent"):
        site.file(name, b"program", 0o755)
    site.file("modules/load", b"virtio_pci.ko\n-virtio_rng.ko\n")
    initrd.write_bytes(site.to_bytes())
    with tempfile.TemporaryDirectory(dir=_HERE) as out:
        found = ownkernel.take(tree, [tar], initrd, Path(out))
        made = newc.files((Path(out) / "initrd").read_bytes())
        outside = [path for path in Path(out).rglob("*") if path.is_symlink()]
    if not {"init", "vhpc-agent", "modules/load"} <= set(made) or outside:
        raise InternalError("the initrd lacks what boots, or a link was written")
    if not isinstance(found["drivers"], dict):
        raise InternalError("drivers are no table")


def _newc(raw: bytes) -> None:
    with contextlib.suppress(BootFileError):
        found = newc.files(raw)
        if sum(map(len, found.values())) > len(raw):
            raise InternalError("files have more bytes than their archive")


def _elf(raw: bytes) -> None:
    for read in (
        lambda data: elf.check_static(data, X86_64),
        elf.has_pvh_entry,
        lambda data: elf.section(data, ".modinfo"),
    ):
        with contextlib.suppress(ValueError):
            read(raw)


def _arm_kernel(raw: bytes) -> None:
    with contextlib.suppress(BootFileError):
        armkernel.image(raw)


READERS: dict[bytes, Callable[[bytes], None]] = {
    b"armkernel": _arm_kernel,
    b"layers": _layers,
    b"gzip": _compressed("gzip"),
    b"archive": _archive,
    b"layout": _document(archives.read_layout),
    b"docker": _document(archives.read_docker),
    b"fetched": _document(lambda files, _: archives.read_fetched(files)),
    b"configuration": _configuration,
    b"offer": _offer,
    b"erofs": _erofs,
    b"qcow2": _qcow2,
    b"kernel": _kernel,
    b"newc": _newc,
    b"elf": _elf,
}


def one_input(data: bytes) -> None:
    """Give the data to its reader."""
    name, _, raw = data.partition(b"\n")
    reader = READERS.get(name)
    if reader is not None:
        with contextlib.suppress(RefusedError):
            reader(raw)


if __name__ == "__main__":
    fuzz(one_input)
