# SPDX-License-Identifier: Apache-2.0
"""Reads what an EROFS file system says about its files, for the sandbox; standard library only.

On-disk format: Linux, Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h. Only what
fsck.erofs does not give to an unprivileged user is read here: names, types, modes, owners, sizes and
extended attributes. Contents are read by fsck.erofs, which knows the compressions.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vhpc_slurm.importing.tree import RefusedError

SUPERBLOCK, MAGIC = 1024, 0xE0F5E1E2
KNOWN_FEATURES = 0x77
"""Incompatible features without those that change inodes, directories or devices."""
SLOT = 32
"""Bytes between the places of two inodes; a number of an inode is such a place."""
DIRECTORY_MAX = 256 << 20
NAME_MAX = 255
PLAIN, INLINE = 0, 2
"""Layouts of data that directories have."""
XATTR_HEAD, XATTR_ENTRY = 12, 4
XATTR_MAX = 1 << 20
XATTR_PREFIXES = {
    1: "user.",
    2: "system.posix_acl_access",
    3: "system.posix_acl_default",
    4: "trusted.",
    5: "lustre.",
    6: "security.",
}


@dataclass(frozen=True)
class Inode:
    """An inode. ``mode`` has the type; of a device file, ``start`` is its number in the kernel's encoding."""

    number: int
    layout: int
    mode: int
    uid: int
    gid: int
    size: int
    start: int
    tail: int
    """Offset of the bytes that follow inode and attributes."""
    xattrs: tuple[int, int]
    """Offset and size of the attributes."""


