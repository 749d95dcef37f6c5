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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vhpc_slurm.importing.erofs import FileSystem, Inode
from vhpc_slurm.importing.tree import RefusedError
from vhpc_slurm.terminal import last_line

ROOT = "root"
"""Kind of the source that is the root of an image."""
CHUNK = 1 << 20
PAGE = 4096
POLL_S = 0.5
LOOK_SHARE = 20
TELL_S = 0.25
Tell = Callable[[str, int, int], None]
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def write_listing(request: dict[str, Any], root: Path, out: Path, memory: Path, amount: Tell) -> int:
    """Write ``out/files``: a line of JSON for each file, the array of an ``Entry``'s fields.

    Args:
        request: ``max_files`` and ``max_bytes`` of all contents together; more are refused;
            ``memory``: bytes that may be written below ``memory``.
        root: the bytes of the file system.
        out: folder to work in.
        memory: another one, for files that fit.
        amount: is told what is done, how much of it, and how much there is.

    Returns:
        the number of files.

    Raises:
        RefusedError: the root is damaged, too large, or of a newer format.
    """
    found, size, pages = [], 0, 0
    with root.open("rb", buffering=0) as file:
        system = FileSystem(file.fileno())
        for path, inode in system.walk(request["max_files"]):
            length = inode.size if stat.S_ISREG(inode.mode) else 0
            size, pages = size + length, pages + (length + PAGE - 1) // PAGE + 1
            if size > request["max_bytes"]:
                raise RefusedError(f"its files have more than {request['max_bytes'] >> 20} MiB")
            found.append((path, inode, system.xattrs(inode)))
    in_memory = pages * PAGE <= request["memory"]
    tree = (memory if in_memory else out) / "tree"
    amount = _seldom(amount)

    def told(used: int) -> None:
        amount("unpacked", used, size)

    _unpack(root, tree, request["max_bytes"], told, in_memory=in_memory)
    done = 0
    with (out / "files").open("w", encoding="ascii") as listing:
        for path, inode, xattrs in found:
            listing.write(json.dumps(_entry(tree, path, inode, xattrs)) + "\n")
            done += inode.size if stat.S_ISREG(inode.mode) else 0
            amount("read", done, size)
    if not in_memory:
        shutil.rmtree(tree, ignore_errors=True)
    return len(found)


def _seldom(amount: Tell) -> Tell:
    """Tell amounts at most every ``TELL_S`` seconds."""
    said = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= TELL_S:
            said = time.monotonic()
            amount(what, done, total)

    return tell


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
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            while chunk := os.read(fd, CHUNK):
                digest.update(chunk)
                found += len(chunk)
        finally:
            os.close(fd)
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


def _unpack(root: Path, tree: Path, max_bytes: int, told: Callable[[int], None], *, in_memory: bool) -> None:
    """Unpack the files of a root, as files of this process's user; what is in memory has its own limit."""
    argv = ["fsck.erofs", f"--extract={tree}", "--no-preserve", str(root)]
    pause = POLL_S
    with tempfile.TemporaryFile(dir=tree.parent) as said:
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as run:
            try:
                while _runs(run, pause):
                    began = time.monotonic()
                    used = _filled(tree.parent) if in_memory else _used(tree)
                    # looking at thousands of files takes time that fsck.erofs needs
                    pause = max(POLL_S, LOOK_SHARE * (time.monotonic() - began))
                    told(used)
                    if used > max_bytes + (max_bytes >> 3):
                        raise RefusedError(f"fsck.erofs unpacked more than {max_bytes >> 20} MiB")
            finally:
                run.kill()
        if run.returncode != 0:
            said.seek(0)
            why = last_line(said.read(20000).decode("utf-8", "replace"))
            raise RefusedError(f"fsck.erofs ended with status {run.returncode}: {why}")


def _runs(run: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Whether a process still runs after this time; returns at once when it ends."""
    try:
        run.wait(wait_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _filled(folder: Path) -> int:
    """Bytes that the files of a file system have."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


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
