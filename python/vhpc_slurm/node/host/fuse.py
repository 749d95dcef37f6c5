# SPDX-License-Identifier: Apache-2.0
"""FUSE file systems that users have mounted, and processes that wait for them.

A process whose request the server of a file system has read, and does not answer, waits also after
SIGKILL.  Only the end of the server or an abort of the connection ends that wait
(Documentation/filesystems/fuse.rst of Linux, "Aborting a filesystem connection").
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
CONNECTIONS = Path("/sys/fs/fuse/connections")
MOUNT = "/usr/bin/mount"
MOUNT_S = 5.0


class FuseMount(NamedTuple):
    """A mount; ``connection`` is the minor number of its device: the kernel's name of the connection."""

    place: str
    connection: int


def mounts(uid: int, mountinfo: str | None = None) -> list[FuseMount]:
    """A user's FUSE file systems (fuse(4), mount option ``user_id``), by default those seen here."""
    text = MOUNTS.read_text(errors="replace") if mountinfo is None else mountinfo
    found = []
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind.partition(".")[0] in ("fuse", "fuseblk") and f"user_id={uid}" in options.split(","):
            words = fields.split(" ")
            found.append(FuseMount(words[4], int(words[2].partition(":")[2])))
    return found


def waits(pid: int, task: str = "") -> bool:
    """Whether a process, or the task ``/task/TID`` of it, waits in FUSE.

    True if the kernel does not report what it waits for.
    """
    try:
        stack = Path(f"/proc/{pid}{task}/stack").read_text()
    except OSError:
        return True
    return "fuse" in stack or not stack.strip()


def end_waits(pid: int) -> None:
    """Abort connections that a killed process waits for: those of its own user's file systems that it sees.

    File systems of root and of other users are left alone.  A failure leaves the process as it is.
    """
    for uid, mountinfo in _waiting(pid):
        if uid == 0:
            continue
        for mount in mounts(uid, mountinfo):
            _abort(mount.connection)


def _waiting(pid: int) -> Iterator[tuple[int, str]]:
    """Real uid and mounts of each task of a process that waits in FUSE."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        if not waits(pid, f"/task/{task.name}"):
            continue
        with contextlib.suppress(OSError):  # it has ended
            status = (task / "status").read_text()
            uid = int(status.partition("\nUid:")[2].split(None, 1)[0])
            yield uid, (task / "mountinfo").read_text(errors="replace")


def _abort(connection: int) -> None:
    file = CONNECTIONS / str(connection) / "abort"
    if not file.exists():  # not every host mounts it
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [MOUNT, "-t", "fusectl", "fusectl", str(CONNECTIONS)]
            subprocess.run(
                command, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=MOUNT_S
            )
    with contextlib.suppress(OSError):
        file.write_text("1")
