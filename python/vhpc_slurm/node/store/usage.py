# SPDX-License-Identifier: Apache-2.0
"""Usage of generations on this node, kept until the acknowledgement of their end has it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.model import Generation, GuestUsage, NodeUsage
from vhpc_slurm.undecodable import UNDECODABLE


def keep(path: Path, guests: Sequence[GuestUsage]) -> None:
    """Store what guests have answered; an earlier answer of a guest that has ended since stays.

    Raises:
        OSError: the file cannot be written.
    """
    merged = {guest.index: guest for guest in read(path)}
    for guest in guests:
        before = merged.get(guest.index)
        if before is None:
            merged[guest.index] = guest
        elif not guest.missing:
            merged[guest.index] = replace(guest, shared=guest.shared or before.shared)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(path, msgspec.json.encode([merged[index] for index in sorted(merged)]))


def read(path: Path) -> tuple[GuestUsage, ...]:
    """The stored usage; empty if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[GuestUsage, ...])
    except (FileNotFoundError, *UNDECODABLE):
        return ()


def of_node(path: Path, generation: Generation, node: str) -> NodeUsage | None:
    """The same for vhpcd; None if nothing was stored."""
    guests = read(path)
    return NodeUsage(generation, node, guests) if guests else None


def prune(folder: Path, keep_newest: int) -> None:
    """Keep only the newest files."""
    with contextlib.suppress(FileNotFoundError):
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[: max(0, len(paths) - keep_newest)]:
            path.unlink(missing_ok=True)
