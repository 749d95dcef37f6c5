# SPDX-License-Identifier: Apache-2.0
"""Sealed files: written and read in chunks, while others are sealed, and without the page cache if possible.

A saved guest is as large as its memory: through the page cache it would displace the data of
other jobs, and the hash of one chunk can be computed while the next one is on its way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from vhpc_slurm.model import Seal
from vhpc_slurm.node.checkpoint import folder
from vhpc_slurm.node.checkpoint.folder import Folder
from vhpc_slurm.node.checkpoint.seal import CHUNK, TAG_BYTES, BrokenSealError, Sealer, SealKey, verified

ALIGNED = 4096
"""Direct I/O takes multiples of this, at such offsets, from buffers at such addresses (open(2))."""
AHEAD = 4
"""Chunks in flight: they are hashed and written while others are filled."""


class SealedWriter:
    """Writes one file of a checkpoint with its tags.

    Use as a context manager: on an exception the file and its tags are removed.

    Raises:
        OSError: of any method; the file cannot be written.
    """

    def __init__(self, place: Folder, key: SealKey) -> None:
        self._folder, self._name = place, key.file
        self._sealer = Sealer(key)
        self._fd = place.create(key.file)
        self._direct = _set_direct(self._fd, on=True)
        self._sealing = ThreadPoolExecutor(1, "hash")
        self._encrypted = key.encrypted
        self._writing = ThreadPoolExecutor(1, "write")
        self._free = [mmap.mmap(-1, CHUNK) for _ in range(AHEAD)]
        self._busy: list[tuple[mmap.mmap, Future[None], Future[None]]] = []
        self._buffer, self._filled, self._size = self._free.pop(), 0, 0
        self._first = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sealing.shutdown()
        self._writing.shutdown()
        os.close(self._fd)
        if kind is not None:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name)
                self._folder.remove(self._name + folder.TAGS)

    def room(self) -> memoryview:
        """Where the next bytes go; ``filled`` says how many there are."""
        return memoryview(self._buffer)[self._filled :]

    def filled(self, count: int) -> None:
        """So many bytes were put into ``room()``."""
        self._filled += count
        if self._filled == CHUNK:
            self._pass_on()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        left = memoryview(data)
        while left:
            with self.room() as room:
                count = min(len(room), len(left))
                room[:count] = left[:count]
            self.filled(count)
            left = left[count:]

    def finish(self, head: bytes = b"") -> Seal:
        """Write the rest and the tags; the file is on storage on return.

        Args:
            head: replaces as many first bytes of the file.

        Raises:
            ValueError: the file is shorter than ``head``.
        """
        if self._filled:
            self._pass_on()
        while self._busy:
            self._collect()
        if head:
            self._replace_head(head)
        os.fsync(self._fd)
        folder.write_tags(self._folder, self._name, self._sealer.tags)
        self._folder.sync()
        return self._sealer.seal()

    def _pass_on(self) -> None:
        """Have the filled buffer hashed and written, and take another one."""
        buffer, length, at = self._buffer, self._filled, self._size
        if at == 0:
            self._first = buffer[:length]
        self._size, self._filled = at + length, 0
        sealed = self._sealing.submit(self._seal, buffer, length)
        written = self._writing.submit(self._write_sealed, sealed, buffer, length, at)
        self._busy.append((buffer, sealed, written))
        while not self._free:
            self._collect()
        self._buffer = self._free.pop()

    def _collect(self) -> None:
        """Wait for the oldest buffer in flight."""
        buffer, sealed, written = self._busy.pop(0)
        sealed.result()
        written.result()
        self._free.append(buffer)

    def _seal(self, buffer: mmap.mmap, length: int) -> None:
        """Make the tag of a buffer, and encrypt it in place."""
        with memoryview(buffer) as whole, whole[:length] as chunk:
            written = self._sealer.add(chunk)
            if self._encrypted:
                chunk[:] = written

    def _write_sealed(self, sealed: Future[None], buffer: mmap.mmap, length: int, at: int) -> None:
        """Write a buffer; only when it is encrypted, if it is to be."""
        if self._encrypted:
            sealed.result()
        self._write(buffer, length, at)

    def _write(self, buffer: mmap.mmap, length: int, at: int) -> None:
        if self._direct and length % ALIGNED:
            self._direct = _set_direct(self._fd, on=False)
        done = 0
        while done < length:
            if done and self._direct:  # a part was written: the rest may not be aligned
                self._direct = _set_direct(self._fd, on=False)
            with memoryview(buffer) as whole, whole[done:length] as rest:
                try:
                    done += os.pwrite(self._fd, rest, at + done)
                except OSError as err:
                    if err.errno != errno.EINVAL or not self._direct:
                        raise
                    self._direct = _set_direct(self._fd, on=False)

    def _replace_head(self, head: bytes) -> None:
        if len(head) > len(self._first):
            raise ValueError(f"a head of {len(head)} bytes for a file of {self._size}")
        self._first = head + self._first[len(head) :]
        self._buffer[: len(self._first)] = bytes(self._sealer.replace_first(self._first))
        self._write(self._buffer, len(self._first), 0)


class SealedReader:
    """Reads one file of a checkpoint; every chunk is proven before it is given away.

    Use as a context manager.

    Raises:
        UserError: the file or its tags are not there.
        BrokenSealError: the tags are others.
    """

    def __init__(self, place: Folder, key: SealKey, seal: Seal) -> None:
        self._key, self._seal = key, seal
        self._tags = folder.read_tags(place, key.file, -(-seal.size // CHUNK) * TAG_BYTES)
        self._fd = place.open(key.file)
        self._direct = _set_direct(self._fd, on=True)
        self._reading = ThreadPoolExecutor(1, "read")
        self._buffers = (mmap.mmap(-1, CHUNK), mmap.mmap(-1, CHUNK))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.shutdown()
        os.close(self._fd)

    def chunks(self) -> Iterator[bytes]:
        """All chunks from the beginning of the file; may be called again when the last call has ended.

        Raises:
            BrokenSealError: a chunk is another one, or the file is shorter or longer, or cannot be read.
        """
        pieces = self._pieces()
        left = b""

        def read(most: int) -> bytes:
            nonlocal left
            if not left:
                left = next(pieces, b"")
            given, left = left[:most], left[most:]
            return given

        try:
            yield from verified(read, self._tags, self._seal, self._key)
        except OSError as err:
            raise BrokenSealError(self._key, f"it cannot be read: {err.strerror or err}") from err

    def _pieces(self) -> Iterator[bytes]:
        """The file in pieces of a chunk; the next one is read meanwhile."""
        at, turn = 0, 0
        coming = self._reading.submit(self._read, self._buffers[turn], at)
        while count := coming.result():
            buffer, at, turn = self._buffers[turn], at + count, 1 - turn
            coming = self._reading.submit(self._read, self._buffers[turn], at)
            yield buffer[:count]

    def _read(self, buffer: mmap.mmap, at: int) -> int:
        if self._direct and at % ALIGNED:
            self._direct = _set_direct(self._fd, on=False)
        try:
            return os.preadv(self._fd, [buffer], at)
        except OSError as err:
            if err.errno != errno.EINVAL or not self._direct:
                raise
        self._direct = _set_direct(self._fd, on=False)
        return os.preadv(self._fd, [buffer], at)


def _set_direct(fd: int, *, on: bool) -> bool:
    """Switch direct I/O of an open file; whether it is on then.

    A file system without it refuses the flag, or the first read or write.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return on