class FileSystem:
    """An EROFS file system in an open file.

    Raises:
        RefusedError: the file is not EROFS, is damaged, or has unknown features; also in all methods.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        head = self._read(SUPERBLOCK, 128, "the superblock")
        magic, _, _, bits, _, root = struct.unpack_from("<IIIBBH", head)
        self._meta, self._shared = struct.unpack_from("<II", head, 40)
        features = struct.unpack_from("<I", head, 80)[0]
        if magic != MAGIC:
            raise RefusedError("it is not an EROFS file system")
        if not 9 <= bits <= 16 or head[90] != 0:
            raise RefusedError("its blocks have a size that vhpc does not know")
        if features & ~KNOWN_FEATURES:
            raise RefusedError(f"it has features that vhpc does not know: {features & ~KNOWN_FEATURES:#x}")
        self._block = 1 << bits
        self._root = root

    def walk(self, max_files: int) -> Iterator[tuple[bytes, Inode]]:
        """All files with their paths, without the root itself; folders before what is in them.

        Args:
            max_files: more are refused.
        """
        stack = [(b"", self.inode(self._root))]
        seen, count = set(), 0
        while stack:
            above, folder = stack.pop()
            if not stat.S_ISDIR(folder.mode):
                raise RefusedError("its root is not a folder")
            if folder.number in seen:
                raise RefusedError(f"the folder {_shown(above)} is in two places")
            seen.add(folder.number)
            for name, number in self._names(folder, above):
                count += 1
                if count > max_files:
                    raise RefusedError(f"it has more than {max_files} files")
                path = above + b"/" + name if above else name
                inode = self.inode(number)
                yield path, inode
                if stat.S_ISDIR(inode.mode):
                    stack.append((path, inode))

    def inode(self, number: int) -> Inode:
        """The inode of a number."""
        place = self._meta * self._block + number * SLOT
        head = self._read(place, 32, f"inode {number}")
        form, count, mode = struct.unpack_from("<HHH", head)
        if form & 1:
            head += self._read(place + 32, 32, f"inode {number}")
            size, start = struct.unpack_from("<QI", head, 8)
            uid, gid = struct.unpack_from("<II", head, 24)
        else:
            size, _, start = struct.unpack_from("<III", head, 8)
            uid, gid = struct.unpack_from("<HH", head, 24)
        attributes = XATTR_HEAD + (count - 1) * XATTR_ENTRY if count else 0
        after = place + len(head)
        return Inode(
            number=number,
            layout=form >> 1 & 7,
            mode=mode,
            uid=uid,
            gid=gid,
            size=size,
            start=start,
            tail=after + attributes,
            xattrs=(after, attributes),
        )

    def xattrs(self, inode: Inode) -> dict[str, str]:
        """Extended attributes: name -> sha256 of the value."""
        place, size = inode.xattrs
        if not size:
            return {}
        data = self._read(place, size, f"the attributes of inode {inode.number}")
        shared = data[4]
        at = XATTR_HEAD + shared * 4
        if at > size:
            raise RefusedError(f"the attributes of inode {inode.number} are damaged")
        found = {}
        for number in struct.unpack_from(f"<{shared}I", data, XATTR_HEAD):
            offset = self._shared * self._block + number * 4
            head = self._read(offset, 4, "a shared attribute")
            length = 4 + head[0] + int.from_bytes(head[2:4], "little")
            name, value, _ = _attribute(self._read(offset, length, "a shared attribute"), 0)
            found[name] = value
        while at + 4 <= size and data[at : at + 4] != bytes(4):
            name, value, at = _attribute(data, at)
            found[name] = value
        return found

    def _names(self, folder: Inode, path: bytes) -> Iterator[tuple[bytes, int]]:
        """Names in a folder and the numbers of their inodes, without ``.`` and ``..``."""
        if folder.layout not in {PLAIN, INLINE} or folder.size > DIRECTORY_MAX:
            raise RefusedError(f"the folder {_shown(path)} has a form that vhpc does not know")
        seen = set()
        for position in range(0, folder.size, self._block):
            for name, number in _entries(self._block_of(folder, position), path):
                if name in {b".", b".."}:
                    continue
                if name in seen:
                    raise RefusedError(f"the folder {_shown(path)} has two files of one name")
                seen.add(name)
                yield name, number

    def _block_of(self, folder: Inode, position: int) -> bytes:
        length = min(self._block, folder.size - position)
        is_tail = folder.layout == INLINE and position // self._block == folder.size // self._block
        place = folder.tail if is_tail else folder.start * self._block + position
        return self._read(place, length, f"the folder of inode {folder.number}")

    def _read(self, offset: int, size: int, what: str) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
        except (OSError, OverflowError) as err:
            raise RefusedError(f"{what} cannot be read: {err}") from err
        if len(data) != size:
            raise RefusedError(f"{what} is beyond the end of the file system")
        return data


def _entries(block: bytes, path: bytes) -> Iterator[tuple[bytes, int]]:
    """Names and numbers of inodes in a block of a folder."""
    first = int.from_bytes(block[8:10], "little")
    if first < 12 or first % 12 or first > len(block):
        raise RefusedError(f"the folder {_shown(path)} is damaged")
    heads = [struct.unpack_from("<QH", block, at) for at in range(0, first, 12)]
    ends = [start for _, start in heads[1:]] + [len(block)]
    for (number, start), end in zip(heads, ends, strict=True):
        name = block[start:end].rstrip(b"\0") if end == len(block) else block[start:end]
        if not first <= start < end or not 0 < len(name) <= NAME_MAX or b"/" in name or b"\0" in name:
            raise RefusedError(f"the folder {_shown(path)} has a name that is not valid")
        yield name, number


def _attribute(data: bytes, at: int) -> tuple[str, str, int]:
    """Name and sha256 of the value of an attribute, and where the next one begins."""
    length, prefix, size = struct.unpack_from("<BBH", data, at)
    name, value = data[at + 4 : at + 4 + length], data[at + 4 + length : at + 4 + length + size]
    if len(name) != length or len(value) != size:
        raise RefusedError("an extended attribute is damaged")
    text = XATTR_PREFIXES.get(prefix, f"prefix {prefix}: ") + name.decode("utf-8", "backslashreplace")
    return text, hashlib.sha256(value).hexdigest(), (at + 4 + length + size + 3) & ~3


def _shown(path: bytes) -> str:
    return "/" + path.decode("utf-8", "backslashreplace")[:200]
