# SPDX-License-Identifier: Apache-2.0
"""The path at which libvirt writes or reads a guest's state: a FIFO for each opening.

libvirt opens the path twice. A FIFO that is opened again while its other end is still open
would mix both streams, so the path gets a new one as soon as an end has been opened.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "state.fifo"
"""Of the path in a guest's run folder."""
_POLL_S = 0.2
WAKE_S = 0.05


class StoppedError(Exception):
    """No process opens or uses the path any longer."""


class Fifos:
    """FIFOs at one path, one after the other.

    One thread opens them and moves the bytes; another one calls ``stop`` when libvirt's call has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new = path.with_name(f"{path.name}.new")
        self._stopped = threading.Event()
        self.replace()

    def replace(self) -> None:
        """Put a new FIFO at the path; OSError if that fails."""
        self._new.unlink(missing_ok=True)
        os.mkfifo(self._new, 0o600)
        self._new.replace(self.path)

    def remove(self) -> None:
        """Remove the path."""
        self._new.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @contextmanager
    def opened(self, flags: int) -> Iterator[int]:
        """The path, opened (``os.O_RDONLY`` or ``os.O_WRONLY``) when the other side opens it.

        Raises:
            StoppedError: no process does.
            OSError: it cannot be opened.
        """
        fd = os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if self._stopped.is_set():
                raise StoppedError
            self.replace()
            os.set_blocking(fd, False)
            yield fd
        finally:
            os.close(fd)

    def read_into(self, fd: int, room: memoryview) -> int:
        """Read what has come; 0: the other side has closed its end.

        Raises:
            StoppedError: no process writes any longer.
            OSError: it cannot be read.
        """
        while True:
            try:
                return os.readv(fd, [room])
            except BlockingIOError:
                self._wait(fd, select.POLLIN)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of it.

        Raises:
            BrokenPipeError: the other side has closed its end.
            StoppedError: no process reads any longer.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                self._wait(fd, select.POLLOUT)

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while not poll.poll(_POLL_S * 1000):
            if self._stopped.is_set():
                raise StoppedError

    def refuse(self) -> None:
        """Give each opening of the other side an end that is closed at once, until ``stop``.

        For a thread that has failed: libvirt would wait in its next opening, and has no deadline.
        """
        while not self._stopped.wait(WAKE_S):
            self._wake()

    def _wake(self) -> None:
        """End the wait of an opening at the path, whichever side's it is."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))

    def stop(self, worker: threading.Thread) -> None:
        """End the thread's wait for the other side, and wait until it has ended."""
        self._stopped.set()
        while worker.is_alive():
            self._wake()
            worker.join(WAKE_S)
