# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements that wait on disk until vhpcd has received them.

A network identity is free only when every node has acknowledged, so an
acknowledgement may be late, but never lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import UNDECODABLE, FabricError
from vhpc_slurm.model import Generation, NodeUsage, Timeline
from vhpc_slurm.record import Record


class Acknowledgement(Record, frozen=True):
    """A node's report that it has released a generation (or could not release everything)."""

    generation: Generation
    node: str
    clean: bool
    note: str = ""
    timeline: Timeline | None = None
    usage: NodeUsage | None = None


def put(folder: Path, ack: Acknowledgement) -> Path:
    """Queue an acknowledgement durably."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{ack.generation}.json"
    files.replace(path, msgspec.json.encode(ack))
    return path


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
            ack = msgspec.json.decode(path.read_bytes(), type=Acknowledgement)
        except FileNotFoundError:
            continue  # another hook has sent it meanwhile
        except UNDECODABLE:
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_suffix(".damaged"))
            continue
        try:
            send(ack)
        except FabricError:
            return len(waiting) - sent
        path.unlink(missing_ok=True)
    return 0
