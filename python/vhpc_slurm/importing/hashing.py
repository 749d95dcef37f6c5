# SPDX-License-Identifier: Apache-2.0
"""The digest of a file that a thread computes while the caller reads it."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vhpc_slurm.importing.tree import RefusedError

CHUNK = 1 << 20
READ_AHEAD = 1 << 22
"""Bytes that a thread hashes before it needs Python's lock again."""
SAME = ("st_size", "st_mtime_ns", "st_ctime_ns")
"""Attributes that change when a file is changed."""


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
