# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements that wait on disk until vhpcd has received them.

A network identity is free only when every node has acknowledged, so an
acknowledgement may be late, but never lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import UNDECODABLE, FabricError
from vhpc_slurm.model import Generation, NodeUsage, Timeline
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")

LOCK_S = 10.0
"""Longest wait for another hook that queues or removes an acknowledgement, in seconds."""


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
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def flush(folder: Path, send: Callable[[Acknowledgement], None]) -> int:
    """Send the waiting acknowledgements in order; stop at the first that cannot be sent.

    Returns how many still wait.
    """
    waiting = pending(folder)
    for sent, path in enumerate(waiting):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue  # another hook has sent it meanwhile
        with file:
            try:
                ack = msgspec.json.decode(file.read(), type=Acknowledgement)
            except UNDECODABLE:
                with contextlib.suppress(FileNotFoundError):
                    path.rename(path.with_suffix(".damaged"))
                continue
            try:
                send(ack)
            except FabricError:
                return len(waiting) - sent
            # the file is still open, so no other file has its number
            _remove(folder, path, os.fstat(file.fileno()).st_ino)
    return 0


def _remove(folder: Path, path: Path, inode: int) -> None:
    """Remove an acknowledgement that vhpcd has, but not a newer one that a hook has queued meanwhile."""
    with files.locked(_lock(folder), LOCK_S) as held, contextlib.suppress(FileNotFoundError):
        if held and path.stat().st_ino == inode:
            path.unlink()


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
