# SPDX-License-Identifier: Apache-2.0
"""Lists all files of an EROFS root, with digests of their contents; runs in the sandbox.

fsck.erofs unpacks the root into a folder, from which contents are read; what an unprivileged
process cannot unpack (owners, modes) is read by ``erofs``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from vhpc_slurm.importing.erofs import FileSystem, Inode
from vhpc_slurm.importing.tree import RefusedError
from vhpc_slurm.terminal import last_line

ROOT = "root"
"""Kind of the source that is the root of an image."""
CHUNK = 1 << 20
POLL_S = 0.5
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def write_listing(root: Path, out: Path, max_files: int, max_bytes: int) -> int:
    """Write ``out/files``: a line of JSON for each file, the array of an ``Entry``'s fields.

    Args:
        root: the bytes of the file system.
        out: folder to work in.
        max_files: more are refused.
        max_bytes: of all contents together.

    Returns:
        the number of files.

    Raises:
        RefusedError: the root is damaged, too large, or of a newer format.
    """
    with root.open("rb", buffering=0) as file:
        system = FileSystem(file.fileno())
        found = []
        size = 0
        for path, inode in system.walk(max_files):
            size += inode.size if stat.S_ISREG(inode.mode) else 0
            if size > max_bytes:
                raise RefusedError(f"its files have more than {max_bytes >> 20} MiB")
            found.append((path, inode, system.xattrs(inode)))
    tree = out / "tree"
    _unpack(root, tree, max_bytes)
    with (out / "files").open("w", encoding="ascii") as listing:
        for path, inode, xattrs in found:
            listing.write(json.dumps(_entry(tree, path, inode, xattrs)) + "\n")
    shutil.rmtree(tree, ignore_errors=True)
    return len(found)


def _entry(tree: Path, path: bytes, inode: Inode, xattrs: dict[str, str]) -> list[Any]:
    kind = KINDS.get(stat.S_IFMT(inode.mode))
    if kind == "folder":
        _open(_place(tree, path), 0o700)
    if kind is None:
        raise RefusedError(f"a file has the unknown type {stat.S_IFMT(inode.mode):#o}")
    size, content = 0, ""
    if kind == "file":
        size, content = inode.size, _sha256(tree, path, inode.size)
    elif kind == "link":
        content = os.fsdecode(_target(tree, path))
    elif kind.endswith("device"):
        content = f"{inode.start:#x}"
    name = os.fsdecode(path)
    return [name, kind, stat.S_IMODE(inode.mode), inode.uid, inode.gid, size, content, xattrs]


def _place(tree: Path, path: bytes) -> bytes:
    return os.path.join(os.fsencode(tree), path)  # noqa: PTH118 - names are bytes


def _sha256(tree: Path, path: bytes, size: int) -> str:
    """The digest of an unpacked file."""
    place = _place(tree, path)
    try:
        _open(place, 0o600)
        digest, found = hashlib.sha256(), 0
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                found += len(chunk)
    except OSError as err:
        raise RefusedError(f"fsck.erofs did not unpack {os.fsdecode(path)!r}: {err.strerror}") from err
    if found != size:
        raise RefusedError(f"fsck.erofs unpacked {found} instead of {size} bytes of {os.fsdecode(path)!r}")
    return digest.hexdigest()


def _open(place: bytes, mode: int) -> None:
    """Let this process read an unpacked file or folder, whose mode may forbid it."""
    if not os.access(place, os.R_OK | (mode & os.X_OK)):
        os.chmod(place, mode)  # noqa: PTH101 - names are bytes


def _target(tree: Path, path: bytes) -> bytes:
    try:
        return os.readlink(_place(tree, path))  # noqa: PTH115 - names are bytes
    except OSError as err:
        raise RefusedError(f"fsck.erofs did not unpack {os.fsdecode(path)!r}: {err.strerror}") from err


def _unpack(root: Path, tree: Path, max_bytes: int) -> None:
    """Unpack the files of a root, as files of this process's user."""
    argv = ["fsck.erofs", f"--extract={tree}", "--no-preserve", str(root)]
    with tempfile.TemporaryFile(dir=tree.parent) as said:
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as run:
            try:
                while run.poll() is None:
                    time.sleep(POLL_S)
                    if _used(tree) > max_bytes + (max_bytes >> 3):
                        raise RefusedError(f"fsck.erofs unpacked more than {max_bytes >> 20} MiB")
            finally:
                run.kill()
        if run.returncode != 0:
            said.seek(0)
            why = last_line(said.read(20000).decode("utf-8", "replace"))
            raise RefusedError(f"fsck.erofs ended with status {run.returncode}: {why}")


def _used(tree: Path) -> int:
    """Bytes on the disk of all files below a folder."""
    used = 0
    for above, _, names in os.walk(tree):
        for name in names:
            try:
                used += os.lstat(os.path.join(above, name)).st_blocks * 512  # noqa: PTH118 - faster than Path
            except OSError:
                continue
    return used
