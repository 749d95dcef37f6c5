# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shared folders, in the folder ``snapshots`` of the site's catalogue.

A snapshot is an EROFS file system with what all users of the site can read in a folder. ``NAME.json`` says
which one is current; guests that use an older one keep it open, so its file stays for some days.

Nodes read a snapshot where it is, block by block: a copy on each node, as images have one, would cost the
whole of a software tree that may have a terabyte.
"""
# Decision: A snapshot is read where it is, and belongs to no lease

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from vhpc_slurm import files
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import FabricError
from vhpc_slurm.record import Record

FOLDER = "snapshots"
SUFFIX = ".erofs"
DAY_S = 86400
LEFT_DAYS = 1
"""An unfinished file is so old if its command was killed."""
LIMIT = 64 << 10
"""Bytes of a file that names a snapshot."""
PATH = re.compile(r"(/[A-Za-z0-9_.@+:-]+)+", re.ASCII)
"""Paths that a guest's domain can have."""


class Snapshot(Record, frozen=True):
    """The current snapshot of a folder.

    Attributes:
        path: the folder.
        file: name of the file with it, in the folder of snapshots.
        size: bytes of this file.
        files, bytes: regular files in the snapshot, and their bytes.
        began: when its files were read, in seconds since 1970; what changed later is not in it.
    """

    path: str
    file: str
    size: int
    files: int
    bytes: int
    began: float


def folder(config: Images) -> Path:
    """The folder of snapshots."""
    return Path(config.catalog) / FOLDER


def current(config: Images, path: str) -> Snapshot | None:
    """The current snapshot of a folder; None if it has none.

    Raises:
        FabricError: it cannot be read, or its file is not there as it was written.
    """
    top = folder(config)
    try:
        raw = _read(top / f"{_name(path)}.json")
    except FileNotFoundError:
        return None
    except OSError as err:
        raise _unusable(path, str(err)) from err
    try:
        found = msgspec.json.decode(raw, type=Snapshot)
        file = top / found.file
        about, closed = file.lstat(), _closed(file)
    except (OSError, msgspec.MsgspecError) as err:
        raise _unusable(path, str(err)) from err
    if found.path != path or file.parent != top or not stat.S_ISREG(about.st_mode):
        raise _unusable(path, f"{file} is not one of {path}")
    if about.st_size != found.size:
        raise _unusable(path, f"{file} has {about.st_size} bytes instead of {found.size}")
    if closed:
        raise _unusable(path, f"QEMU cannot read {file}", f"let all users read, or enter, {closed}")
    if not PATH.fullmatch(str(file)):
        allowed = "letters, digits and _.@+:- are allowed in the path of a catalogue with snapshots"
        raise _unusable(path, f"{file}: {allowed}", "change images.catalog")
    return found


def is_one(top: Path, file: str) -> bool:
    """Whether a path is an existing snapshot in the folder ``top``."""
    path = Path(file)
    return path.parent == top and path.suffix == SUFFIX and path.is_file()


def unfinished(config: Images, path: str, owner: int) -> Path:
    """An empty file for a new snapshot, which belongs to ``owner``; OSError if it cannot be made."""
    top = folder(config)
    top.mkdir(mode=0o755, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    new = top / f".{_name(path)}-{stamp}{SUFFIX}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if owner != os.geteuid():
            os.fchown(fd, owner, -1)
    finally:
        os.close(fd)
    return new


def publish(path: str, new: Path, counts: tuple[int, int], began: float) -> Snapshot:
    """Make an unfinished snapshot the current one: a node sees the older one, or all of this one.

    Args:
        path: the folder.
        new: the file of ``unfinished``, complete.
        counts: regular files in it, and their bytes.
        began: when its files were read.

    Raises:
        OSError: it cannot be published; the older one stays the current one.
    """
    if os.geteuid() == 0:
        os.chown(new, 0, 0, follow_symlinks=False)
    new.chmod(0o444)
    files.sync_file(new)
    final = new.with_name(new.name.removeprefix("."))
    made = Snapshot(path, final.name, new.stat().st_size, *counts, began)
    new.rename(final)
    files.replace(final.with_name(f"{_name(path)}.json"), msgspec.json.encode(made), 0o644)
    return made


def remove_old(config: Images, path: str, keep_days: float) -> list[str]:
    """Remove replaced snapshots of a folder, and what killed commands have left; returns the names.

    Args:
        config: has the catalogue.
        path: the folder.
        keep_days: days that a snapshot stays after the next one has replaced it.

    Raises:
        OSError, FabricError: the folder, or the current snapshot, cannot be read.
    """
    top, now = folder(config), time.time()
    used = current(config, path)
    if used is None:
        return []
    written = {file: file.stat().st_mtime for file in sorted(_of(top, path))}
    whole = [file for file in written if not file.name.startswith(".")]
    # a snapshot was replaced when the next one was written
    since = dict(zip(whole, (written[file] for file in whole[1:]), strict=False))
    gone = []
    for file, at in written.items():
        keep = keep_days if file in whole else LEFT_DAYS
        if file.name != used.file and now - since.get(file, at) >= keep * DAY_S:
            file.unlink()
            gone.append(file.name)
    return gone


def _of(top: Path, path: str) -> Iterator[Path]:
    form = re.compile(rf"\.?{re.escape(_name(path))}-\d{{8}}T\d{{6}}Z{re.escape(SUFFIX)}")
    return (file for file in top.iterdir() if form.fullmatch(file.name))


def _name(path: str) -> str:
    """The folder in the names of its files: readable, and no other folder has it."""
    readable = re.sub(r"[^A-Za-z0-9_.-]", "-", str(PurePosixPath(path)).strip("/"))[:64]
    return f"{readable}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def _closed(file: Path) -> Path | None:
    """The file, or a folder above it, that not all users can read or enter."""
    if not file.stat().st_mode & 0o004:
        return file
    return next((above for above in file.parents if not above.stat().st_mode & 0o001), None)


def _unusable(path: str, why: str, hint: str = "") -> FabricError:
    hint = hint or f"make it again: vhpc share snapshot {path}"
    return FabricError(f"the snapshot of {path} cannot be used", why, hint)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, LIMIT)
    finally:
        os.close(fd)
