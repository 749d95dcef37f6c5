# SPDX-License-Identifier: Apache-2.0
"""How one of several vhpcd becomes and stays the active one, and ends its service in time.

The active vhpcd ends its service by execve of itself, which ends all of its threads at once,
wherever they are, and then waits as a standby. It does so when its last change in the database is
too old (``writership``), and when another vhpcd has taken the database.
"""
# Decision: A vhpcd that is no longer active calls execve

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from vhpc_slurm.config import Config
from vhpc_slurm.controller.api.duty import Duty
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.standby import Standby
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.store.writership import RENEW_S, STEP_DOWN_S, FencedError
from vhpc_slurm.controller.sync.scheduler import wait_within
from vhpc_slurm.errors import FabricError

log = logging.getLogger("vhpcd")

LOOK_S = 0.5
"""Seconds between two looks of a standby."""
GUARD_S = 0.1
"""Seconds between two looks of the active vhpcd at its own clock."""


async def await_turn(config: Config, duty: Duty, stop: asyncio.Event) -> MariaStore | None:
    """Wait as a standby; returns the database when this vhpcd is the active one, None when it must stop."""
    standby = Standby(config.database, config.controller.user)
    loop, said = asyncio.get_running_loop(), ""
    with ThreadPoolExecutor(1, "standby") as thread:
        while not stop.is_set():
            try:
                store = await loop.run_in_executor(thread, standby.take)
                trouble = ""
            except FabricError as err:
                store, trouble = None, err.line()
            if store is not None:
                return store
            if (now := trouble or _active(standby.holder)) != said:
                log.log(logging.WARNING if trouble else logging.INFO, "this vhpcd is a standby: %s", now)
            duty.waits = said = now
            await wait_within(LOOK_S, stop)
        standby.close()
    return None


def _active(holder: str) -> str:
    host, _, process = holder.partition(":")
    return f"process {process} on {host} is the active vhpcd" if host else "no vhpcd is active yet"


def execute_anew() -> None:
    """Become a new vhpcd in this process; nothing of the old one runs any more."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell is meant
    finally:
        leave()


def leave() -> None:
    """End this process at once; its service manager may start it again."""
    os.kill(os.getpid(), signal.SIGKILL)


class Tenure:
    """The time of a vhpcd as the active one.

    A thread renews it and ends it, so that neither waits for what the event loop does.
    """

    def __init__(self, store: MariaStore, writer: Writer, end: Callable[[], None] = execute_anew) -> None:
        """``end`` ends this vhpcd's service; it does not return."""
        self._store, self._writer, self._end = store, writer, end
        self._renewal: Future[None] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._keep, name="tenure", daemon=True).start()

    @property
    def epoch(self) -> int:
        """The epoch of this vhpcd."""
        return self._store.writership.epoch

    def left_s(self) -> float:
        """Seconds until it must end; any thread may ask."""
        return STEP_DOWN_S - self._store.writership.age_s

    def _keep(self) -> None:
        while not self._over.wait(GUARD_S):
            if self.left_s() <= 0:
                self._step_down(f"it could not write to the database for {STEP_DOWN_S:g} s")
            if self._renewal is not None and self._renewal.done():
                err, self._renewal = self._renewal.exception(), None
                if isinstance(err, FencedError):
                    self._step_down(err.why)
            if self._renewal is None and self._store.writership.age_s >= RENEW_S:
                # The writer logs why it cannot write.
                self._renewal = self._writer.submit(self._store.renew)

    def _step_down(self, why: str) -> None:
        log.critical("this vhpcd is no longer the active one: %s", why)
        self._end()

    def stopping(self) -> None:
        """The process ends: it does not become a standby any more."""
        self._end = leave

    def close(self) -> None:
        """No longer keep it: nothing of this vhpcd's service runs any more."""
        self._over.set()
