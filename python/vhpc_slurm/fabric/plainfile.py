# SPDX-License-Identifier: Apache-2.0
"""Reads files that may have been replaced by something else: a folder, a pipe, a device, an endless file.

The type is checked before the file is opened for reading (``O_PATH``, open(2)), so
that the call never waits for a writer and no device driver sees an open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from vhpc_slurm.errors import FabricError

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotPlainError(FabricError):
    """The path exists and is not a regular file, or is larger than the limit."""


def open_plain(path: Path) -> int:
    """A descriptor for reading a regular file; the caller closes it.

    Raises:
        FileNotFoundError: the path does not exist.
        NotPlainError: it is not a regular file.
        OSError: it cannot be opened.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS if test(mode)), "no file")
            raise NotPlainError(f"cannot read {path}", f"it is {kind}, not a regular file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)


def read_file(path: Path, limit: int) -> bytes | None:
    """All bytes of a regular file; None when the path does not exist.

    Raises:
        NotPlainError: it is not a regular file, or has more than ``limit`` bytes.
        FabricError: it cannot be read.
    """
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise FabricError(f"cannot read {path}", err.strerror or str(err)) from err
    with os.fdopen(descriptor, "rb") as opened:
        try:
            data = opened.read(limit + 1)
        except OSError as err:
            raise FabricError(f"cannot read {path}", err.strerror or str(err)) from err
    if len(data) > limit:
        raise NotPlainError(f"cannot read {path}", f"it has more than {limit} bytes")
    return data
