# SPDX-License-Identifier: Apache-2.0
"""Signals that end the waits of an attendant: SIGTERM, and for a follower the end of a guest."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from vhpc_slurm.errors import VhpcError

MAX_LINE = 400


class Terminated(BaseException):
    """This process got SIGTERM: it is not an error, and no handler of errors may take it for one."""


class Woken(BaseException):
    """There is something to do before the end of a wait; no error either."""


class Interrupts:
    """Signals that end a wait at once, or the next one; everything else comes to its end before."""

    def __init__(self) -> None:
        self._terminated = self._woken = self._waits = False

    def install(self) -> None:
        """Take the signals; a SIGTERM that came while it was blocked comes now."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGUSR1, self._wake)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    @staticmethod
    def wake() -> None:
        """End a wait by ``Woken``; from any thread."""
        os.kill(os.getpid(), signal.SIGUSR1)

    @contextlib.contextmanager
    def end(self) -> Iterator[None]:
        """A wait of the main thread that ends by Terminated or Woken."""
        try:
            self._waits = True
            self._check()
            yield
        finally:
            self._waits = False

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._terminated = True
        self._check()

    def _wake(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._woken = True
        self._check()

    def _check(self) -> None:
        """Raise at most once per wait: a second signal may come while the first exception is on its way."""
        if not self._waits:
            return
        if self._terminated:
            self._waits = False
            raise Terminated
        if self._woken:
            self._waits = self._woken = False
            raise Woken


def error_line(err: BaseException) -> str:
    """An error as one line for vhpcd's users and for the log."""
    text = err.line() if isinstance(err, VhpcError) else f"internal error: {err!r}"
    return text[:MAX_LINE]
