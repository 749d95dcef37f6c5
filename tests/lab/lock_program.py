#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program that takes locks on a file, and another one that tries to, on another host.

Two tasks of a step run it, `locks.py FOLDER`: task 0 does what task 1 asks for, by files of the
folder.  Task 1 prints what it finds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

FOLDER = Path(sys.argv[1])
FILE = FOLDER / "f"
LIMIT_S = 120.0
OFD_SETLK, OFD_SETLKW = 37, 38


def wait_for(name: str) -> None:
    """Wait for a file of the other task."""
    end = time.monotonic() + LIMIT_S
    while not (FOLDER / name).exists():
        if time.monotonic() > end:
            sys.exit(f"no {name} after {LIMIT_S} s")
        time.sleep(0.05)


def ofd(fd: int, kind: int, start: int, length: int, command: int = OFD_SETLK) -> None:
    """A lock of the open file, which Python has no function for."""
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))


def opened(flags: int = os.O_RDWR) -> int:
    return os.open(FILE, flags)


def in_a_child(take: Callable[[int], None]) -> None:
    """A process takes a lock and is killed."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        take(opened())
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def inherited(fd: int) -> None:
    """A flock of a process that has ended; this one has the same open file."""
    child = os.fork()
    if child == 0:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(child, 0)


def two_then_one(fd: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_EX, 100)
    fcntl.lockf(fd, fcntl.LOCK_UN, 20, 40)


def closed_another(fd: int) -> None:
    """POSIX: to close any descriptor of the file gives up all locks of fcntl."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    os.close(opened())


def weaker(fd: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_EX)
    fcntl.lockf(fd, fcntl.LOCK_SH)


HOLD: dict[str, Callable[[int], None]] = {
    "exclusive": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX),
    "shared": lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH),
    "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX),
    "flock-shared": lambda fd: fcntl.flock(fd, fcntl.LOCK_SH),
    "flock-inherited": inherited,
    "ofd": lambda fd: ofd(fd, fcntl.F_WRLCK, 10, 10),
    "range": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX, 10, 10),
    "from-the-end": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0, os.SEEK_END),
    "part-given-up": two_then_one,
    "weaker": weaker,
    "closed": closed_another,
    "killed": lambda fd: in_a_child(lambda own: fcntl.lockf(own, fcntl.LOCK_EX)),
    "killed-flock": lambda fd: in_a_child(lambda own: fcntl.flock(own, fcntl.LOCK_EX)),
}


def hold() -> None:
    """Task 0: has one lock after the other."""
    for name, take in HOLD.items():
        fd = opened()
        take(fd)
        (FOLDER / f"{name}.held").touch()
        wait_for(f"{name}.tried")
        os.close(fd)
    # the lock that task 1 waits for
    fd = opened()
    fcntl.lockf(fd, fcntl.LOCK_EX)
    fcntl.flock(fd, fcntl.LOCK_EX)
    (FOLDER / "waits.held").touch()
    wait_for("waits.tried")
    time.sleep(1)
    os.write(fd, b"changed")
    os.close(fd)


def outcome(take: Callable[[], object]) -> str:
    try:
        take()
    except OSError as err:
        return errno.errorcode[err.errno or 0]
    return "yes"


def tried() -> dict[str, str]:
    """Which locks this task gets."""
    found = {}
    for name, take in {
        "read": lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
        "write": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "0-9": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0),
        "15": lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 15),
        "50": lambda fd: ofd(fd, fcntl.F_WRLCK, 50, 1),
        "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "flock-shared": lambda fd: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
    }.items():
        fd = opened()
        found[name] = outcome(partial(take, fd))
        os.close(fd)
    fd = opened()
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, start, length, _ = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    found["in the way"] = "nothing" if kind == fcntl.F_UNLCK else f"{kind} {start} {length}"
    os.close(fd)
    return found


def until_given_up(name: str) -> dict[str, str]:
    """A lock that its holder has lost is free after a moment, maybe between two attempts of a round."""
    end = time.monotonic() + 10
    while "EAGAIN" in (found := tried()).values():
        if not name.startswith(("killed", "closed")) or time.monotonic() > end:
            break
        time.sleep(0.1)
    return found


def interrupted(take: Callable[[int], None]) -> str:
    """A wait that a signal ends, as programs with alarm() have it."""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(1)
    fd = opened()
    try:
        take(fd)
    except TimeoutError:
        return "interrupted"
    finally:
        signal.alarm(0)
        os.close(fd)
    return "got it"


def find() -> None:
    """Task 1: says what it gets."""
    for name in HOLD:
        wait_for(f"{name}.held")
        print(name, until_given_up(name), flush=True)
        (FOLDER / f"{name}.tried").touch()
    wait_for("waits.held")
    print("fcntl with alarm:", interrupted(lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX)))
    print("flock with alarm:", interrupted(lambda fd: fcntl.flock(fd, fcntl.LOCK_EX)))
    fd = opened()
    before = os.read(fd, 100)
    (FOLDER / "waits.tried").touch()
    begin = time.monotonic()
    fcntl.lockf(fd, fcntl.LOCK_EX)
    waited = time.monotonic() - begin >= 0.5
    fcntl.flock(fd, fcntl.LOCK_EX)
    print("waited:", waited, before, os.pread(fd, 100, 0))
    read_only = opened(os.O_RDONLY)
    print("read-only:", outcome(lambda: ofd(read_only, fcntl.F_WRLCK, 0, 0)))
    (FOLDER / "removed").touch()
    removed = os.open(FOLDER / "removed", os.O_RDWR)
    (FOLDER / "removed").unlink()
    print("removed:", outcome(lambda: fcntl.lockf(removed, fcntl.LOCK_EX)))
    folder = os.open(FOLDER, os.O_RDONLY)
    print("folder:", outcome(lambda: fcntl.flock(folder, fcntl.LOCK_EX)))


if __name__ == "__main__":
    hold() if os.environ["SLURM_PROCID"] == "0" else find()
