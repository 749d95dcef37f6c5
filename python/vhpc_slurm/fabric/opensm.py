# SPDX-License-Identifier: Apache-2.0
"""A running OpenSM: vhpcd replaces its partitions file, signals it, and reads its log.

OpenSM keeps no last good configuration, so an invalid file must never exist: the new
one is written next to the old one, synced, and renamed over it. (A file that is
written in place can be read half: 14 of 112 sweeps did.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from vhpc_slurm import files
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import plainfile
from vhpc_slurm.fabric.backend import FabricRefusedError
from vhpc_slurm.fabric.fence import ALONE, FabricWriter, FileFence

POLL_S = 0.002
FIRST_POLL_S = 0.0002
"""Logs are polled more often in the beginning: OpenSM sweeps a small fabric in three milliseconds."""
MAX_FILE = 256 << 20
MAX_PIDFILE = 64
MAX_LOG = 16 << 20
"""Bytes of the log's end that are read; one sweep logs less."""

SETTLE_S = 2.0
"""Seconds to wait for the end of a sweep that has logged an error."""

SWEPT = b"SUBNET UP"
COMPLAINTS = (b"PARSE ERROR", b"retrying with default config", b"ERR 0512", b"ERR 0507")
"""The file was not parsed (fail open); a port's table is full; a switch's enforcement was turned off."""


@dataclass(frozen=True)
class Mark:
    """A position in a log."""

    inode: int
    size: int


class SubnetManager(Protocol):
    """One OpenSM, or several with the same file.  All methods raise FabricError when they fail."""

    partitions: Path | str
    """The name of its file in messages."""

    def each(self) -> Sequence[SubnetManager]:
        """The single managers behind this one; itself where it is one."""

    def check(self) -> None:
        """FabricError unless it runs and can be reached."""

    def read(self) -> bytes | None:
        """The current partitions file; None when there is none."""

    def differing(self) -> list[str]:
        """Of several: the managers whose file is not what ``read`` returns, with the reason."""

    def replace(self, data: bytes) -> None:
        """Replace the file atomically."""

    def repair(self, data: bytes) -> FabricError | None:
        """Replace the file wherever that is possible, and have it read there; returns the failure elsewhere.

        Raises FabricError where it failed everywhere, or a subnet did not come up.
        """

    def hang_up(self) -> None:
        """Have the file read (SIGHUP)."""

    def keep(self) -> None:
        """Make the new file durable; without it a power cut may bring the previous file back."""

    def sweep(self) -> None:
        """Have the file read, and wait until the subnet is up without errors in the log."""

    def mark(self) -> tuple[Mark, ...]:
        """The current ends of the logs: one mark for each OpenSM."""

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """The text of the logs after these marks."""


