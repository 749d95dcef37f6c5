# SPDX-License-Identifier: Apache-2.0
"""Durable writes and file locks.

The kernel releases a lock when the last descriptor of its open file is
closed, so also when its holder is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.02
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2): blocks are reserved beyond the end of the file."""
_FICLONE = 0x40049409
"""ioctl_ficlone(2): the target gets the source's blocks, which are shared until one of both is written to."""
_CANNOT_SHARE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.EPERM)
_SYNC_FILE_RANGE_WRITE = 2
_AT_ONCE = 1 << 30
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def write_beside(path: Path, new: Path, data: bytes, mode: int = 0o600) -> None:
    """Write ``data`` to ``new``, a name in the folder of ``path``; its content is on disk on return."""
    assert new.parent == path.parent
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(new, flags, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask is
        write(fd, data)
        os.fsync(fd)
    except OSError:
        new.unlink(missing_ok=True)  # a part of it would take space of a file system that has none
        raise
    finally:
        os.close(fd)


def write(fd: int, data: bytes) -> None:
    """Write all of ``data``; write(2) takes a part where a file system becomes full, and fails only then."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file as a whole: a reader sees the old or the new content, also after a power cut.

    Only one process at a time may replace a file: all use the same temporary name.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    write_beside(path, new, data, mode)
    new.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file that another program or library wrote durable."""
    _sync(path, os.O_NOFOLLOW)


def sync_folder(folder: Path) -> None:
    """Make the creation, removal or renaming of a file in ``folder`` durable."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_full(error: OSError) -> bool:
    """Whether a file system, or a quota, had no space for what should be written."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reserve(fd: int, size: int) -> bool:
    """Reserve the blocks of a file up to ``size`` bytes; the file's size stays (fallocate(2), KEEP_SIZE).

    False: its file system cannot reserve blocks (NFS, for example).

    Raises:
        OSError: there is no space for them; some may be reserved.
    """
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while fallocate(fd, _KEEP_SIZE, 0, size) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT_RESERVE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def start_writing(fd: int, start: int, size: int) -> None:
    """Let the kernel write a range of a file to disk, without a wait: a later fsync has less to do.

    It says nothing of what is on disk, so errors are those of the fsync (sync_file_range(2)).
    """
    sync_file_range = ctypes.CDLL(None).sync_file_range
    sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    sync_file_range(fd, start, size, _SYNC_FILE_RANGE_WRITE)


def share_blocks(source: int, target: int) -> bool:
    """Let a file have the content of another one without a copy of its blocks (reflink).

    False: the file system cannot (ext4, tmpfs), or the files are on two; the target is unchanged.

    Raises:
        OSError: the source cannot be read, or there is no space.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as err:
        if err.errno in _CANNOT_SHARE:
            return False
        raise
    return True


def copy(source: Path, target: Path) -> None:
    """Copy a regular file's content to a new file, or share its blocks.

    Raises:
        OSError: the source cannot be read, or the target exists or cannot be written; a new one is removed.
    """
    fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(source))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        new = os.open(target, flags, 0o644)
        try:
            os.fchmod(new, 0o644)  # whatever the umask is
            if not share_blocks(fd, new):
                _copy_bytes(fd, new)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(new)
    finally:
        os.close(fd)


def _copy_bytes(source: int, target: int) -> None:
    try:
        while os.copy_file_range(source, target, _AT_ONCE):
            pass
    except OSError as err:
        if err.errno not in _CANNOT_SHARE:
            raise
    while os.sendfile(target, source, None, _AT_ONCE):  # the rest: on two file systems all of it
        pass


def open_lock(path: Path) -> int:
    """Open a lock file of root's, and create it if it is missing; the descriptor is not locked yet."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def try_lock(fd: int) -> bool:
    """Lock an open file; False if another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, timeout_s: float) -> bool:
    """Lock an open file; False if another process held the lock for ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while not try_lock(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a file, which is made if it is missing; gets False if another process keeps it."""
    fd = open_lock(path)
    try:
        yield lock(fd, timeout_s)
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file; False if the file does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)
