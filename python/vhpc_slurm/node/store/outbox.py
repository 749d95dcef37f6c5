# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements that wait on disk until vhpcd has received them.

A network identity is free only when every node has acknowledged, so an
acknowledgement may be late, but never lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, NodeUsage, Timeline
from vhpc_slurm.record import Record
from vhpc_slurm.undecodable import UNDECODABLE

log = logging.getLogger("vhpc")

LOCK_S = 10.0
"""Longest wait for another hook that queues or removes an acknowledgement, in seconds."""


MOST_NOT_TAKEN = 3
"""After so many acknowledgements in a row that vhpcd does not take now, the others wait as well."""
REFUSED, DAMAGED = ".refused", ".damaged"
"""Suffixes of acknowledgements that were set aside: vhpcd, or this host, cannot use them."""


class NotTakenError(FabricError):
    """vhpcd has answered that it does not take this acknowledgement now; it may take others."""


class RefusedError(FabricError):
    """vhpcd can never use this acknowledgement."""


class Acknowledgement(Record, frozen=True):
    """A node's report that it has released a generation (or could not release everything)."""

    generation: Generation
    node: str
    clean: bool
    note: str = ""
    timeline: Timeline | None = None
    usage: NodeUsage | None = None


def put(folder: Path, ack: Acknowledgement) -> bool:
    """Queue an acknowledgement durably, in place of an earlier one of the same generation.

    False: its file system is full.  Then vhpcd's lease shows that it is missing, and a health check
    makes a new one (``reconcile.audit``); it may also be sent at once.

    Raises:
        OSError: it cannot be written for another reason.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(_lock(folder), LOCK_S):
            files.replace(folder / f"{ack.generation}.json", msgspec.json.encode(ack))
    except OSError as err:
        if not files.is_full(err):
            raise
        log.warning("no room for the acknowledgement of %s in %s: %s", ack.generation, folder, err.strerror)
        return False
    return True


def pending(folder: Path) -> list[Path]:
    """The waiting acknowledgements, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another hook has sent it meanwhile
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def queued(folder: Path) -> set[Generation]:
    """The generations whose acknowledgements wait."""
    found = set()
    for path in pending(folder):
        with contextlib.suppress(ValueError):  # no hook has written it
            found.add(Generation.parse(path.stem))
    return found


def set_aside(folder: Path) -> list[Path]:
    """The acknowledgements that were set aside, in the order of their names."""
    return sorted(path for suffix in (REFUSED, DAMAGED) for path in folder.glob(f"*{suffix}"))


def flush(folder: Path, send: Callable[[Acknowledgement], None]) -> int:
    """Send the waiting acknowledgements in order; returns how many still wait.

    One that cannot be used is set aside, and one that vhpcd does not take now goes to the end, so
    that neither delays the others. Any other FabricError ends the attempt: vhpcd cannot be reached.
    """
    waiting = pending(folder)
    left = in_a_row = 0
    for sent, path in enumerate(waiting):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # another hook has sent it meanwhile
        with file:
            # while the file is open no other file has its number
            inode = os.fstat(file.fileno()).st_ino
            try:
                ack = msgspec.json.decode(file.read(), type=Acknowledgement)
            except UNDECODABLE as err:
                _remove(folder, path, inode, DAMAGED)
                log.error("the acknowledgement %s is set aside: it cannot be read: %s", path, err)
                continue
            try:
                send(ack)
                _remove(folder, path, inode)
            except RefusedError as err:
                _remove(folder, path, inode, REFUSED)
                log.error("the acknowledgement %s is set aside: %s", path, err.line())
            except NotTakenError as err:
                log.warning("the acknowledgement %s waits: %s", path.name, err.line())
                left += 1
                in_a_row += 1
                _put_last(folder, path)
                if in_a_row == MOST_NOT_TAKEN:
                    return left + len(waiting) - sent - 1
                continue
            except FabricError as err:
                log.warning("acknowledgements wait: %s", err.line())
                return left + len(waiting) - sent
            in_a_row = 0
    return left


def _put_last(folder: Path, path: Path) -> None:
    """Have the next attempt begin with the others.

    The kernel's clock of files advances by milliseconds, so that "now" may be the time of another one.
    """
    with contextlib.suppress(OSError):
        last = max(other.stat().st_mtime_ns for other in folder.glob("*.json"))
        moment = max(time.time_ns(), last + 1)
        os.utime(path, ns=(moment, moment))


def _remove(folder: Path, path: Path, inode: int, suffix: str = "") -> None:
    """Remove an acknowledgement, but not a newer one that a hook has queued meanwhile.

    With ``suffix`` it is kept under a name with that suffix.
    """
    with files.locked(_lock(folder), LOCK_S) as held, contextlib.suppress(FileNotFoundError):
        if held and path.stat().st_ino == inode:
            if suffix:
                path.rename(path.with_suffix(suffix))
            else:
                path.unlink()


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
