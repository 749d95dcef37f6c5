# SPDX-License-Identifier: Apache-2.0
"""The table [disks] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.config.setting import documented

MIN_DISK_MIB = 64
MAX_DISK_MIB = 1 << 24
"""Sizes of a guest's disk that --vhpc-disk accepts, in MiB."""


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
