# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints, which all nodes share: ``FOLDER/SERIAL/`` with the files of each guest.

An account that can write there can damage checkpoints, and the seals reveal it. Links are never followed,
so a writer cannot make root write elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.record import Record

TAGS = ".tags"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Names(Record, frozen=True):
    """Names of a guest's files in the folder of its checkpoint."""

    rank: int

    @property
    def state(self) -> str:
        """The file with its memory and its devices."""
        return f"{self.rank}.state"

    @property
    def disk(self) -> str:
        """The file with its own disk."""
        return f"{self.rank}.disk"

    @property
    def all(self) -> tuple[str, ...]:
        """All its files."""
        return (self.state, self.state + TAGS, self.disk, self.disk + TAGS)


class Folder:
    """The folder of one checkpoint, opened; ``path`` is for messages."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def create(self, name: str) -> int:
        """A new file, opened for writing; one of that name, from an earlier attempt, is removed.

        Raises:
            OSError: it cannot be made.
        """
        self.remove(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def open(self, name: str) -> int:
        """A file, opened for reading.

        Raises:
            UserError: it is not there, or is not a regular file.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as err:
            raise _unusable(self.path / name, err.strerror or str(err)) from err
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _unusable(self.path / name, "it is not a regular file")
        return fd

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; OSError if that fails."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Make the names of new files durable; OSError if that fails."""
        os.fsync(self._fd)


@contextmanager
def made(root: Path, serial: int) -> Iterator[Folder]:
    """The folder of a checkpoint that is being saved; the job's first node there makes it.

    Raises:
        NodeError: the folder of checkpoints cannot be used here, or others than root may enter it.
    """
    with opened(root) as top:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(str(serial), 0o700, dir_fd=top)
                os.fsync(top)
            fd = os.open(str(serial), _DIRECTORY, dir_fd=top)
        except OSError as err:
            raise _unfit(root / str(serial), str(err)) from err
        with _closed(fd):
            _check(root / str(serial), fd)
            yield Folder(root / str(serial), fd)


@contextmanager
def found(root: Path, serial: int) -> Iterator[Folder]:
    """The folder of a checkpoint that is resumed.

    Raises:
        NodeError: the folder of checkpoints cannot be used here, or others than root may enter it.
        UserError: it has no such checkpoint.
    """
    with opened(root) as top:
        try:
            fd = os.open(str(serial), _DIRECTORY, dir_fd=top)
        except OSError as err:
            raise _unusable(root / str(serial), err.strerror or str(err)) from err
        with _closed(fd):
            yield Folder(root / str(serial), fd)


def remove(root: Path, serial: int, ranks: tuple[int, ...]) -> None:
    """Remove the files of these guests, and the checkpoint's folder if nothing else is in it.

    Raises:
        NodeError: the folder of checkpoints cannot be used here, or a file cannot be removed.
    """
    with opened(root) as top:
        try:
            fd = os.open(str(serial), _DIRECTORY, dir_fd=top)
        except FileNotFoundError:
            return
        except OSError as err:
            raise _unfit(root / str(serial), str(err)) from err
        with _closed(fd):
            folder = Folder(root / str(serial), fd)
            try:
                for rank in ranks:
                    for name in Names(rank).all:
                        folder.remove(name)
            except OSError as err:
                raise _unfit(folder.path, str(err)) from err
        with contextlib.suppress(OSError):  # other nodes have files in it
            os.rmdir(str(serial), dir_fd=top)


def write_tags(folder: Folder, name: str, tags: bytes | bytearray) -> None:
    """Write the tags of a file beside it; OSError if that fails."""
    fd = folder.create(name + TAGS)
    with _closed(fd):
        files.write(fd, bytes(tags))
        os.fsync(fd)


def read_tags(folder: Folder, name: str, size: int) -> bytes:
    """At most ``size`` + 1 bytes of a file's tags: too many are seen by their length.

    Raises:
        UserError: they are not there, or are not a regular file.
    """
    fd = folder.open(name + TAGS)
    with os.fdopen(fd, "rb") as file:
        try:
            return file.read(size + 1)
        except OSError as err:
            raise _unusable(folder.path / (name + TAGS), err.strerror or str(err)) from err


@contextmanager
def opened(root: Path) -> Iterator[int]:
    """A descriptor of the folder of all checkpoints.

    Raises:
        NodeError: it cannot be used here, or others than root may enter it.
    """
    try:
        fd = os.open(root, _DIRECTORY)
    except OSError as err:
        raise _unfit(root, str(err)) from err
    with _closed(fd):
        _check(root, fd)
        yield fd


@contextmanager
def _closed(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def _check(path: Path, fd: int) -> None:
    status = os.fstat(fd)
    if status.st_uid != 0 or status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise _unfit(path, f"it belongs to uid {status.st_uid} and has mode {mode:o}, not 0 and 700")


def _unfit(path: Path, why: str) -> NodeError:
    return NodeError(
        f"the folder {path} cannot be used for checkpoints",
        why,
        "see checkpoint.folder in vhpc.toml(5); an NFS server must not map root to another user",
    )


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        "the checkpoint cannot be used", f"{path}: {why}", "use an older checkpoint, see: vhpc checkpoint ls"
    )
