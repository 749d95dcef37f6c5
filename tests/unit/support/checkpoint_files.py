# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints, keys, and file systems that fail."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vhpc_slurm.model import Generation, Resume
from vhpc_slurm.node.checkpoint.seal import SealKey

KEY = SealKey(bytes(range(32)), 7, "0.state")
DISK_KEY = replace(KEY, file="0.disk")
RESUME = Resume(7, "a", Generation(42, 0, "0123abcd"), (), KEY.key)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    gc.collect()  # what an earlier test has dropped is not closed in this one
    before = len(names(Path("/proc/self/fd")))
    yield
    until = time.monotonic() + 5
    workers = {"hash", "write", "read", "feed", "receive"}
    while any(one.name.partition("_")[0] in workers for one in threading.enumerate()):
        assert time.monotonic() < until, threading.enumerate()
        time.sleep(0.01)
    assert len(names(Path("/proc/self/fd"))) == before
    assert not [path for path in tmp_path.iterdir() if path.is_fifo()]


def names(path: Path) -> list[str]:
    return [one.name for one in path.iterdir()]


def full_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The file system is full after so many writes."""
    real, left = os.pwrite, [count]

    def pwrite(fd: int, data: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)


def changed(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)
