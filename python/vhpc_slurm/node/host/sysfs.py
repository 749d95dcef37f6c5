# SPDX-License-Identifier: Apache-2.0
"""Bounded reads of sysfs and procfs, and sets of CPUs as bit masks (CPU *n* is bit *n*)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from vhpc_slurm.cpulist import parse_cpu_list

LIMIT = 1 << 16
"""Maximum bytes read of a file; a sysfs attribute has at most a page, a mask of 4096 CPUs has 1152."""

IFF_UP = 0x1

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO)


def text(path: str) -> str | None:
    """An attribute without surrounding blanks; None if the file does not exist.

    Kernel 2.6.32 ends CPU lists with a newline and a NUL.

    Raises:
        OSError: it exists and cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        if err.errno in ABSENT:
            return None
        raise
    try:
        raw = os.read(fd, LIMIT)
    finally:
        os.close(fd)
    return raw.decode("ascii", errors="replace").strip(" \n\0")


def text_or_empty(path: str) -> str:
    """An attribute; empty if it is absent or unreadable."""
    try:
        return text(path) or ""
    except OSError:
        return ""


def interface_up(path: str) -> bool | None:
    """Whether a network interface (its folder) is up; None if the folder does not tell."""
    flags = text_or_empty(f"{path}/flags")
    return bool(int(flags, 16) & IFF_UP) if flags else None


def listing(path: str) -> list[str]:
    """Names in a folder, ascending; empty without the folder.

    Raises:
        OSError: it exists and cannot be read.
    """
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - a path object per name takes longer than the read
    except OSError as err:
        if err.errno in ABSENT:
            return []
        raise


def link(path: str) -> str:
    """Target of a symbolic link; empty if there is no link."""
    try:
        return os.readlink(path)  # noqa: PTH115 - likewise
    except OSError:
        return ""


def read_mask(path: str) -> int:
    """A kernel cpumask file (``ffffffff,00000003``); 0 when there is no such file.

    Raises:
        ValueError: it is not one.
    """
    found = text(path)
    if not found:
        return 0
    try:
        return int(found.replace(",", ""), 16)
    except ValueError:
        raise ValueError(f"no CPU mask in {path}: {found[:80]!r}") from None


def read_list(path: str) -> int:
    """A kernel CPU list file (``0-3,8``); 0 when there is no such file.

    Raises:
        ValueError: it is not one.
    """
    found = text(path)
    return mask_of(parse_cpu_list(found)) if found else 0


def first_mask(folder: str, *names: str) -> int:
    """The first of these cpumask files that has a CPU."""
    for name in names:
        mask = read_mask(f"{folder}/{name}")
        if mask:
            return mask
    return 0


def numbered(folder: str, prefix: str) -> list[tuple[int, str]]:
    """Entries ``prefix<N>`` of a folder with their numbers, in numeric order; empty without the folder."""
    pattern = re.compile(rf"{prefix}([0-9]{{1,9}})", re.ASCII)
    found = ((pattern.fullmatch(name), name) for name in listing(folder))
    return sorted((int(match[1]), f"{folder}/{name}") for match, name in found if match)


def bits(mask: int) -> list[int]:
    """CPUs of a mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def lowest(mask: int) -> int:
    """The lowest CPU of a mask; -1 if it is empty."""
    return (mask & -mask).bit_length() - 1


def mask_of(cpus: Iterable[int]) -> int:
    """The mask of these CPUs."""
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return mask
