# SPDX-License-Identifier: Apache-2.0
"""Watches OpenSM's files: a changed file is restored before OpenSM reads it, and a sweep is noticed.

inotify(7) reports changes by the names in a folder; an audit finds changes that were
made through another name (a hard link). Without inotify only audits find changes,
at their interval.
"""
# Decision: A separate thread restores a changed file

from __future__ import annotations

import ctypes
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import FabricError

log = logging.getLogger("vhpcd")

AGAIN_S = 5.0
"""Seconds until a folder that could not be watched is tried again."""
BURST, BURST_S = 10, 10.0
"""At most so many files are restored in so many seconds; beyond that, audits repair them."""

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x002, 0x004, 0x008
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x040, 0x080, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_Q_OVERFLOW, IN_IGNORED = 0x400, 0x800, 0x4000, 0x8000
IN_ONLYDIR, IN_MASK_ADD = 0x1000000, 0x20000000
_OF_FILE = (
    IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_ONLYDIR
)
_OF_ITSELF = IN_DELETE_SELF | IN_MOVE_SELF
_EVENT = struct.Struct("iIII")


@dataclass(frozen=True)
class Watched:
    """The files of one OpenSM.

    Attributes:
        file: its partitions file.
        log: its log; None: not watched.
        restore: restores a changed file, and returns whether it had changed; None: it cannot be restored.
    """

    file: Path
    log: Path | None = None
    restore: Callable[[], bool] | None = None


class Inotify:
    """An inotify instance; OSError where the limit of instances is reached."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        """The file descriptor, for select(2)."""
        return self._descriptor

    def add(self, path: Path, mask: int) -> int:
        """Watch a path; returns the watch descriptor, which is the same for the same file."""
        return self._checked(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask))

    def remove(self, watch: int) -> None:
        """End a watch, if it exists."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def read(self) -> list[tuple[int, int, bytes]]:
        """Events since the last call, each (watch, mask, name in a watched folder)."""
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        events = []
        while data:
            watch, mask, _, length = _EVENT.unpack_from(data)
            events.append((watch, mask, data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")))
            data = data[_EVENT.size + length :]
        return events

    def close(self) -> None:
        """End all watches."""
        os.close(self._descriptor)


class FileWatch:
    """A thread that restores changed files, and calls back on that and on new log lines."""

    def __init__(self, watched: Sequence[Watched], notice: Callable[[], None]) -> None:
        """``notice`` is called in the thread of the watch; OSError where there is no inotify."""
        self._watched = watched
        self._notice = notice
        self._inotify = Inotify()
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._watches: dict[int, list[tuple[bytes, Callable[[], None]]]] = {}
        self._unwatched: set[Path] = set()
        self._restored: deque[float] = deque(maxlen=BURST)
        self._thread = threading.Thread(target=self._run, name="filewatch", daemon=True)
        self._arm()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        os.close(self._stop)
        self._thread.join()
        os.close(self._stopped)
        self._inotify.close()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._inotify.fileno(), self._stopped], [], [], AGAIN_S)
            if self._stopped in ready:
                return
            try:
                if not ready or self._follow(self._inotify.read()):
                    self._arm()
            except Exception:
                log.exception("internal error")

    def _arm(self) -> None:
        """Watch every file that can be watched; existing watches stay."""
        before, self._watches = self._watches, {}
        for one in self._watched:
            self._watch(one.file.parent, _OF_FILE, one.file.name, self._restorer(one))
            if one.log is not None:
                # Events of the folder show a rotated log, events of the file show new lines.
                self._watch(one.log.parent, IN_CREATE | IN_MOVED_TO | IN_ONLYDIR, one.log.name, self._rotated)
                self._watch(one.log, IN_MODIFY, "", self._notice)
        for number in before.keys() - self._watches.keys():
            self._inotify.remove(number)

    def _watch(self, path: Path, mask: int, name: str, act: Callable[[], None]) -> None:
        try:
            number = self._inotify.add(path, mask | _OF_ITSELF | IN_MASK_ADD)
        except OSError as err:
            if path not in self._unwatched:
                log.error("%s cannot be watched (%s): only audits look at it", path, err.strerror)
            self._unwatched.add(path)
            return
        self._unwatched.discard(path)
        self._watches.setdefault(number, []).append((os.fsencode(name), act))

    def _follow(self, events: list[tuple[int, int, bytes]]) -> bool:
        """Act on events, each action once; returns whether watches have to be renewed."""
        acts: dict[Callable[[], None], None] = {}
        stale = False
        for watch, mask, name in events:
            lost = bool(mask & (IN_Q_OVERFLOW | IN_IGNORED | _OF_ITSELF))
            stale = stale or lost
            for number, known in self._watches.items():
                mine = number == watch or bool(mask & IN_Q_OVERFLOW)
                acts |= dict.fromkeys(act for wanted, act in known if mine and (lost or name == wanted))
        for act in acts:
            act()
        return stale

    def _restorer(self, one: Watched) -> Callable[[], None]:
        def restore() -> None:
            now = time.monotonic()
            if len(self._restored) == BURST and now - self._restored[0] < BURST_S:
                return self._notice()
            try:
                if one.restore is not None and not one.restore():
                    return None  # vhpcd wrote it
                if one.restore is not None:
                    self._restored.append(now)
                    log.error("%s was changed by another program; vhpcd has restored it", one.file)
            except FabricError as err:
                log.error(
                    "%s was changed by another program, and vhpcd cannot restore it: %s", one.file, err.line()
                )
            return self._notice()

        return restore

    def _rotated(self) -> None:
        self._arm()
        self._notice()


def start(watched: Sequence[Watched], notice: Callable[[], None]) -> FileWatch:
    """Begin to watch; FabricError where inotify is not available."""
    try:
        return FileWatch(watched, notice)
    except OSError as err:
        raise FabricError(
            "OpenSM's files cannot be watched", str(err), "see fs.inotify.max_user_instances in inotify(7)"
        ) from err
