# SPDX-License-Identifier: Apache-2.0
"""A tree of attributes as a real file system, so that a write has its effect and its error at once.

Code under test opens, reads and writes paths as it would below ``/sys``, in
this process or in any other one, and what an attribute's ``store`` raises is
what ``write(2)`` returns, before it returns.  A tree of plain files under a
watcher could only tell later, and an interface of our own in place of the
system calls would be tested instead of them.

It speaks the FUSE protocol to ``/dev/fuse`` (include/uapi/linux/fuse.h, version
7.31).  As in sysfs, nothing is cached, a read begins with a fresh ``show``, and
files cannot be made (EACCES).  A writer whose ``store`` raises ``Stuck`` waits as in an
uninterruptible sleep, deaf to SIGKILL, until ``let_go``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pytest

LOOKUP, FORGET, GETATTR, SETATTR, READLINK, OPEN, READ, WRITE = 1, 2, 3, 4, 5, 14, 15, 16
MKNOD, CREATE = 8, 35
STATFS, RELEASE, INIT, OPENDIR, READDIR, RELEASEDIR = 17, 18, 26, 27, 28, 29
ACCESS, INTERRUPT, BATCH_FORGET = 34, 36, 42
DIRECT_IO = 1
NO_FLUSH = 1 << 5
SILENT = frozenset((FORGET, BATCH_FORGET, INTERRUPT))
DETACH = 2


class Stuck(Exception):  # noqa: N818 - an event
    """Raised by a ``store`` that does not come to an end."""


@dataclass(eq=False)
class Attribute:
    """A file: what it shows, and what a write does; without ``store`` even root's is EACCES."""

    show: Callable[[], bytes | str] = lambda: ""
    store: Callable[[str], None] | None = None


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Folder:
    """A folder; its entries may come and go."""

    entries: MutableMapping[str, Node] = field(default_factory=dict)

    def folder(self, path: str) -> Folder:
        """The folder at a path below; made when absent."""
        at = self
        for part in filter(None, path.split("/")):
            below = at.entries.setdefault(part, Folder())
            assert isinstance(below, Folder), path
            at = below
        return at

    def put(self, path: str, node: Node) -> None:
        """Put something at a path below."""
        parent, _, name = path.rpartition("/")
        self.folder(parent).entries[name] = node

    def drop(self, path: str) -> None:
        """Remove what is at a path below."""
        parent, _, name = path.rpartition("/")
        del self.folder(parent).entries[name]


Node = Attribute | Link | Folder


def load(root: Path) -> Folder:
    """A folder of the disk as a tree: its files as attributes that cannot be written."""
    tree = Folder()
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            tree.entries[path.name] = Link(str(path.readlink()))
        elif path.is_dir():
            tree.entries[path.name] = load(path)
        else:
            tree.entries[path.name] = fixed(path.read_bytes())
    return tree


def fixed(content: bytes | str) -> Attribute:
    """An attribute that shows always the same."""
    return Attribute(lambda: content)