class Opensm:
    """One OpenSM on this host: its process, its partitions file, its log."""

    def __init__(
        self, partitions: Path, pidfile: Path, log: Path, timeout_s: float, writer: FabricWriter = ALONE
    ) -> None:
        self.writer = writer
        self.partitions: Path | str = partitions
        self.file = partitions
        self.log = log
        self._pidfile = pidfile
        self._timeout_s = timeout_s
        # The filewatch thread may restore the file while the fabric thread waits for a sweep.
        self._writing = threading.Lock()
        self._installed: bytes | None = None
        self._touched = False

    def each(self) -> Sequence[SubnetManager]:
        """This one."""
        return (self,)

    def read(self) -> bytes | None:
        """The current partitions file; None when there is none.

        Raises:
            NotPlainError: it is not a regular file, or too large.
            FabricError: it cannot be read.
        """
        return plainfile.read_file(self.file, MAX_FILE)

    def replace(self, data: bytes) -> None:
        """Replace the file atomically.

        Raises:
            FabricError: it cannot be written; the old one is still there.
        """
        with self._writing:
            self._write(data)
            self._installed = data

    def put_back(self) -> bool:
        """Restore what ``replace`` wrote last where the file has changed; returns whether it had changed.

        Raises:
            FabricError: it cannot be written.
        """
        with self._writing:
            if not self._differs():
                return False
            assert self._installed is not None
            self._touched = True
            self._write(self._installed)
            return True

    def touched(self) -> bool:
        """Whether the file was restored since the last call, or is not what ``replace`` wrote last."""
        with self._writing:
            touched, self._touched = self._touched, False
            return touched or self._differs()

    def _differs(self) -> bool:
        if self._installed is None:
            return False
        try:
            return self.read() != self._installed
        except FabricError:
            return True

    def _write(self, data: bytes) -> None:
        folder = self.file.parent
        fence = FileFence(self.file, self.writer.epoch)
        self.writer.check()
        try:
            fence.enter()
            files.write_beside(self.file, fence.new, data, 0o644)
            fence.check()
            if self.file.is_dir() and not self.file.is_symlink():
                # A file cannot be renamed over a folder. With the slash only a folder is renamed, whatever
                # is there by now.
                moved = folder / f"{self.file.name}.folder-{time.time_ns()}"
                os.rename(f"{self.file}/", moved)  # noqa: PTH104 - a Path has no slash at its end
            fence.new.replace(self.file)
        except OSError as err:
            raise FabricError(
                f"cannot write {self.partitions}", str(err), "vhpcd's user needs to write into its folder"
            ) from err

    def keep(self) -> None:
        """Sync the folder to the disk; FabricError when that fails."""
        try:
            files.sync_folder(self.file.parent)
        except OSError as err:
            raise FabricError(f"cannot write {self.file.parent}", str(err), "see dmesg") from err

    def differing(self) -> list[str]:
        """Empty: there is one file."""
        return []

    def repair(self, data: bytes) -> FabricError | None:
        """Replace the file and have it read; returns None, or raises FabricError."""
        return repair([(self,)], data, self._timeout_s)

    def sweep(self) -> None:
        """Have the file read: SIGHUP, then wait until the subnet is up without errors in the log.

        Raises:
            FabricError: OpenSM does not run, does not finish in time, or logs an error.
        """
        sweep([(self,)], self._timeout_s)

    def mark(self) -> tuple[Mark, ...]:
        """The current end of the log; FabricError when there is no log."""
        with self._open_log() as opened:
            found = os.fstat(opened.fileno())
            return (Mark(found.st_ino, found.st_size),)

    def since(self, marks: tuple[Mark, ...]) -> tuple[bytes, ...]:
        """The text of the log after a mark; the whole log if it was rotated or truncated since."""
        (mark,) = marks
        with self._open_log() as opened:
            found = os.fstat(opened.fileno())
            same = found.st_ino == mark.inode and found.st_size >= mark.size
            opened.seek(max(mark.size if same else 0, found.st_size - MAX_LOG))
            return (opened.read(MAX_LOG),)

    @contextlib.contextmanager
    def _open_log(self) -> Iterator[BinaryIO]:
        try:
            with os.fdopen(plainfile.open_plain(self.log), "rb") as opened:
                yield opened
        except OSError as err:
            raise FabricError(f"cannot read OpenSM's log {self.log}", err.strerror or str(err)) from err

    def check(self) -> None:
        """FabricError unless it runs, has a log, and its file can be replaced."""
        self.pid()
        self.mark()
        if not os.access(self.file.parent, os.W_OK):
            raise FabricError(f"cannot write into {self.file.parent}", "vhpcd replaces a file there")

    def pid(self) -> int:
        """Its process id; FabricError when it does not run."""
        pid, process = self._process()
        os.close(process)
        return pid

    def hang_up(self) -> None:
        """SIGHUP; FabricError when it does not run."""
        _, process = self._process()
        try:
            signal.pidfd_send_signal(process, signal.SIGHUP)
        except OSError as err:
            raise FabricError(
                "cannot signal OpenSM", str(err), "vhpcd must run as root or as OpenSM's user"
            ) from err
        finally:
            os.close(process)

    def _process(self) -> tuple[int, int]:
        """OpenSM's pid, and a pidfd: the pid may belong to another process by the time of the signal."""
        hint = "see fabric.opensm_pidfile in vhpc.toml"
        raw = plainfile.read_file(self._pidfile, MAX_PIDFILE)
        if raw is None:
            raise FabricError("OpenSM does not run", f"there is no {self._pidfile}", hint)
        try:
            pid = int(raw)
            process = os.pidfd_open(pid)
        except (OSError, ValueError) as err:
            raise FabricError("OpenSM does not run", f"{self._pidfile}: {err}", hint) from err
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError as err:
            os.close(process)
            raise FabricError("OpenSM does not run", f"process {pid} of {self._pidfile}: {err}") from err
        if name != "opensm":
            os.close(process)
            raise FabricError("OpenSM does not run", f"process {pid} of {self._pidfile} is {name!r}")
        return pid, process


