# SPDX-License-Identifier: Apache-2.0
"""A guest's memory after the guest has ended: no process may still hold it.

It is a memfd, shared with the daemons of the guest's folders.  A process that has a
descriptor of it, or has mapped it, keeps what the guest had in it, and keeps
the node from having that memory back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from vhpc_slurm.errors import TeardownError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.record import Record

Inode = tuple[int, int]
"""Device and inode number."""
SETTLE_S = 2.0
SMALL_BYTES = 32 << 20
"""What is not called memory of a guest: files of QEMU's on tmpfs, such as its console."""


class Holder(Record, frozen=True):
    """A process that holds guest memory."""

    ref: process.ProcessRef
    uid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.ref.pid} ({self.command}) of uid {self.uid}"


def of_process(pid: int) -> set[Inode]:
    """The memfds that a process has open: a QEMU's are its guest's memory."""
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith("/memfd:"):
                    about = link.stat()
                    found.add((about.st_dev, about.st_ino))
    return found


def holders(inodes: Iterable[Inode]) -> list[Holder]:
    """Processes that have one of these files open or mapped."""
    wanted = frozenset(inodes)
    found = []
    for pid, _ in process.scan(lambda pid: "yes" if _holds(pid, wanted) else ""):
        started = process.start_time(pid)
        with contextlib.suppress(OSError):
            if started is not None:
                uid = Path(f"/proc/{pid}").stat().st_uid
                comm = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
                found.append(Holder(process.ProcessRef(pid, started), uid, comm))
    return found


def release(inodes: Iterable[Inode], group: Cgroup | None, owners: Iterable[int]) -> list[Holder]:
    """Verify that no process holds memory of guests that have ended.

    Args:
        inodes: the guests' memfds.
        group: control group that the memory is charged to; None if there is no control group.
        owners: uids whose processes are ended when they hold any: the job's user, and QEMU's.

    Returns:
        The processes that were ended.

    Raises:
        TeardownError: it is still held.
    """
    if group is not None and _settled(group):
        return []
    ended = []
    for holder in holders(inodes):
        if holder.uid not in set(owners):
            raise TeardownError("memory of a guest that has ended is held", str(holder), "end that process")
        process.end(holder.ref)
        ended.append(holder)
    if group is not None and not _settled(group):
        raise TeardownError(
            f"{group.guest_memory_bytes() >> 20} MiB of a guest that has ended are still held",
            "no process has them open; they may be in a message between two processes",
            "find out who holds them, or reboot the node",
        )
    return ended


def _settled(group: Cgroup) -> bool:
    until = time.monotonic() + SETTLE_S
    while group.guest_memory_bytes() > SMALL_BYTES:
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _holds(pid: int, wanted: frozenset[Inode]) -> bool:
    if of_process(pid) & wanted:
        return True
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    for line in maps.splitlines():
        if "/memfd:" in line:
            _, _, _, device, inode, *_ = line.split()
            major, minor = (int(part, 16) for part in device.split(":"))
            if (os.makedev(major, minor), int(inode)) in wanted:
                return True
    return False