class AttributeFs:
    """A mounted tree; a context manager."""

    def __init__(self, where: Path, tree: Folder) -> None:
        self.where, self.tree = where, tree
        self._nodes: dict[int, Node] = {1: tree}
        self._ids: dict[Node, int] = {tree: 1}
        self._shown: dict[int, bytes] = {}
        self._handles = 0
        self._stuck: list[int] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._mistake: Exception | None = None

    def __enter__(self) -> AttributeFs:
        self.where.mkdir(exist_ok=True)
        try:
            self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0"
            if self._libc.mount(b"vhpc-test", os.fsencode(self.where), b"fuse", 0, options.encode()):
                raise OSError(ctypes.get_errno(), "mount")
        except OSError as err:
            pytest.skip(f"no FUSE here ({err}): run as root, and modprobe fuse")
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.let_go()
        self._libc.umount2(os.fsencode(self.where), DETACH)
        os.eventfd_write(self._over, 1)  # who still has a file open keeps the file system
        self._thread.join()
        os.close(self._over)
        os.close(self._fd)
        if self._mistake is not None and kind is None:
            raise self._mistake

    def let_go(self, number: int = errno.EIO) -> None:
        """End the waiting of every writer that is stuck, with this error."""
        while self._stuck:
            self._answer(self._stuck.pop(), -number)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._over, select.POLLIN)
        while True:
            if self._over in dict(poll.poll()):
                return
            try:
                request = os.read(self._fd, 1 << 18)
            except OSError as err:
                if err.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, nodeid = struct.unpack_from("<IIQQ", request)
            if opcode in SILENT:
                continue
            try:
                self._answer(unique, 0, self._handle(opcode, nodeid, request[40:]))
            except Stuck:
                self._stuck.append(unique)
            except OSError as err:
                self._answer(unique, -(err.errno or errno.EIO))
            except Exception as err:  # a mistake of the tree: its test fails at the end
                self._answer(unique, -errno.EIO)
                self._mistake = self._mistake or err

    def _answer(self, unique: int, error: int, body: bytes = b"") -> None:
        body = b"" if error else body
        with contextlib.suppress(OSError):  # the asker may be gone
            os.write(self._fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    def _handle(self, opcode: int, nodeid: int, body: bytes) -> bytes:  # noqa: PLR0911 - one for each request
        if opcode == INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, 1 << 16, 1, 0, 0, 0)
        node = self._nodes[nodeid]
        if opcode == LOOKUP:
            child = node.entries.get(os.fsdecode(body.rstrip(b"\0"))) if isinstance(node, Folder) else None
            if child is None:
                raise OSError(errno.ENOENT, "")
            return struct.pack("<QQQQII", self._id(child), 0, 0, 0, 0, 0) + self._stat(child)
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", 0, 0, 0) + self._stat(node)
        if opcode in (MKNOD, CREATE):
            raise OSError(errno.EACCES, "")
        if opcode == READLINK:
            assert isinstance(node, Link)
            return os.fsencode(node.target)
        if opcode in (OPEN, OPENDIR):
            return self._open(node, struct.unpack_from("<I", body)[0])
        if opcode in (READ, READDIR):
            handle, offset, size = struct.unpack_from("<QQI", body)
            return (
                self._shown[handle][offset : offset + size]
                if opcode == READ
                else self._list(node, offset, size)
            )
        if opcode == WRITE:
            size = struct.unpack_from("<I", body, 16)[0]
            assert isinstance(node, Attribute)
            assert node.store is not None
            node.store(body[40 : 40 + size].decode())
            return struct.pack("<II", size, 0)
        if opcode in (RELEASE, RELEASEDIR):
            self._shown.pop(struct.unpack_from("<Q", body)[0], None)
        elif opcode == STATFS:
            return bytes(80)
        elif opcode != ACCESS:
            raise OSError(errno.ENOSYS, "")
        return b""

    def _open(self, node: Node, flags: int) -> bytes:
        self._handles += 1
        if isinstance(node, Attribute):
            if flags & os.O_ACCMODE != os.O_RDONLY and node.store is None:
                raise OSError(errno.EACCES, "")
            shown = node.show() if flags & os.O_ACCMODE != os.O_WRONLY else b""
            self._shown[self._handles] = shown.encode() if isinstance(shown, str) else shown
        # A thread that starts a program holds the interpreter until the child has closed what it inherited:
        # files that other threads have open here must close without a question to us.
        return struct.pack("<QII", self._handles, DIRECT_IO | NO_FLUSH, 0)

    def _list(self, node: Node, offset: int, size: int) -> bytes:
        assert isinstance(node, Folder)
        out = b""
        for place, (name, child) in enumerate(list(node.entries.items())[offset:], offset + 1):
            raw = os.fsencode(name)
            record = struct.pack("<QQII", self._id(child), place, len(raw), self._mode(child) >> 12) + raw
            record += bytes(-len(record) % 8)
            if len(out) + len(record) > size:
                break
            out += record
        return out

    def _id(self, node: Node) -> int:
        if node not in self._ids:
            self._ids[node] = len(self._ids) + 1
            self._nodes[self._ids[node]] = node
        return self._ids[node]

    @staticmethod
    def _mode(node: Node) -> int:
        if isinstance(node, Folder):
            return stat.S_IFDIR | 0o755
        return stat.S_IFLNK | 0o777 if isinstance(node, Link) else stat.S_IFREG | 0o644

    def _stat(self, node: Node) -> bytes:
        # sysfs gives every attribute the size of a page
        return struct.pack(
            "<QQQ24x12xIIIIIII", self._id(node), 4096, 0, self._mode(node), 1, 0, 0, 0, 4096, 0
        )


@contextlib.contextmanager
def mounted(where: Path, tree: Folder) -> Iterator[AttributeFs]:
    """The tree, mounted."""
    with AttributeFs(where, tree) as fs:
        yield fs
