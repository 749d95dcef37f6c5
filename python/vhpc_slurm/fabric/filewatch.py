# SPDX-License-Identifier: Apache-2.0
"""Watches OpenSM's files, so that a change by others is met before OpenSM reads it, and a sweep is heard of.

inotify(7) tells of changes through the names in a folder; what is changed through
another name (a second link) the auditor finds.  Without inotify there is the
auditor alone, which looks at intervals.
"""

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
"""So long after a folder could not be watched it is tried again."""
BURST, BURST_S = 10, 10.0
"""Files are put back so often in so many seconds; whoever changes them more often meets the auditor."""

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
        restore: puts the right file back where another one is there, and says whether; None: nobody can.
    """

    file: Path
    log: Path | None = None
    restore: Callable[[], bool] | None = None


class Inotify:
    """An inotify instance; OSError where the kernel has none left for us."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def fileno(self) -> int:
        """For select and the like."""
        return self._descriptor

    def add(self, path: Path, mask: int) -> int:
        """Watch a path; the number of the watch, the same for the same file."""
        return self._checked(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask))

    def remove(self, watch: int) -> None:
        """End a watch, if it is there."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def read(self) -> list[tuple[int, int, bytes]]:
        """What has happened, if anything: watch, mask, name in a watched folder."""
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
    """A thread that puts changed files back, and gives notice of that and of what is logged."""

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
        """Watch all that can be watched; what is watched already stays so."""
        before, self._watches = self._watches, {}
        for one in self._watched:
            self._watch(one.file.parent, _OF_FILE, one.file.name, self._restorer(one))
            if one.log is not None:
                # The folder tells of a log that was rotated, the file of what is written into it.
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
        """Act on what has happened, each thing once; whether watches have to be made anew."""
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
                    return None  # it was ours
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
    """Begin to watch; FabricError where the kernel has no inotify for us."""
    try:
        return FileWatch(watched, notice)
    except OSError as err:
        raise FabricError(
            "files of OpenSM cannot be watched", str(err), "see fs.inotify.max_user_instances in inotify(7)"
        ) from err
