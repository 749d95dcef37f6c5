# SPDX-License-Identifier: Apache-2.0
"""Changes of others to a file of OpenSM."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Make something else and give it that name in one step: vhpcd never sees the name absent."""
    beside = path.with_name("beside")
    make(beside)
    beside.rename(path)


def folder(path: Path) -> None:
    beside = path.with_name("beside")
    beside.mkdir()
    (beside / "something").touch()
    exchange(beside, path)  # rename(2) puts no folder in place of a file
    beside.unlink()


def exchange(one: Path, other: Path) -> None:
    """Each gets the name of the other, in one step."""
    at_cwd, rename_exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: renameat2(2)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def link_to_nothing(path: Path) -> None:
    replaced(path, lambda beside: beside.symlink_to("/dev/null"))


def pipe(path: Path) -> None:
    replaced(path, os.mkfifo)


def named_socket(path: Path) -> None:
    replaced(path, bind)


def bind(path: Path) -> None:
    # The name of a socket has 107 bytes at most.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


def endless(path: Path) -> None:
    def make(beside: Path) -> None:
        with beside.open("wb") as opened:
            opened.truncate(1 << 40)

    replaced(path, make)


def comments(path: Path) -> None:
    path.write_bytes(b"# nothing to see here\n" * 1_000_000)


KINDS = (folder, link_to_nothing, pipe, named_socket, endless, comments)
