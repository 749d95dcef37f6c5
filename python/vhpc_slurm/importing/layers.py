# SPDX-License-Identifier: Apache-2.0
"""Layers: compressed tars, unpacked to a file, checked, and applied to a tree."""
# Decision: Containers are merged in memory, not extracted

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vhpc_slurm.beside import Beside
from vhpc_slurm.importing.hashing import CHUNK
from vhpc_slurm.importing.headers import Header
from vhpc_slurm.importing.tree import WHITEOUT, Content, Node, RefusedError, Tree, folder

GZIP_CHUNK = 1 << 16
"""Bytes of input: zlib copies the rest of them after each member, and there may be thousands of members."""
ZSTD_MAGIC = (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16)))
"""Of a frame, and of frames to skip (RFC 8878). The program zstd also reads gzip, xz and lz4."""
XATTR = "SCHILY.xattr."
"""Prefix of extended attributes in pax headers, as GNU tar, Go and libarchive write them."""
XATTRS_MAX = 65536
KEPT_XATTRS = ("user.", "security.capability")
MODE = 0o7777


class Budget:
    """Bytes that may still be unpacked."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, size: int) -> None:
        """RefusedError if it is more than what is left."""
        self._left -= size
        if self._left < 0:
            raise RefusedError(f"it has more than {self._limit >> 20} MiB when unpacked")


def unpack(source: IO[bytes], compression: str, target: Path, budget: Budget) -> str:
    """Decompress a tar into a file; returns the sha256 of the result, ``sha256:HEX``.

    Args:
        source: the bytes, from their beginning to the end of the file.
        compression: empty, ``gzip`` or ``zstd``.
        target: file to write.
        budget: of all layers.

    Raises:
        RefusedError: the data is damaged or too large.
    """
    digest = hashlib.sha256()
    with target.open("xb") as out, Beside(digest.update) as beside:
        for chunk in _decompressed(source, compression):
            budget.take(len(chunk))
            beside.put(chunk)
            out.write(chunk)
    return f"sha256:{digest.hexdigest()}"


def _decompressed(source: IO[bytes], compression: str) -> Iterator[bytes]:
    if compression == "gzip":
        yield from _gunzip(source)
    elif compression == "zstd":
        yield from _unzstd(source)
    else:
        while chunk := source.read(CHUNK):
            yield chunk


def _gunzip(source: IO[bytes]) -> Iterator[bytes]:
    """Members of a gzip file, in pieces of bounded size."""
    engine, data = zlib.decompressobj(zlib.MAX_WBITS | 16), b""
    try:
        while data := data or source.read(GZIP_CHUNK):
            if engine.eof:
                engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
            if chunk := engine.decompress(data, CHUNK):
                yield chunk
            data = engine.unused_data if engine.eof else engine.unconsumed_tail
    except zlib.error as err:
        why = str(err).rpartition(": ")[2]
        raise RefusedError(f"a layer is not a sound gzip file: {why}") from err
    if not engine.eof:
        raise RefusedError("a layer is a gzip file without its end")


def _unzstd(source: IO[bytes]) -> Iterator[bytes]:
    begin = source.read(4)
    if begin not in ZSTD_MAGIC:
        raise RefusedError("a layer is not a sound zstd file: it does not begin as one")
    # --memory: a frame may ask for gigabytes
    argv = ["zstd", "--decompress", "--stdout", "--quiet", "--memory=128MB"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as run:
            assert run.stdin is not None
            assert run.stdout is not None
            threading.Thread(target=_feed, args=(begin, source, run.stdin), daemon=True).start()
            while chunk := run.stdout.read(CHUNK):
                yield chunk
        if run.returncode != 0:
            said.seek(0)
            text = said.read(300).decode("utf-8", "replace").strip()
            raise RefusedError(f"a layer is not a sound zstd file: {text or 'zstd failed'}")


def _feed(begin: bytes, source: IO[bytes], target: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), target:
        target.write(begin)
        while chunk := source.read(CHUNK):
            target.write(chunk)


def apply(tree: Tree, layer: int, tar: Path) -> int:
    """Apply a layer's tar to a tree; returns the number of devices and pipes that were left out.

    Raises:
        RefusedError: the tar is damaged, or has entries that an image cannot have.
    """
    special = 0
    try:
        with tarfile.open(tar, "r:", tarinfo=Header, encoding="utf-8", errors="surrogateescape") as archive:
            size = tar.stat().st_size
            while (entry := archive.next()) is not None:
                vars(archive)["members"] = []  # otherwise it remembers all
                if archive.offset > size:
                    raise RefusedError(f"layer {layer + 1} is cut off: it ends inside of {entry.name[:80]!r}")
                special += not _apply_entry(tree, layer, entry, size)
            _check_end(tar, archive.offset, layer)
    except tarfile.TarError as err:
        raise RefusedError(f"layer {layer + 1} is not a sound tar: {err}") from err
    except (ValueError, OverflowError, UnicodeError) as err:
        raise RefusedError(f"layer {layer + 1} has a header that cannot be read: {err}") from err
    except RecursionError as err:
        raise RefusedError(f"layer {layer + 1} has headers of headers of headers") from err
    return special


def _check_end(tar: Path, offset: int, layer: int) -> None:
    """A damaged header is an end for tarfile; a sound tar ends with zeros, or with the file."""
    with tar.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if block.strip(b"\0") or len(block) % tarfile.BLOCKSIZE:
        raise RefusedError(f"layer {layer + 1} is damaged: no sound header at byte {offset} of its tar")


def _apply_entry(tree: Tree, layer: int, entry: tarfile.TarInfo, tar_size: int) -> bool:
    """Apply one entry; False if it is a device or a pipe, which images do not have."""
    name = entry.name
    if name.rstrip("/").rpartition("/")[2].startswith(WHITEOUT):
        tree.whiteout(name, layer)
    elif entry.islnk():
        tree.link(name, entry.linkname, layer)
    elif entry.isdir():
        tree.put(name, _with_attributes(folder(layer), entry))
    elif entry.issym():
        tree.put(name, _with_attributes(Node(layer, 0, target=_link_target(entry)), entry))
    elif entry.isreg():
        tree.put(name, _with_attributes(Node(layer, 0, content=_content(layer, entry, tar_size)), entry))
    else:
        return False
    return True


def _link_target(entry: tarfile.TarInfo) -> str:
    target = entry.linkname
    if not target or "\0" in target or len(target.encode("utf-8", "surrogateescape")) >= 4096:
        raise RefusedError(f"the link {entry.name!r} has no usable target")
    return target


def _content(layer: int, entry: tarfile.TarInfo, tar_size: int) -> Content:
    sparse: list[tuple[int, int]] | None = getattr(entry, "sparse", None)
    if entry.size < 0:
        raise RefusedError(f"{entry.name!r} has a negative size")
    if sparse is None:
        pieces = ((0, entry.offset_data, entry.size),) if entry.size else ()
        return Content(layer, entry.size, pieces)
    found, at, end = [], entry.offset_data, 0
    for offset, length in sparse:
        if length == 0:
            continue  # the end of a map
        if length < 0 or offset < end or offset + length > entry.size or at + length > tar_size:
            raise RefusedError(f"{entry.name!r} has a map of its data that makes no sense")
        found.append((offset, at, length))
        at, end = at + length, offset + length
    return Content(layer, entry.size, tuple(found))


def _with_attributes(node: Node, entry: tarfile.TarInfo) -> Node:
    if not (0 <= entry.uid < 1 << 32 and 0 <= entry.gid < 1 << 32):
        raise RefusedError(f"{entry.name!r} belongs to uid {entry.uid}, gid {entry.gid}")
    node.mode, node.uid, node.gid = entry.mode & MODE, entry.uid, entry.gid
    node.mtime = max(0, min(int(entry.mtime), (1 << 40)))
    node.xattrs = {
        name.removeprefix(XATTR): text
        for name, text in entry.pax_headers.items()
        if name.startswith(XATTR) and name.removeprefix(XATTR).startswith(KEPT_XATTRS)
    }
    if sum(len(name) + len(text) for name, text in node.xattrs.items()) > XATTRS_MAX:
        raise RefusedError(f"{entry.name!r} has more than {XATTRS_MAX >> 10} KiB of extended attributes")
    return node
