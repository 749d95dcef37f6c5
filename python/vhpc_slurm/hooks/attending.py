# SPDX-License-Identifier: Apache-2.0
"""Common code of the processes of keepers and followers: their lock, their waits, and their end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.hooks import common
from vhpc_slurm.hooks.interrupts import Interrupts
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout

LOCK_S = 10.0
"""How long to wait for the lock of an earlier one, which may be about to end."""
T = TypeVar("T")


class OwnProcess:
    """This process."""

    def __init__(self, layout: Layout, generation: Generation, interrupts: Interrupts) -> None:
        self._layout, self._generation, self._interrupts = layout, generation, interrupts

    def pause(self, seconds: float) -> None:
        """Sleep; Terminated or Woken ends it."""
        self.await_done(threading.Event(), seconds)

    def await_done(self, done: threading.Event, seconds: float) -> bool:
        """Wait for an event; the rest as ``pause``."""
        with self._interrupts.end():
            return done.wait(seconds)

    def ask(self, question: Callable[[], T]) -> T:
        """The answer; the rest as ``pause``."""
        with self._interrupts.end():
            return question()

    def job_ends(self) -> bool:
        """Whether the job's Epilog has begun, which ends the guests."""
        return joblock.has_tombstone(self._layout, self._generation)


def alone(layout: Layout, generation: Generation, role: str, work: Callable[[], bool]) -> int:
    """Do the work of a job's only process of this role; one that returns True has nothing more to do, ever.

    Returns the exit status. The kernel releases the lock when the process has ended.
    """
    try:
        lock = files.open_lock(layout.attendant_lock(generation.job_id, role))
    except FileNotFoundError:
        common.log.info("%s: the run folder of the job has been removed", role)
        return 0
    if not files.lock(lock, LOCK_S):
        common.log.error("%s: another one of the job runs", role)
        return 1
    if work():
        with contextlib.suppress(OSError):  # the run folder may be gone
            layout.attendant_over(generation.job_id, role).touch(mode=0o600)
    return 0


def main(role: str, run: Callable[[Interrupts, Config], int]) -> NoReturn:
    """The life of the process, with its signals and its log."""
    interrupts = Interrupts()
    interrupts.install()
    status = common.main(role, partial(run, interrupts))
    common.close_log()
    os._exit(status)  # a thread that waits for a guest, libvirt or storage must not keep the process
