# SPDX-License-Identifier: Apache-2.0
"""The lock of a job: one Prolog or Epilog at a time, and never a Prolog after its Epilog.

slurmd may orphan a running Prolog (it was restarted, or it gave up the job)
and start the Epilog at the same time.  The Epilog therefore writes a tombstone,
ends the Prolog that holds the lock, and takes the lock itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.store.layout import Layout

BRIEF_S = 10.0
"""Seconds that an Epilog waits for a holder marked as brief before it ends that one too."""
_BRIEF = "brief"


class NoRoomError(FabricError):
    """The run folder's file system is full."""


@contextlib.contextmanager
def held(
    layout: Layout, job_id: int, *, timeout_s: float, end_holder: bool = False, brief: bool = False
) -> Iterator[None]:
    """Hold the lock of a job.

    Args:
        layout: has the path of the lock.
        job_id: the job.
        timeout_s: how long to wait for another holder.
        end_holder: end the holding process (an Epilog ends an orphaned Prolog).
        brief: the caller is a health check, which only holds the lock for moments.

    Raises:
        NodeError: another holder kept it for ``timeout_s``.
        TeardownError: the holder does not end.
        NoRoomError: a Prolog cannot leave its name there for an Epilog that would end it.
    """
    path = layout.lock(job_id)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    began = time.monotonic()
    until = began + timeout_s
    while True:
        fd = files.open_lock(path)
        locked = files.try_lock(fd)
        if locked and _same_file(fd, path):
            break
        try:
            if not locked and end_holder:
                _end_holder(fd, time.monotonic() - began)
        finally:
            os.close(fd)
        if not locked and time.monotonic() >= until:
            raise NodeError(f"job {job_id} is locked by another hook", _holder_text(path))
        time.sleep(0.05)
    try:
        _sign(fd, path, brief=brief, may_fail=end_holder or brief)
        yield
    finally:
        os.close(fd)


def _sign(fd: int, path: Path, *, brief: bool, may_fail: bool) -> None:
    me = process.start_time(os.getpid())
    os.ftruncate(fd, 0)
    try:
        os.pwrite(fd, f"{os.getpid()} {me} {_BRIEF if brief else ''}\n".encode(), 0)
    except OSError as err:
        if not files.is_full(err):
            raise
        if not may_fail:
            raise NoRoomError(f"no room for the lock {path}", err.strerror or str(err)) from err


def write_tombstone(layout: Layout, generation: Generation) -> None:
    """Write a generation's tombstone: from now on its Prolog acquires nothing more."""
    path = layout.tombstone(generation)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def has_tombstone(layout: Layout, generation: Generation) -> bool:
    """Whether the Epilog of that generation has begun."""
    return layout.tombstone(generation).exists()


def busy(layout: Layout, job_id: int) -> bool:
    """Whether a hook of the job is running (holds its lock)."""
    return files.is_locked(layout.lock(job_id))


def end_was_interrupted(layout: Layout, generation: Generation) -> bool:
    """Whether the Epilog of that generation has begun, and does not run now.

    Slurm repeats no Epilog. If it left a journal, it was killed or has failed.
    """
    return has_tombstone(layout, generation) and not busy(layout, generation.job_id)


def sweep(layout: Layout, older_than_s: float) -> None:
    """Remove tombstones and unheld locks that are no longer needed; other files in their folders stay."""
    for path in _files(layout.run / "tombstones"):
        if _is_tombstone(path) and _age_s(path) > older_than_s:
            path.unlink(missing_ok=True)
    for path in _files(layout.run / "locks"):
        if path.name.isdecimal() and _age_s(path) > older_than_s:
            _remove_unheld(path, older_than_s)


def _files(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _is_tombstone(path: Path) -> bool:
    try:
        Generation.parse(path.name)
    except ValueError:
        return False
    return True


def _age_s(path: Path) -> float:
    """Seconds since a file was last written; 0 when another sweep has removed it."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_unheld(path: Path, older_than_s: float) -> None:
    """Remove a lock while it is held here.

    A hook that has opened the file, and gets the lock afterwards, finds that it is no longer the file
    at its path; one that had the lock in between has written into it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        if files.try_lock(fd) and _same_file(fd, path) and _age_s(path) > older_than_s:
            path.unlink()
    finally:
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    """Whether the locked file is still the one at its path (``sweep`` may have removed it)."""
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _end_holder(fd: int, waited_s: float) -> None:
    try:
        pid, started, *rest = os.pread(fd, 64, 0).decode("ascii", errors="replace").split()
        ref = process.ProcessRef(int(pid), int(started))
    except ValueError:
        return  # the holder has the lock but has not yet written its pid; try again
    if ref.pid == os.getpid():
        raise TeardownError("this process itself holds the lock of the job")
    if rest != [_BRIEF] or waited_s >= BRIEF_S:
        process.end(ref)


def _holder_text(path: Path) -> str:
    try:
        return f"held by process {path.read_text().split()[0]}"
    except (OSError, IndexError):
        return ""
