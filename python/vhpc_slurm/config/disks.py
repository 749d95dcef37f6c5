# SPDX-License-Identifier: Apache-2.0
"""The table [disks] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented

MIN_DISK_MIB = 64
MAX_DISK_MIB = 1 << 24
"""Sizes of a guest's disk that --vhpc-disk accepts, in MiB."""
MOUNT_POINT_MAX = 255
"""Bytes of a mount point."""
PLACES = ("/", "/var", "/var/lib")
"""Directories of guests on which no disk is mounted."""
TREES = (
    *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run"),
    *("/sbin", "/sys", "/usr"),
)
"""Directories on and below which no disk is mounted: the guest's own system, and homes."""
_MOUNT_POINT = re.compile(r"/|(/(?!\.{1,2}(/|\Z))[A-Za-z0-9._+-]+)+", re.ASCII)


def mount_point_refusal(path: str) -> str:
    """Why no disk can be mounted at a directory of a guest, whatever its job is, and what to do; or empty.

    The plugin has the same rules (``spank_plugin/mountpoint.c``).
    """
    if len(path) > MOUNT_POINT_MAX or not _MOUNT_POINT.fullmatch(path):
        return (
            f"an absolute path of at most {MOUNT_POINT_MAX} letters, digits, '/', '.', '_', '+' and '-' is "
            "expected, without '.' or '..' as a part and without '/' at its end, such as /local"
        )
    if path in PLACES or any(_within(path, tree) for tree in TREES):
        return "this directory belongs to the guest's system or to homes; choose another one, such as /local"
    return ""


def hidden(path: str, folders: Iterable[str]) -> str:
    """The first of some absolute folders that is above, on or below a mount point; empty if none is."""
    clean = map(os.path.normpath, folders)
    return next((one for one in clean if _within(path, one) or _within(one, path)), "")


def _within(path: str, folder: str) -> bool:
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
        int, documented("largest disk of a guest, in MiB; 0: jobs get no disks", ge=0, le=MAX_DISK_MIB)
    ] = 0
    keep_free_mib: Annotated[
        int,
        documented("space in that file system that disks leave free, in MiB", ge=0, le=MAX_DISK_MIB),
    ] = 4096
