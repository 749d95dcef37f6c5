# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a keeper: to the guests, vhpcd and its process; and a save in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import NoReturn, Protocol

from vhpc_slurm.hooks.interrupts import error_line
from vhpc_slurm.model import Generation, KeeperOrder, KeeperReport, SavedNode
from vhpc_slurm.record import Record


class NodeGuests(Protocol):
    """The guests of a job on this node."""

    def prepare(self, serial: int, wait_s: float) -> None:
        """Prepare all guests to be stopped; VhpcError says why not within ``wait_s``."""

    def hold(self, wait_s: float) -> None:
        """Stop the programs of all guests, which are prepared; VhpcError says why not within ``wait_s``."""

    def save(self, order: KeeperOrder) -> SavedNode:
        """Write the state of the guests, which are held, to the checkpoint's folder; VhpcError: not done."""

    def go_on(self) -> None:
        """Let all guests continue, whatever was done with them before; VhpcError: a guest is still held."""

    def end(self) -> None:
        """End all guests, without a sign to their clients; VhpcError: one is still there."""


class Guests(NodeGuests, Protocol):
    """The same for a keeper, which finds them before it prepares them."""

    def find(self) -> None:
        """Find the guests; VhpcError: they cannot be saved, and nothing was done with them."""


class Vhpcd(Protocol):
    """The requests of a keeper to vhpcd."""

    def keeper(
        self, generation: Generation, node: str, report: KeeperReport | None, wait_s: float
    ) -> KeeperOrder:
        """Report, and get the next order; it is awaited for ``wait_s``.

        Raises:
            VhpcError: vhpcd does not answer, or not to this.
        """


class Begin(Enum):
    """The state of the guests, as far as a keeper knows it when it starts.

    RUN: they run.  ASK: an earlier keeper may have held them.  RELEASE: they may be held, and must continue.
    LEAVE: the same, and then this process ends.
    """

    RUN = "run"
    ASK = "ask"
    RELEASE = "release"
    LEAVE = "leave"


class Setting(Record, frozen=True):
    """The job of a keeper, and its limits.

    Attributes:
        generation, node: of the guests.
        hold_timeout_s: the longest time in which guests have to be prepared, and then to stop.
    """

    generation: Generation
    node: str
    hold_timeout_s: float


class Process(Protocol):
    """The process that a keeper runs in."""

    def pause(self, seconds: float) -> None:
        """Sleep; Terminated (``interrupts``) if SIGTERM comes, or has come."""

    def await_done(self, done: threading.Event, seconds: float) -> bool:
        """Wait for an event, so long; the rest as ``pause``."""

    def ask(self, question: Callable[[], KeeperOrder]) -> KeeperOrder:
        """The answer; the rest as ``pause``."""

    def comment(self, text: str) -> None:
        """Begin to make a text the job's AdminComment; the keeper does not wait for it."""

    def replaced(self) -> bool:
        """Whether the program on the disk is another version by now."""

    def job_ends(self) -> bool:
        """Whether the job's Epilog has begun, which ends the guests."""

    def again(self, begin: Begin) -> NoReturn:
        """Replace this process by a new keeper, which closes all that its threads write to."""


class Saving:
    """A save in a thread of its own: storage may take its time, and vhpcd may give up meanwhile."""

    def __init__(self, guests: Guests, order: KeeperOrder) -> None:
        self.serial, self.done = order.serial, threading.Event()
        self.saved: SavedNode | None = None
        self.line = ""
        self._guests, self._order = guests, order
        threading.Thread(target=self._work, name="save", daemon=True).start()

    def _work(self) -> None:
        try:
            self.saved = self._guests.save(self._order)
        except Exception as err:
            self.line = error_line(err)
        finally:
            self.done.set()
