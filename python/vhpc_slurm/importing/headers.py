# SPDX-License-Identifier: Apache-2.0
"""Plain headers of tars, read and written faster than by tarfile, which has all others.

A plain header is a block of the old format (pax(1), "ustar Interchange Format") whose name and
numbers fit into its fields: nearly every entry of an image has one.
"""

from __future__ import annotations

import tarfile
from typing import Any

from vhpc_slurm.importing.tree import RefusedError

FIELDS = (slice(100, 108), slice(108, 116), slice(116, 124), slice(124, 136), slice(136, 148))
"""Mode, uid, gid, size and time: octal digits up to a NUL."""
CHECKSUM, KIND, LINK, PREFIX = slice(148, 156), slice(156, 157), slice(157, 257), 345
DEVICE = slice(329, 345)
NO_DEVICE = (bytes(16), b"0000000\0" * 2)
"""Numbers of a device, as tar programs write none."""
KINDS = (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)
NAME_SIZE = 100
EXTENSIONS = (*b"xgXLK",)
"""Types of headers whose data describe the next entry: attributes (pax), long names (GNU)."""
EXTENSION_MAX = 128 << 10
"""Bytes of such data: tarfile reads all of it, and older versions search it in quadratic time."""
RECORD_DIGITS = 7
LARGEST = (8**7 - 1, 8**7 - 1, 8**11 - 1, 8**11 - 1)
"""Of uid, gid, size and time."""
REST = bytes(tarfile.BLOCKSIZE - 265)
"""Names of owners, numbers of devices and prefix: all empty."""


class Header(tarfile.TarInfo):
    """An entry of a tar, as tarfile reads it."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Header:
        """The entry of a block; errors as tarfile, and RefusedError."""
        numbers = _plain_numbers(bytes(buf))
        if numbers is None:
            other = super().frombuf(buf, encoding, errors)
            if ord(other.type) in EXTENSIONS and not 0 <= other.size <= EXTENSION_MAX:
                raise RefusedError(f"it has a header of more than {EXTENSION_MAX >> 10} KiB")
            return other
        kind = buf[KIND]
        name = buf[:NAME_SIZE].partition(b"\0")[0].decode(encoding, errors)
        entry = cls(name.rstrip("/") if kind == tarfile.DIRTYPE else name)
        entry.type, entry.linkname = kind, buf[LINK].partition(b"\0")[0].decode(encoding, errors)
        entry.mode, entry.uid, entry.gid, entry.size, entry.mtime = numbers
        return entry

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Read attributes of the next entry; tarfile would pass over those that are damaged."""
        assert archive.fileobj is not None
        at = archive.fileobj.tell()
        _check_records(archive.fileobj.read(self.size))
        archive.fileobj.seek(at)
        found: tarfile.TarInfo = super()._proc_pax(archive)  # type: ignore[misc] # unknown to typeshed
        return found


def _check_records(data: bytes) -> None:
    """RefusedError unless the data are records ``LENGTH KEY=VALUE`` with a line feed after each."""
    at = 0
    while at < len(data):
        length, blank, _ = data[at : at + RECORD_DIGITS].partition(b" ")
        end = at + int(length) if length.isdigit() else at
        if not blank or end > len(data) or data[end - 1 : end] != b"\n" or b"=" not in data[at:end]:
            raise RefusedError("it has a header with damaged attributes")
        at = end


def _plain_numbers(block: bytes) -> list[int] | None:
    """Numbers of a plain and sound header; None: tarfile has to look at it."""
    if len(block) != tarfile.BLOCKSIZE or block[KIND] not in KINDS or block[PREFIX] or not block[0]:
        return None
    if block[DEVICE] not in NO_DEVICE:
        return None
    try:
        stated, *numbers = [int(block[at].partition(b"\0")[0], 8) for at in (CHECKSUM, *FIELDS)]
    except ValueError:
        return None
    return numbers if sum(block) - sum(block[CHECKSUM]) + 8 * ord(" ") == stated else None


def header(entry: tarfile.TarInfo) -> bytes:
    """The blocks before the content of an entry."""
    name, target = f"{entry.name}/" if entry.isdir() else entry.name, entry.linkname
    numbers = (entry.uid, entry.gid, entry.size, int(entry.mtime))
    fits = len(name) <= NAME_SIZE and len(target) <= NAME_SIZE and (name + target).isascii()
    if not fits or entry.pax_headers or any(map(int.__gt__, numbers, LARGEST)):
        return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    before = name.encode().ljust(NAME_SIZE, b"\0")
    before += b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (entry.mode, *numbers)
    after = entry.type + target.encode().ljust(NAME_SIZE, b"\0") + tarfile.POSIX_MAGIC
    checksum = sum(before) + sum(after) + 8 * ord(" ")
    return b"%s%06o\0 %s%s" % (before, checksum, after, REST)
