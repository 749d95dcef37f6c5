# SPDX-License-Identifier: Apache-2.0
"""Disks of guests on the node's own storage: raw files with an empty ext4, in a folder of root's.

The whole size is reserved when the disk is made, so a guest that fills its disk takes
no space from others.  Reserved blocks read as zeros: what an earlier job has written to
them cannot be read.
"""
# Decision: A guest's disk has its space reserved and no journal

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import GENERATION, Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout, domain_name

FALLOCATE = "/usr/bin/fallocate"
MKFS = "/usr/sbin/mkfs.ext4"
MIB = 1 << 20
SUFFIX = ".disk"
_NAME = re.compile(r"vhpc-(\d{1,10})-(\d{1,9})-([0-9a-f]{8})-g(\d{1,2})\.disk", re.ASCII)
_FEATURES = (
    "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,"
    "sparse_super,uninit_bg,64bit"
)
"""Features of the file system, whatever the host's mke2fs.conf says.

No journal and no checksums of metadata: the disk ends with its guest, and both cost time.
"""


def path(layout: Layout, generation: Generation, index: int) -> Path:
    """File of a guest's disk."""
    return layout.disks / f"{domain_name(generation, index)}{SUFFIX}"


def existing(layout: Layout) -> Iterator[tuple[Generation, int]]:
    """Generation and guest of each disk on this node."""
    try:
        names = sorted(file.name for file in layout.disks.iterdir())
    except FileNotFoundError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match and GENERATION.match(text := ".".join(match.groups()[:3])):
            yield Generation.parse(text), int(match[4])


def check_space(layout: Layout, total_mib: int, node: str) -> None:
    """Refuse disks that this node has no space for.

    Args:
        layout: of this node.
        total_mib: size of all disks of the job here.
        node: its name, for the message.

    Raises:
        UserError: there is less space, now.
        NodeError: the folder cannot be used.
    """
    if total_mib > (free := free_mib(layout)):
        raise _full(node, f"{free} MiB of its storage are free for disks, the job needs {total_mib}")


def free_mib(layout: Layout) -> int:
    """Space for further disks, in MiB; what the site wants to stay free does not count.

    Raises:
        NodeError: the folder cannot be used.
    """
    folder = _folder(layout)
    try:
        found = os.fstatvfs(folder)
    finally:
        os.close(folder)
    return max(0, found.f_bavail * found.f_frsize // MIB - layout.config.disks.keep_free_mib)


def make(
    layout: Layout, generation: Generation, index: int, size_mib: int, node: str, *, blank: bool = False
) -> None:
    """Make a guest's disk, which belongs to root until ``give``; one that is there is replaced.

    A ``blank`` one has no file system: all of it reads as zeros.

    Raises:
        UserError: the storage has become full.
        NodeError: it cannot be made.
    """
    disk = path(layout, generation, index)
    folder = _folder(layout)
    try:
        disk.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(disk.name, flags, 0o600, dir_fd=folder))
    except OSError as err:
        raise NodeError(f"cannot make {disk}", str(err)) from err
    finally:
        os.close(folder)
    said = _run(layout, FALLOCATE, "util-linux", "-l", str(size_mib * MIB), str(disk))
    if os.strerror(errno.ENOSPC) in said:
        raise _full(node, f"its storage has become full; the job needs {size_mib} MiB more")
    if said:
        raise NodeError(
            f"cannot reserve {size_mib} MiB for {disk}",
            said,
            "disks.folder must be on a file system such as ext4 or XFS",
        )
    if blank:
        return
    options = ["-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-O", _FEATURES]
    # nodiscard: mkfs must not give back what was reserved
    options += ["-E", "nodiscard,lazy_itable_init=1", str(disk)]
    if said := _run(layout, MKFS, "e2fsprogs", *options):
        raise NodeError(f"cannot make a file system on {disk}", said)


def give(layout: Layout, generation: Generation, index: int, uid: int) -> None:
    """Make a guest's disk the property of its QEMU.

    Raises:
        NodeError: it is not there.
    """
    disk = path(layout, generation, index)
    try:
        fd = os.open(disk, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(fd, uid, -1)
        finally:
            os.close(fd)
    except OSError as err:
        raise NodeError(f"cannot give {disk} to QEMU", str(err)) from err


def delete(layout: Layout, generation: Generation, index: int) -> None:
    """Delete a guest's disk, if it is there; its QEMU must have ended."""
    path(layout, generation, index).unlink(missing_ok=True)


def _folder(layout: Layout) -> int:
    """The folder of disks, opened; made if it is missing.

    Raises:
        NodeError: it cannot be used, or others than root may change it.
    """
    folder = layout.disks
    try:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as err:
        raise NodeError(f"cannot use disks.folder {folder}", str(err)) from err
    found = os.fstat(fd)
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise NodeError(
            f"disks.folder {folder} is not safe",
            f"it belongs to uid {found.st_uid} and has mode {found.st_mode & 0o7777:o}",
            "it must belong to root, and only root may write to it",
        )
    return fd


def _full(node: str, why: str) -> UserError:
    return UserError(
        f"{node} has no space for the disks of the guests",
        why,
        "ask for less with --vhpc-disk, or for other nodes; disks of other jobs become free when these end",
    )


def _run(layout: Layout, program: str, package: str, *words: str) -> str:
    """Run a program; what it said if it failed, empty if it succeeded."""
    timeout_s = layout.config.guests.stage_timeout_s
    try:
        done = process.run_briefly([program, *words], b"", timeout_s)
    except OSError as err:
        raise NodeError(f"cannot run {program}", str(err), f"apt install {package}") from err
    if done is None:
        raise NodeError(f"{program} did not end within {timeout_s} s", "the storage of disks.folder may hang")
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else f"exit status {done.returncode}"
