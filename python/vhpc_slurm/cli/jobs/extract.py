# SPDX-License-Identifier: Apache-2.0
"""Extract a tar of a guest into a folder of its user.

The guest is not trusted.  Only files, folders and links below the folder are created: paths are walked
component by component without following links (openat(2), O_NOFOLLOW), an existing file is replaced and
never written to, and a link that could lead out of the folder is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, Any

from vhpc_slurm.errors import UserError
from vhpc_slurm.terminal import one_line

EXTENSION_MAX = 128 << 10
"""Bytes of a header that describes the next entry; tarfile reads all of it into memory."""
EXTENSIONS = (*b"xgXLK",)
TEMPORARY = ".vhpc-cp-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_MODE = 0o777


class _Header(tarfile.TarInfo):
    """An entry whose extended header has a bounded size."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _Header:
        entry = super().frombuf(buf, encoding, errors)
        if ord(entry.type) in EXTENSIONS and not 0 <= entry.size <= EXTENSION_MAX:
            raise tarfile.ReadError(f"a header of more than {EXTENSION_MAX >> 10} KiB")
        return entry


class Kind(Enum):
    """Kinds of entries that are left out: the words for one of them, and for several."""

    OUTSIDE = "link that leads outside", "links that lead outside"
    DEVICE = "device", "devices"
    PIPE = "pipe", "pipes"
    SOCKET = "socket", "sockets"
    OTHER = "file of another kind", "files of other kinds"


@dataclass
class Copied:
    """The entries that were copied, and those that were left out."""

    files: int = 0
    left_out: dict[Kind, list[str]] = field(default_factory=dict)
    """At most ``NAMES_MAX`` names of each kind, fit for a terminal."""
    counts: Counter[Kind] = field(default_factory=Counter)

    NAMES_MAX = 5

    def leave_out(self, kind: Kind, name: str) -> None:
        """Note an entry that was not copied."""
        self.counts[kind] += 1
        names = self.left_out.setdefault(kind, [])
        if len(names) < self.NAMES_MAX:
            names.append(one_line(name)[:80])

    def leave_out_entry(self, entry: tarfile.TarInfo) -> None:
        """Note an entry of a tar that is not a file, folder or link."""
        is_device = entry.ischr() or entry.isblk()
        kind = Kind.DEVICE if is_device else Kind.PIPE if entry.isfifo() else Kind.OTHER
        self.leave_out(kind, entry.name)

    def left_out_line(self) -> str:
        """The entries that were left out, as one line; empty if there are none."""
        parts = []
        for kind, names in self.left_out.items():
            count = self.counts[kind]
            more = f" and {count - len(names)} more" if count > len(names) else ""
            parts.append(f"{count} {kind.value[count > 1]}: {', '.join(names)}{more}")
        return f"left out {'; '.join(parts)}" if parts else ""


def extract(stream: IO[bytes], folder: int, *, is_new: bool) -> Copied:
    """Extract a tar into a folder.

    Args:
        stream: the tar; it is read to its end.
        folder: descriptor of an existing folder.
        is_new: the folder gets mode and time of the tar's; existing folders keep theirs.

    Returns:
        what was extracted; devices, pipes and links that lead outside are left out.

    Raises:
        UserError: the tar is damaged or hostile, or there is no space for it.
    """
    result, at = Copied(), ""
    made: list[tuple[list[str], tarfile.TarInfo]] = []
    try:
        with tarfile.open(
            fileobj=stream, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (entry := archive.next()) is not None:
                vars(archive)["members"] = []  # otherwise it remembers all
                parts, at = _parts(entry.name), entry.name
                if not entry.isdir():
                    _take(archive, entry, parts, folder, result)
                elif _make(parts, folder) if parts else is_new:
                    made.append((parts, entry))
        while stream.read(1 << 16):
            pass
        for parts, entry in reversed(made):
            with _opened(folder, parts) as found:
                os.fchmod(found, entry.mode & _KEPT_MODE | 0o700)
                os.utime(found, (entry.mtime, entry.mtime))
    except (tarfile.TarError, RecursionError, UnicodeError, ValueError, OverflowError) as err:
        raise UserError("cannot extract what the guest has sent", str(err) or type(err).__name__) from err
    except OSError as err:
        # not str(err): it has the name of our temporary file
        why = f"{one_line(at)[:80]}: {err.strerror}" if at else err.strerror or str(err)
        raise UserError("cannot write what the guest has sent", why) from err
    return result


def _parts(name: str) -> list[str]:
    """Components of an entry's path below the folder; ValueError for one that leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"the path {one_line(name)[:80]} leads out of the folder")
    return parts


def _leads_outside(target: str, depth: int) -> bool:
    """Whether a link in a folder at that depth may lead out of the top folder.

    Steps upward count only at the beginning: after the name of another link they may lead anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    return target.startswith("/") or not target or up > depth or ".." in parts[up:]


@contextlib.contextmanager
def _opened(top: int, parts: list[str], *, create: bool = False) -> Iterator[int]:
    """A folder below the top, reached without following a link."""
    here = os.dup(top)
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=here)
            below = os.open(part, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def _make(parts: list[str], top: int) -> bool:
    """Make a folder; false if it existed."""
    with _opened(top, parts[:-1], create=True) as folder:
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=folder)
        except FileExistsError:
            with _opened(folder, parts[-1:]):
                return False
    return True


def _take(
    archive: tarfile.TarFile, entry: tarfile.TarInfo, parts: list[str], top: int, result: Copied
) -> None:
    """Create one file or link."""
    if not parts or not (entry.isreg() or entry.issym() or entry.islnk()) or entry.issparse():
        result.leave_out_entry(entry)
        return
    with _opened(top, parts[:-1], create=True) as folder:
        temporary = f"{TEMPORARY}{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        if entry.issym():
            if _leads_outside(entry.linkname, len(parts) - 1):
                result.leave_out(Kind.OUTSIDE, f"{entry.name} -> {entry.linkname}")
                return
            os.symlink(entry.linkname, temporary, dir_fd=folder)
        elif entry.islnk():
            *where, name = _parts(entry.linkname) or [""]
            with _opened(top, where) as other:
                os.link(name, temporary, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        else:
            _write(archive, entry, folder, temporary)
        try:
            os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):  # also after a rename between two hard links
                os.unlink(temporary, dir_fd=folder)
    result.files += 1


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: int, name: str) -> None:
    need_space(folder, entry.size)
    source = archive.extractfile(entry)
    assert source is not None
    try:
        with os.fdopen(os.open(name, _NEW, 0o600, dir_fd=folder), "wb") as file:
            shutil.copyfileobj(source, file, 1 << 18)
            if file.tell() != entry.size:
                raise tarfile.ReadError("it is cut off")
            file.flush()
            os.fchmod(file.fileno(), entry.mode & _KEPT_MODE)
            os.utime(file.fileno(), (entry.mtime, entry.mtime))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        raise


def need_space(folder: int, size: int) -> None:
    """UserError unless the file system of a folder has that many bytes left for its user."""
    found = os.fstatvfs(folder)
    if size > found.f_bavail * found.f_frsize:
        raise UserError(
            "there is no space for what the guest has sent",
            f"a file has {size >> 20} MiB, {found.f_bavail * found.f_frsize >> 20} are left",
        )
