# SPDX-License-Identifier: Apache-2.0
"""Digests that a thread computes in parallel to the caller's work; hashlib does not hold Python's lock."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vhpc_slurm.importing.tree import RefusedError

CHUNK = 1 << 20
READ_AHEAD = 1 << 22
"""Bytes that a thread hashes before it needs Python's lock again."""
SAME = ("st_size", "st_mtime_ns", "st_ctime_ns")
"""Attributes that change when a file is changed."""


class Hasher:
    """The sha256 of pieces; at most one piece waits."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def update(self, data: bytes) -> None:
        """Add a piece, which must not change afterwards."""
        if self._last is not None:
            self._last.result()
        self._last = self._thread.submit(self._digest.update, data)

    def digest(self) -> str:
        """``sha256:HEX`` of all pieces; the end of the thread."""
        self._thread.shutdown()
        return f"sha256:{self._digest.hexdigest()}"


class FileHash:
    """The sha256 of a file that the caller reads in the meantime."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._about = os.fstat(self._file.fileno())
        self._thread = ThreadPoolExecutor(1)
        self._found = self._thread.submit(self._read)

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._about.st_size

    def _read(self) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_AHEAD))
        left = self.size
        while left and (got := self._file.readinto(buffer[: min(left, READ_AHEAD)])):
            digest.update(buffer[:got])
            left -= got
        return f"sha256:{digest.hexdigest()}"

    def digest(self) -> str:
        """``sha256:HEX``, after all other reads of the file.

        Raises:
            RefusedError: the file has changed since it was opened, so that others may have read other bytes.
        """
        with self._file, self._thread:
            found = self._found.result()
            now = os.fstat(self._file.fileno())
        if any(getattr(now, what) != getattr(self._about, what) for what in SAME):
            raise RefusedError("it changed while it was read")
        return found
