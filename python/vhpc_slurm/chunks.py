# SPDX-License-Identifier: Apache-2.0
"""The chunk list of a root: the SHA-256 of each of its chunks, one after the other, as 32 bytes each.

The manifest has the digest of the list, so a node can check a chunk before it has the whole root,
and pass it on to other nodes. The list is a blob of the catalogue, named by its sha256.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SIZE = 4 << 20
"""Bytes of a chunk: large enough that a list is small (8 KiB for each GiB of a root), small enough that a
chunk takes milliseconds on a fast network and a node can hold one in memory."""
HASH = 32
LIST_MAX = 32 << 20
"""Bytes of the longest list: a node holds it in memory. Larger roots, and those of one chunk, have none."""
READ = 1 << 20


def count(size: int, chunk_size: int) -> int:
    """How many chunks so many bytes have; the last one may be shorter."""
    return -(-size // chunk_size)


def list_size(size: int, chunk_size: int) -> int:
    """Bytes of the chunk list of a blob of ``size`` bytes."""
    return count(size, chunk_size) * HASH


class ChunkList:
    """Computes a chunk list from the bytes of a blob, which come in pieces of any size."""

    def __init__(self, chunk_size: int = SIZE) -> None:
        """``chunk_size`` in bytes."""
        self._size = chunk_size
        self._left = chunk_size
        self._chunk = hashlib.sha256()
        self._done = bytearray()

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the blob."""
        view = memoryview(data)
        while view:
            part, view = view[: self._left], view[self._left :]
            self._chunk.update(part)
            self._left -= len(part)
            if self._left == 0:
                self._close()

    def raw(self) -> bytes:
        """The bytes of the list; the blob has ended."""
        if self._left < self._size:
            self._close()
        return bytes(self._done)

    def _close(self) -> None:
        self._done += self._chunk.digest()
        self._chunk, self._left = hashlib.sha256(), self._size


def of_file(path: Path, chunk_size: int = SIZE) -> bytes:
    """The chunk list of a file; OSError if it cannot be read."""
    found = ChunkList(chunk_size)
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ):
            found.update(data)
    return found.raw()


def key(raw: bytes) -> dict[str, object] | None:
    """The key ``chunks`` of a manifest for a list that was made with ``SIZE``; None if it is of no use."""
    if not HASH < len(raw) <= LIST_MAX:
        return None
    return {"sha256": hashlib.sha256(raw).hexdigest(), "size": SIZE}
