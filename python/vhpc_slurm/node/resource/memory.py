# SPDX-License-Identifier: Apache-2.0
"""The memory of guests, which no process may hold after they have ended.

It is a memfd, shared with the daemons of the guest's folders.  A process that has a
descriptor of it, or has mapped it, keeps what the guest had in it, and keeps
the node from having that memory back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, field

from vhpc_slurm.errors import TeardownError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.resource.protocol import Resource
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
Inode = tuple[int, int]
"""Device and inode number."""
SETTLE_S = 2.0
SMALL_BYTES = 32 << 20
"""Smaller files on tmpfs, such as QEMU's console, do not count as memory of a guest."""


class GuestMemory(Struct):
    """Memory of all guests of a generation, as its journal has it.

    Attributes:
        journal: of the generation.
        owners: uids whose processes may have it.
        inodes: its memfds.
    """

    journal: Journal
    owners: list[int]
    inodes: set[Inode] = field(default_factory=set)

    def add_owner(self, uid: int) -> None:
        """Note another uid, before its first process starts."""
        self.owners.append(uid)
        self.journal.update(Memory.kind, owners=self.owners)

    def add_guest(self, pids: Iterable[int]) -> None:
        """Note the memfds of a guest's QEMU."""
        for pid in pids:
            self.inodes |= of_process(pid)
        self.journal.update(Memory.kind, inodes=sorted(self.inodes))


class MemoryData(Record, frozen=True, omit_defaults=True):
    """The entry of guests' memory: uids whose processes may have it, and its memfds."""

    owners: tuple[int, ...]
    inodes: tuple[Inode, ...] = ()


class Memory(Resource):
    """The memory of a generation's guests; its key is its kind."""

    kind = "memory"

    def take(self, journal: Journal, owner: int) -> GuestMemory:
        """Announce who may have memory of the guests: first ``owner``, the job's user.

        Before all guests, so that its release comes after all of them have ended:
        what is charged to the control group belongs to them together.
        """
        held = GuestMemory(journal, [owner])
        journal.announce(self.kind, self.kind, MemoryData(tuple(held.owners)))
        return held

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Verify that no process holds it, after QEMU and the share daemons have ended."""
        found = entry.read(MemoryData)
        group = None if layout.config.guests.cgroups == "off" else Cgroup.of(str(generation))
        for holder in release(found.inodes, group, found.owners):
            log.warning("ended %s: it held memory of a guest of generation %s", holder, generation)


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
