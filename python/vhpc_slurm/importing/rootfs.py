# SPDX-License-Identifier: Apache-2.0
"""The root file system of an image, from a tree: a tar that mkfs.erofs reads from a pipe.

mkfs.erofs takes owners, modes and extended attributes from the tar, so that no privilege and
no user namespace is needed to write files that belong to root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import IO

from vhpc_slurm.importing.hashing import CHUNK
from vhpc_slurm.importing.headers import header
from vhpc_slurm.importing.layers import XATTR
from vhpc_slurm.importing.tree import Content, Node, RefusedError, Tree
from vhpc_slurm.terminal import last_line

FIXED_UUID = "00000000-0000-0000-0000-000000000000"
"""Equal sources give equal bytes."""
PIPE_SIZE = 1 << 20
SPLICED_MIN = 1 << 16
"""Bytes from which on it pays not to copy."""
OLD_TOOL = "mkfs.erofs is older than version 1.7, which reads tars"


def write(tree: Tree, layers: list[Path], target: Path) -> None:
    """Write a tree as an EROFS file system.

    Args:
        tree: the files.
        layers: unpacked tars, by the numbers that the contents of files have.
        target: file to write.

    Raises:
        RefusedError: mkfs.erofs failed, or a file of a folder changed meanwhile.
    """
    argv = [
        "mkfs.erofs",
        "--quiet",
        "--tar=f",
        "-zlz4",
        "-C65536",
        "-T0",
        "--mkfs-time",
        f"-U{FIXED_UUID}",
        str(target),
    ]
    with tempfile.TemporaryFile() as said:
        # mkfs.erofs first tries to work beyond the limit of a file's size. SIGXFSZ, which Python ignores,
        # would end it there; with EFBIG it uses a file in TMPDIR.
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=said, stderr=said, restore_signals=False
        ) as run:
            assert run.stdin is not None
            fcntl.fcntl(run.stdin, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            with contextlib.suppress(BrokenPipeError), run.stdin:
                write_tar(tree, layers, run.stdin)
        if run.returncode != 0:
            said.seek(0)
            raise RefusedError(_failure(run.returncode, said.read(4000).decode("utf-8", "replace")))


def _failure(status: int, text: str) -> str:
    if "unrecognized option" in text:
        return OLD_TOOL
    ended = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"mkfs.erofs ended {ended}: {last_line(text)}"


def write_tar(tree: Tree, layers: list[Path], out: IO[bytes]) -> None:
    """Write a tree as a tar; arguments and errors as ``write``."""
    names: dict[int, str] = {}
    pipe = _is_pipe(out)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(path.open("rb", buffering=0)) for path in layers]
        for path, node in [("", tree.root), *tree.walk()] if tree.root.mtime else tree.walk():
            entry = _entry(path, node)
            first = names.setdefault(id(node), path) if node.content else path
            if first != path:
                entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, first, 0
            out.write(header(entry))
            if entry.isreg() and node.content is not None:
                _write_content(path, node.content, opened, out, pipe)
        out.write(bytes(2 * tarfile.BLOCKSIZE))


def _is_pipe(out: IO[bytes]) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(out.fileno()).st_mode)
    except OSError:
        return False


def _entry(path: str, node: Node) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path or ".")
    entry.mode, entry.uid, entry.gid, entry.mtime = node.mode, node.uid, node.gid, node.mtime
    entry.pax_headers = {XATTR + name: text for name, text in node.xattrs.items()}
    if node.children is not None:
        entry.type = tarfile.DIRTYPE
    elif node.target is not None:
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, node.target, 0o777
    elif node.content is not None:
        entry.size = node.content.size
    return entry


def _write_content(path: str, content: Content, layers: Sequence[FileIO], out: IO[bytes], pipe: bool) -> None:
    with _opened(path, content, layers) as file:
        at = 0
        for offset, position, length in content.pieces:
            _zeros(offset - at, out)
            moved = _splice(file, position, length, out) if pipe and length >= SPLICED_MIN else 0
            _copy(path, file, position + moved, length - moved, out)
            at = offset + length
        _zeros(content.size - at, out)
    _zeros(-content.size % tarfile.BLOCKSIZE, out)


def _splice(file: FileIO, position: int, length: int, out: IO[bytes]) -> int:
    """Give pages of a file to a pipe, without copies; returns how many bytes the file system lets it give."""
    out.flush()
    left = length
    while left:
        try:
            moved = os.splice(file.fileno(), out.fileno(), min(left, CHUNK), position + length - left)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            break
        if not moved:
            break
        left -= moved
    return length - left


def _copy(path: str, file: FileIO, position: int, length: int, out: IO[bytes]) -> None:
    while length:
        chunk = os.pread(file.fileno(), min(length, CHUNK), position)
        if not chunk:
            raise RefusedError(f"{path[:80]!r} became shorter while it was read")
        out.write(chunk)
        position, length = position + len(chunk), length - len(chunk)


def _zeros(count: int, out: IO[bytes]) -> None:
    while count > 0:
        out.write(bytes(min(count, CHUNK)))
        count -= CHUNK


@contextlib.contextmanager
def _opened(path: str, content: Content, layers: Sequence[FileIO]) -> Iterator[FileIO]:
    if isinstance(content.source, int):
        yield layers[content.source]
        return
    try:
        fd = os.open(content.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise RefusedError(f"cannot read {path[:80]!r}: {err.strerror}") from err
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RefusedError(f"{path[:80]!r} is not a regular file any more")
    with FileIO(fd) as file:
        yield file