class ComplaintError(FabricRefusedError):
    """OpenSM has read its file and logged an error: the fabric may be open now."""


def repair(subnets: Sequence[Sequence[SubnetManager]], data: bytes, timeout_s: float) -> FabricError | None:
    """Replace the file of all managers where that works, and have it read; returns why it failed for one.

    A change needs all managers (``replace``). A repair does not wait for a standby that
    cannot be reached.

    Raises:
        FabricError: it failed for all managers of a subnet, or a subnet did not come up.
    """
    refused: list[FabricError] = []
    takers: list[list[SubnetManager]] = []
    for managers in subnets:
        takers.append([])
        for manager in reversed(managers):
            try:
                manager.replace(data)
            except FabricError as err:
                refused.append(err)
            else:
                takers[-1].insert(0, manager)
        if not takers[-1]:
            raise refused[-1]
    sweep(takers, timeout_s)
    return refused[0] if refused else None


def sweep(subnets: Sequence[Sequence[SubnetManager]], timeout_s: float) -> None:
    """Have all managers of some subnets read their files; one of each subnet has to log SUBNET UP.

    It does not matter which one is master: a standby reads its file when it becomes
    master, and logs nothing about the subnet until then.

    After half of the time the signal is sent once more: OpenSM notices one that comes between its question
    for a signal and its pause only ten seconds later, and drops one that comes when a sweep begins.

    Raises:
        ComplaintError: one of them rejects its file.
        FabricError: no manager of a subnet runs, or finishes in time.
    """
    before = _hang_up(subnets)
    began = time.monotonic()
    deadline = began + timeout_s
    for manager in (one for managers in subnets for one in managers):
        manager.keep()
    heard, again = 0.0, began + timeout_s / 2
    left = list(subnets)
    while True:
        said = _said(subnets, before)
        complaint, over = next(filter(None, map(complaint_of, said.values())), ("", False))
        if complaint:
            heard = heard or time.monotonic()
            # The same sweep may log more errors, which would be attributed to the next file.
            if over or time.monotonic() >= min(deadline, heard + SETTLE_S):
                raise ComplaintError("OpenSM rejected its configuration", complaint)
            time.sleep(POLL_S)
            continue
        left = [some for some in left if not any(SWEPT in said.get(one, b"") for one in some)]
        if not left:
            return
        if time.monotonic() >= deadline:
            names = " or ".join(str(one.partitions) for one in left[0])
            raise FabricError(
                f"OpenSM did not sweep within {timeout_s:g} s",
                f"the log of the OpenSM with {names} does not say SUBNET UP",
                "check that it is the master, and that force_log_flush is TRUE",
            )
        if time.monotonic() >= again:
            again = deadline + 1
            with contextlib.suppress(FabricError):
                _hang_up(left)
        time.sleep(min(POLL_S, max(FIRST_POLL_S, (time.monotonic() - began) / 10)))


def _hang_up(subnets: Sequence[Sequence[SubnetManager]]) -> dict[SubnetManager, tuple[Mark, ...]]:
    """Signal all managers; returns the ends of their logs before. FabricError if all of a subnet refuse."""
    before: dict[SubnetManager, tuple[Mark, ...]] = {}
    for managers in subnets:
        refused: list[FabricError] = []
        for manager in managers:
            try:
                mark = manager.mark()
                manager.hang_up()
            except FabricError as err:
                refused.append(err)
            else:
                before[manager] = mark
        if len(refused) == len(managers):
            raise refused[0]
    return before


def _said(
    subnets: Sequence[Sequence[SubnetManager]], before: Mapping[SubnetManager, tuple[Mark, ...]]
) -> dict[SubnetManager, bytes]:
    """The text that each has logged since; FabricError if no log of a subnet can be read."""
    said: dict[SubnetManager, bytes] = {}
    for managers in subnets:
        refused: list[FabricError] = []
        asked = [one for one in managers if one in before]
        for manager in asked:
            try:
                said[manager] = b"\n".join(manager.since(before[manager]))
            except FabricError as err:
                refused.append(err)
        if refused and len(refused) == len(asked):
            raise refused[0]
    return said


def complaint_of(said: bytes) -> tuple[str, bool] | None:
    """The first error in a log, and whether its sweep is over; None when there is none."""
    lines = said.split(b"\n")
    for number, line in enumerate(lines):
        if any(word in line for word in COMPLAINTS):
            return line.decode(errors="replace")[-300:], any(SWEPT in later for later in lines[number + 1 :])
    return None
