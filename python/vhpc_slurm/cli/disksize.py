# SPDX-License-Identifier: Apache-2.0
"""The value of --vhpc-disk, as commands of `vhpc` take it: SIZE[:/MOUNT/POINT]."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import typer

SUFFIXES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Disk:
    """A disk of each guest; without ``mount`` it takes the changes to the root."""

    mib: int
    mount: str = ""


def parse(text: str) -> Disk:
    """Parse a value; parts of a MiB count as one.

    Raises:
        typer.BadParameter: it has another form, or no disk can be mounted there.
    """
    from vhpc_slurm.config.disks import MAX_DISK_MIB, MIN_DISK_MIB, mount_point_refusal

    size, colon, mount = text.partition(":")
    match = re.fullmatch(r"([0-9]{1,12})([KMGT]?)", size.upper(), re.ASCII)
    mib = math.ceil(int(match[1]) * SUFFIXES[match[2] or "M"]) if match else 0
    if not MIN_DISK_MIB <= mib <= MAX_DISK_MIB:
        raise typer.BadParameter(
            f"a size from {MIN_DISK_MIB}M to 16T is expected: a whole number with the suffix K, M, G or T"
        )
    if colon and (why := mount_point_refusal(mount)):
        raise typer.BadParameter(f"{mount[:80]!r}: {why}")
    return Disk(mib, mount)


def option(text: str) -> Any:
    """The option --disk of a command, with this help."""
    return typer.Option("--disk", metavar="SIZE[:/MOUNT/POINT]", help=text, parser=parse, show_default=False)
