# SPDX-License-Identifier: Apache-2.0
"""The file in which a copy of a blob is made.

Only whole chunks are appended, so every prefix of the file that ends with a chunk may be served to
other nodes, and its size says how far the copy is. Each byte goes into the digest of the whole, which
decides at the end; a thread computes it while the chunk is written. Chunks of other nodes are compared
with the chunk list before they are appended: no node passes on bytes of a bad node. For those of the
catalogue that would be a second pass, and is made up for only if the whole is wrong. A copy that was
interrupted continues from there: nothing but the file itself says what it has, and its bytes are verified
again. So it does not matter at which byte a process was killed, or what a power cut left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from vhpc_slurm import chunks, files
from vhpc_slurm.beside import Beside
from vhpc_slurm.model import Blob

PLAIN = 1 << 20
"""Bytes that are written at once of a blob without a chunk list."""


class WrongChunkError(Exception):
    """Bytes that came are not those of the blob's chunk list; the text is one line."""


class Part:
    """The copy of a blob; its user holds the lock of the blob.

    Attributes:
        size: bytes in the file.
        resumed: how many of them an earlier copy left, or ``share`` took over.
        shared: whether ``share`` took them over.
    """

    def __init__(self, path: Path, blob: Blob, hashes: bytes = b"") -> None:
        """Open or create the file; OSError if that is impossible.

        Args:
            path: of the file.
            blob: what it will be.
            hashes: the bytes of its chunk list, verified; empty: it has none.
        """
        self.path, self._blob, self._hashes = path, blob, hashes
        self._unit = blob.chunk_size if hashes else PLAIN
        # Filled in turns: fresh memory for each chunk costs as much as its digest. One is hashed and written
        # while the other one is filled.
        self._buffer, self._hashed = (memoryview(bytearray(min(self._unit, blob.size))) for _ in range(2))
        self._reserved = False
        self._open()

    def _open(self) -> None:
        self.size, self.resumed, self.shared = 0, 0, False
        self._digest = hashlib.sha256()
        self._hashing = Beside(self._digest.update)
        self._waiting = 0  # bytes in the buffer
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(self.path, flags, 0o644)
        about = os.fstat(self._fd)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            os.close(self._fd)
            raise FileExistsError(17, "it is not a file of the image store", str(self.path))
        os.fchmod(self._fd, 0o644)

    def __enter__(self) -> Part:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, which stays for the next copy, unless it is empty or the disk has failed."""
        self._hashing.close()
        if error is not None and self._reserved:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)  # gives back what is reserved beyond
        os.close(self._fd)
        if isinstance(error, OSError) or (error is not None and self.size == 0):
            self.path.unlink(missing_ok=True)

    def resume(self) -> Iterator[None]:
        """Take over what an earlier copy left, as far as it is right; yields after each chunk."""
        there = os.fstat(self._fd).st_size
        while self.size < min(there, self._blob.size):
            data = os.pread(self._fd, min(self._unit, self._blob.size - self.size), self.size)
            if not data or (self._hashes and not self._is_right(data, self.size)):
                break
            self._hashing.put(data)
            self.size += len(data)
            yield
        self.resumed = self.size
        if there > self.size:
            os.ftruncate(self._fd, self.size)
            self._reserve_again()

    def allocated(self) -> int:
        """Bytes that the file has on its file system, also those that are only reserved."""
        return os.fstat(self._fd).st_blocks * 512

    def reserve(self) -> None:
        """Reserve the space of the whole blob, if the file system can; OSError if there is too little."""
        self._reserved = True
        files.reserve(self._fd, self._blob.size)

    def share(self, source: int) -> None:
        """Share the blocks of another file, if the file system can; ``resume`` verifies them."""
        if os.fstat(self._fd).st_size == 0:
            self.shared = files.share_blocks(source, self._fd)

    def _reserve_again(self) -> None:
        if self._reserved:
            self.reserve()

    @property
    def wanted(self) -> int:
        """How many bytes are missing, apart from those that wait for the rest of their chunk."""
        return self._blob.size - self.size - self._waiting

    @property
    def next_byte(self) -> int:
        """Number of the first byte that is wanted from a new source."""
        return self.size

    def forget(self) -> None:
        """Forget the beginning of a chunk whose rest does not come."""
        self._waiting = 0

    def add(self, data: bytes, *, checked: bool) -> None:
        """Add the next bytes.

        Args:
            data: the bytes.
            checked: compare each chunk with the list, if there is one, before it is written.

        Raises:
            WrongChunkError: they complete a chunk that is not the blob's; the chunk is forgotten.
            OSError: they cannot be written.
        """
        rest = memoryview(data)
        while rest:
            length = min(self._unit, self._blob.size - self.size)
            taken, rest = rest[: length - self._waiting], rest[length - self._waiting :]
            self._buffer[self._waiting : self._waiting + len(taken)] = taken
            self._waiting += len(taken)
            if self._waiting < length:
                return
            chunk, self._waiting = self._buffer[:length], 0
            if checked and self._hashes and not self._is_right(chunk, self.size):
                raise WrongChunkError(f"wrong bytes in chunk {self.size // self._unit}")
            self._write(chunk)

    def compare(self) -> Iterator[None]:
        """Look for the chunk that makes the whole wrong; yields after each chunk.

        Raises:
            WrongChunkError: the first chunk in the file that is not that of the list.
            OSError: the file cannot be read.
        """
        for at in range(0, self.size, self._unit) if self._hashes else ():
            if not self._is_right(os.pread(self._fd, min(self._unit, self.size - at), at), at):
                raise WrongChunkError(f"wrong bytes in chunk {at // self._unit}")
            yield

    def found(self) -> str:
        """The sha256 of the bytes that are in the file, also of an incomplete chunk."""
        self._hashing.wait()
        digest = self._digest.copy()
        digest.update(self._buffer[: self._waiting])
        return digest.hexdigest()

    def restart(self) -> None:
        """Begin again with nothing, in a new file: the old one must not count as right."""
        self._hashing.close()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)
        self._open()
        self._reserve_again()

    def finish(self, final: Path) -> None:
        """Give the file its name, durably; the caller has compared the digest."""
        os.fsync(self._fd)
        self.path.rename(final)

    def _is_right(self, chunk: bytes | memoryview, start: int) -> bool:
        """Whether the chunk that starts at a byte is that of the list."""
        at = start // self._unit * chunks.HASH
        return hashlib.sha256(chunk).digest() == self._hashes[at : at + chunks.HASH]

    def _write(self, chunk: memoryview) -> None:
        self._hashing.put(chunk)
        self._buffer, self._hashed = self._hashed, self._buffer
        view, at = chunk, self.size
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written
        files.start_writing(self._fd, self.size, len(chunk))
        self.size += len(chunk)
