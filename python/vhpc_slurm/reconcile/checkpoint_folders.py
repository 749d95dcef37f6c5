# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints that vhpcd does not keep: failed, removed, replaced by newer ones, or never known.

All nodes share the folder of checkpoints, and each looks for such folders in it. A folder is renamed before
it is deleted, so that nothing reads a checkpoint with a part of its files, and one node alone deletes it.
Storage that does not answer must not stop a health check.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.node import finding
from vhpc_slurm.node.checkpoint import folder
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.host import threads

T = TypeVar("T")
LIST_S, REMOVE_S = 5.0, 10.0
"""Storage may take so long; Slurm ends a health check after 60 s."""
MOST = 1000
"""vhpcd is asked about so many folders at once."""
REMOVED = ".removed-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Vhpcd(Protocol):
    """The request to vhpcd."""

    def known_checkpoints(self, serials: Collection[int]) -> Collection[int]:
        """Returns the checkpoints whose folders vhpcd keeps; FabricError without an answer."""


def findings(setting: str, vhpcd: Vhpcd) -> Iterator[NodeFinding]:
    """Finds folders to delete; ``setting`` is empty where checkpoints are off.

    They are listed before vhpcd is asked: it knows a checkpoint before a node makes its folder.
    """
    if not setting:
        return
    root = Path(setting)
    try:
        names = _within(LIST_S, root, partial(_names, root))
        serials = sorted(int(name) for name in names if not name.startswith(REMOVED))[:MOST]
        kept = set(vhpcd.known_checkpoints(serials)) if serials else set()
    except VhpcError as err:
        yield finding.of_error(Kind.ORPHAN_CHECKPOINT, err)
        return
    for name in names:
        if name.startswith(REMOVED) or (int(name) in serials and int(name) not in kept):
            what = f"the folder {root / name} belongs to no checkpoint of vhpcd's"
            repair = partial(_within, REMOVE_S, root, partial(remove, root, name))
            yield NodeFinding(Kind.ORPHAN_CHECKPOINT, what, repair)


def _names(root: Path) -> list[str]:
    """Folders of checkpoints, and those that were renamed; other files of the folder belong to the site."""
    with folder.opened(root) as top, os.scandir(top) as entries:
        return sorted(
            entry.name
            for entry in entries
            if (_is_serial(entry.name) or entry.name.startswith(REMOVED))
            and entry.is_dir(follow_symlinks=False)
        )


def _is_serial(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def remove(root: Path, name: str) -> None:
    """Rename the folder of a checkpoint, and delete it with all that is in it; no link is followed.

    Raises:
        OSError: something in it cannot be deleted; a later try has it under its new name.
        NodeError: others than root can write to the folder of checkpoints.
    """
    with folder.opened(root) as top:
        if not name.startswith(REMOVED):
            new = f"{REMOVED}{name}-{secrets.token_hex(4)}"
            try:
                os.rename(name, new, src_dir_fd=top, dst_dir_fd=top)
            except FileNotFoundError:
                return  # another node has renamed it
            name = new
        _remove_tree(top, name)


def _remove_tree(parent: int, name: str) -> None:
    """Delete a directory; another node may be at the same."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            with os.scandir(fd) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for below, is_directory in found:
                if is_directory:
                    _remove_tree(fd, below)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(below, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=parent)


def _within(seconds: float, root: Path, action: Callable[[], T]) -> T:
    """The result of an action on storage; FabricError if storage does not answer."""
    try:
        return threads.within(seconds, "checkpoints", action)
    except threads.OverdueError:
        raise FabricError(
            f"the folder {root} does not answer", f"waited {seconds:g} s", "check the storage"
        ) from None
