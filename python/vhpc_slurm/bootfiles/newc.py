# SPDX-License-Identifier: Apache-2.0
"""Initramfs archives: cpio in the "newc" format; a writer, and a reader of regular files.

Format: Linux Documentation/driver-api/early-userspace/buffer-format.rst.
The same entries in any order give the same bytes: they are sorted, inode
numbers are consecutive, and there is one timestamp.  Unlike the cpio tool,
which reads a directory, this writer needs no privilege for device nodes.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from vhpc_slurm.bootfiles.errors import BootFileError

ALIGN = 4
HEAD, MAGIC, TRAILER = 110, b"070701", "TRAILER!!!"
HEADER = re.compile(MAGIC + b"[0-9A-Fa-f]{104}")
"""int() would also read signs, spaces and underscores: a negative size led back to an earlier byte."""
# The kernel unpacks from a page boundary; QEMU and boot loaders also pad to one.
PAD_ARCHIVE = 512
SIZE_MAX = 0xFFFFFFFF


@dataclass(frozen=True)
class _Entry:
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


@dataclass
class Archive:
    """An archive; root owns all entries, and all have the timestamp ``mtime`` (s since 1970)."""

    mtime: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Add a directory and its parents unless they exist."""
        name = _name(path)
        for parent in reversed(PurePosixPath(name).parents):
            if str(parent) != ".":
                self._entries.setdefault(str(parent), _Entry(stat.S_IFDIR | 0o755))
        self._entries.setdefault(name, _Entry(stat.S_IFDIR | mode))

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Add a regular file and its parents.  ValueError: it exists, or has 4 GiB or more."""
        if len(data) > SIZE_MAX:
            raise ValueError(f"{path}: newc cannot store a file of {len(data)} bytes")
        self._add(path, _Entry(stat.S_IFREG | mode, data))

    def character_device(self, path: str, major: int, minor: int, mode: int = 0o600) -> None:
        """Add a character device node."""
        self._add(path, _Entry(stat.S_IFCHR | mode, device=(major, minor)))

    def to_bytes(self) -> bytes:
        """The archive."""
        out = bytearray()
        for number, name in enumerate(sorted(self._entries), start=1):
            out += _record(name, self._entries[name], number, self.mtime)
        out += _record(TRAILER, _Entry(0), 0, 0)
        return bytes(_padded(out, PAD_ARCHIVE))

    def _add(self, path: str, entry: _Entry) -> None:
        name = _name(path)
        if name in self._entries:
            raise ValueError(f"{path} is in the archive twice")
        parent = str(PurePosixPath(name).parent)
        if parent != ".":
            self.directory(parent)
        self._entries[name] = entry


def files(data: bytes) -> dict[str, bytes]:
    """Contents of the regular files of an uncompressed archive, by their paths.

    Raises:
        BootFileError: it is not such an archive, or its end is missing.
    """
    found: dict[str, bytes] = {}
    at = 0
    while True:
        head = data[at : at + HEAD]
        if not HEADER.fullmatch(head):
            raise BootFileError("the initrd is not a newc archive", f"no sound header at byte {at}")
        numbers = [int(head[start : start + 8], 16) for start in range(len(MAGIC), HEAD, 8)]
        mode, size, name_size = numbers[1], numbers[6], numbers[11]
        start = _aligned(at + HEAD + name_size)
        name = data[at + HEAD : at + HEAD + name_size].rstrip(b"\0").decode(errors="replace")
        if name == TRAILER:
            return found
        if stat.S_ISREG(mode):
            if start + size > len(data):
                raise BootFileError("the initrd is not a newc archive", f"its file {name[:80]!r} is cut off")
            found[name] = data[start : start + size]
        at = _aligned(start + size)


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGN


def _name(path: str) -> str:
    """A path for an initramfs: relative, without dots and NUL."""
    parts = PurePosixPath(path.lstrip("/")).parts
    if not parts or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a valid path in an archive")
    return "/".join(parts)


def _record(name: str, entry: _Entry, inode: int, mtime: int) -> bytes:
    raw_name = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (
        inode,
        entry.mode,
        0,  # uid
        0,  # gid
        links,
        mtime,
        len(entry.data),
        0,  # major and minor of the archive's own device
        0,
        *entry.device,
        len(raw_name),
        0,  # checksum, unused in newc
    )
    head = MAGIC + "".join(f"{number:08X}" for number in numbers).encode()
    return bytes(_padded(bytearray(head + raw_name), ALIGN)) + bytes(_padded(bytearray(entry.data), ALIGN))


def _padded(data: bytearray, to: int) -> bytearray:
    data += b"\0" * (-len(data) % to)
    return data
