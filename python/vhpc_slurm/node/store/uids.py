# SPDX-License-Identifier: Apache-2.0
"""A uid of its own for every guest's QEMU, out of a range that belongs to vhpc.

With libvirt's shared default user one escaped guest would own all others.  A
uid is allocated by a file that names its generation.

A QEMU that was taken over may leave a setuid file behind, and every user who starts
that file gets its uid.  So uids rotate, also across reboots: one is used again
after all others, and not while a process or a file in a world-writable folder
has it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Iterator

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")
FIND = "/usr/bin/find"
LOCK_TIMEOUT_S = 30.0
SCAN_S = 2.0
"""How long to look for files: what a user has put into /tmp must not cost him a node."""


def allocate(layout: Layout, generation: str, announce: Callable[[int], object]) -> int:
    """Allocate the uid that has not been used for the longest time.

    Args:
        layout: configuration and where allocations lie.
        generation: whose guest gets it.
        announce: called with the uid before it is allocated (journal first).

    Raises:
        NodeError: no uid of the range is free, or another Prolog keeps the lock.
    """
    config = layout.config.guests
    layout.uids.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _Rotation(layout) as rotation:
        owners = _owners_of_files(layout)
        for uid in rotation.order():
            path = layout.uids / str(uid)
            if path.exists() or next(process.of_uid(uid), None) is not None:
                continue
            if uid in owners:
                log.warning(
                    "uid %d owns files in %s: no guest gets it; remove them",
                    uid,
                    " ".join(config.uid_check_paths),
                )
                continue
            announce(uid)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue  # another job's Prolog was quicker; its allocation is not ours to release
            with os.fdopen(fd, "w") as out:
                out.write(generation)
            rotation.used(uid)
            return uid
    raise NodeError("no free uid for a guest", f"all {config.uid_count} are in use", "raise guests.uid_count")


class _Rotation:
    """Which uid is next, in a file that survives reboots; locked while it is open."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.state / "uid-next"
        self._base, self._count = layout.config.guests.uid_base, layout.config.guests.uid_count

    def __enter__(self) -> _Rotation:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._fd = files.open_lock(self._path)
        try:
            if not files.lock(self._fd, LOCK_TIMEOUT_S):
                raise NodeError("another job's Prolog has held the uids' lock for too long", str(self._path))
            try:
                self._next = int(os.pread(self._fd, 32, 0))
            except ValueError:  # new here, or torn by a power cut
                self._next = self._base
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def order(self) -> Iterator[int]:
        """All uids, the least recently used one first."""
        first = self._next - self._base if self._base <= self._next < self._base + self._count else 0
        for step in range(self._count):
            yield self._base + (first + step) % self._count

    def used(self, uid: int) -> None:
        """Make durable that a uid is used."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{uid + 1}\n".encode(), 0)
        os.fsync(self._fd)


def _owners_of_files(layout: Layout) -> frozenset[int]:
    """Uids of the range that own something in world-writable folders; find(1) follows no links."""
    config = layout.config.guests
    folders = [folder for folder in config.uid_check_paths if os.path.isdir(folder)]  # noqa: PTH112 - a text
    if not folders:
        return frozenset()
    first, last = config.uid_base, config.uid_base + config.uid_count - 1
    test = ["-uid", f"+{first - 1}", "-uid", f"-{last + 1}", "-printf", "%U\\n"]
    try:
        done = subprocess.run(
            [FIND, *folders, "-xdev", *test],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=SCAN_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        log.warning("cannot look for files of earlier guests in %s: %s", " ".join(folders), err)
        return frozenset()
    return frozenset(int(line) for line in done.stdout.split() if line.isdigit())


def release(layout: Layout, uid: int, generation: str) -> None:
    """End what still runs under an allocated uid, see it gone, drop the allocation.

    A uid that another generation has is left alone: the release is of an
    announcement whose allocation never came to be.

    Raises:
        TeardownError: a process of that uid does not end.
    """
    if not held(layout, uid, generation):
        return
    for ref in process.of_uid(uid):
        process.end(ref)
    left = next(process.of_uid(uid), None)
    if left is not None:
        raise TeardownError(
            f"uid {uid} is still in use", f"by process {left.pid}", "end it, then vhpc reconcile"
        )
    (layout.uids / str(uid)).unlink(missing_ok=True)


def held(layout: Layout, uid: int, generation: str) -> bool:
    """Whether a uid is allocated to that generation; an empty allocation (left by a crash) counts too."""
    try:
        return (layout.uids / str(uid)).read_text() in ("", generation)
    except FileNotFoundError:
        return False


def allocated(layout: Layout) -> Iterator[tuple[int, str]]:
    """All allocations: (uid, generation)."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(layout.uids.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                yield int(path.name), path.read_text()


def in_range(config: Config, uid: int) -> bool:
    """Whether a uid belongs to the range of guests."""
    base = config.guests.uid_base
    return base <= uid < base + config.guests.uid_count
