# SPDX-License-Identifier: Apache-2.0
"""The table [disks] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

import os.path
from collections.abc import Iterable
from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented
from vhpc_slurm.options import MAX_SIZE_MIB


def hidden(path: str, folders: Iterable[str]) -> str:
    """The first of some absolute folders that is above, on or below a mount point; empty if none is."""
    clean = map(os.path.normpath, folders)
    return next((one for one in clean if within(path, one) or within(one, path)), "")


def within(path: str, folder: str) -> bool:
    """Whether a path is a folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Disks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Disks of guests on a node's own storage (--vhpc-disk)."""

    folder: Annotated[
        str,
        documented(
            "folder for the disks on every node; it belongs to root, and its file system is one that can "
            "reserve space for a file (ext4, XFS, Btrfs)",
            pattern=r"^/",
        ),
    ] = "/var/lib/vhpc/disks"
    max_mib: Annotated[
        int, documented("largest disk of a guest, in MiB; 0: jobs get no disks", ge=0, le=MAX_SIZE_MIB)
    ] = 0
    keep_free_mib: Annotated[
        int,
        documented("space in that file system that disks leave free, in MiB", ge=0, le=MAX_SIZE_MIB),
    ] = 4096
