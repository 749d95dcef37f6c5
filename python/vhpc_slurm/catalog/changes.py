# SPDX-License-Identifier: Apache-2.0
"""Shared code of all changes to a catalogue: its lock, the caller's errors, and a folder to work in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import ImageRef

LOCK_TIMEOUT_S = 60.0
STAGING = ".import-"
"""Folders in a catalogue in which images are made; one whose lock is free is left by a killed process."""


@contextlib.contextmanager
def changing(catalog: Path) -> Iterator[None]:
    """An OSError of a change is the caller's: no rights, no space, a file system that is read-only."""
    try:
        yield
    except OSError as err:
        raise UserError(f"cannot change the image catalogue {catalog}", err.strerror or str(err)) from err


def check_owner(catalog: Path, verb: str) -> None:
    """UserError if this process is root and the catalogue another user's; raises OSError.

    Args:
        catalog: the folder.
        verb: what root does not do to it.
    """
    owner = catalog.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        raise UserError(
            f"root does not {verb} the image catalogue {catalog}",
            f"it belongs to uid {owner}, whose links root would follow",
            "run the command as that user",
        )


def check_new_name(ref: ImageRef, form: str = "[own/]NAME[:TAG]") -> None:
    """UserError unless an image can get this name; ``form`` is what the user may write."""
    if ref.digest:
        raise UserError(f"{ref} cannot be a new name", "it has a digest", f"write {form}")


@contextlib.contextmanager
def locked(catalog: Path) -> Iterator[None]:
    """Hold the lock that publishers hold."""
    with changing(catalog):
        check_owner(catalog, "change")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(catalog / ".lock", flags, 0o644)
    try:
        if not files.lock(lock, LOCK_TIMEOUT_S):
            raise UserError(
                f"the image catalogue {catalog} is in use",
                f"another process has changed it for more than {LOCK_TIMEOUT_S:.0f} s",
                "try again later",
            )
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def staging(catalog: Path) -> Iterator[Path]:
    """An empty folder on the file system of a catalogue, for its owner only; removed at the end.

    Raises:
        UserError: it cannot be made.
    """
    with locked(catalog), changing(catalog):
        for left in left_folders(catalog):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=catalog))
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, readable for all, whatever the umask is."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(exist_ok=True)
            path.chmod(0o755)


def place(path: Path, data: bytes) -> None:
    """Write a file of the catalogue so that readers see the old or the new one; raises OSError."""
    # .new-: what readers and collect know as a file that is being written
    new = path.with_name(f".new-{path.name}")
    try:
        files.write_beside(path, new, data, 0o644)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    files.sync_folder(path.parent)


def left_folders(catalog: Path) -> list[Path]:
    """Folders of ``staging`` whose process was killed."""
    return [path for path in sorted(catalog.glob(f"{STAGING}*")) if _is_left(path)]


def _is_left(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return files.try_lock(fd)
    finally:
        os.close(fd)
