# SPDX-License-Identifier: Apache-2.0
"""A keeper with a vhpcd that follows a script, guests that note what is done with them, and its own clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks.interrupts import Terminated
from vhpc_slurm.hooks.keeperport import Begin, Setting
from vhpc_slurm.hooks.keeping import Keeper
from vhpc_slurm.model import (
    Generation,
    KeeperOrder,
    KeeperReport,
    KeeperState,
    OrderKind,
    SavedGuest,
    SavedNode,
    Seal,
)

GENERATION = Generation(42, 0, "0123abcd")
SAVED = SavedNode("n1", 10_000_000, "emulated", 1.5, (SavedGuest(0, "n1", 2, 1024, Seal(9, b"r")),))
AWAY = FabricError("vhpcd does not answer")

Turn = KeeperOrder | BaseException | Callable[[], KeeperOrder]


def order(kind: str, serial: int = 5) -> KeeperOrder:
    return KeeperOrder(OrderKind(kind), serial, "x", b"k" if kind == "save" else b"")


WAIT, HOLD, SAVE, CONTINUE, END, OVER = map(order, ("wait", "hold", "save", "continue", "end", "over"))


class Replaced(Exception):  # noqa: N818 - an event, not an error
    """The process has executed its program again."""


@dataclass
class Rig:
    """Everything around a keeper; ``events`` has what it did, in order.

    Attributes:
        script: what vhpcd answers to each question; afterwards OVER.
        failing: for each method of the guests the errors of its next calls.
        during: for each method what happens in it, such as SIGTERM.
    """

    script: list[Turn] = field(default_factory=list)
    failing: dict[str, list[Exception]] = field(default_factory=dict)
    during: dict[str, Callable[[], object]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    reports: list[KeeperReport | None] = field(default_factory=list)
    now: float = 1000.0
    held: bool = False
    prepared: bool = False
    alive: bool = True
    tombstone: bool = False
    new_version: bool = False
    terminated: bool = False
    storage: threading.Event = field(default_factory=threading.Event)
    """Until it is set a save does not end."""
    begun: Begin | None = None
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        self.storage.set()

    def run(self, begin: str = "run") -> list[str]:
        """One life of a keeper; returns what it did."""
        self.events, self.begun = [], None
        self.keeper = Keeper(
            Setting(GENERATION, "n1", 60.0), ScriptedVhpcd(self), self, self, clock=lambda: self.now
        )
        with contextlib.suppress(Replaced):
            self.keeper.run(Begin(begin))
        return self.events

    @property
    def said(self) -> list[str]:
        """The states that vhpcd was told, without repetitions."""
        states = [report.state.value for report in self.reports if report is not None]
        return [state for at, state in enumerate(states) if at == 0 or states[at - 1] != state]

    # --- guests ---------------------------------------------------------------

    def find(self) -> None:
        self._do("find")

    def prepare(self, serial: int, wait_s: float) -> None:
        assert (serial > 0, wait_s) == (True, 60.0)
        assert self.alive
        self.prepared = True

    def hold(self, wait_s: float) -> None:
        assert wait_s == 60.0
        assert self.alive
        assert self.prepared
        self._do("hold")
        self.held = True

    def save(self, order: KeeperOrder) -> SavedNode:
        assert self.held
        assert order.key == b"k"
        self.storage.wait(30)
        self._do("save")
        return SAVED

    def go_on(self) -> None:
        assert self.alive
        self._do("go_on")
        self.held = False

    def end(self) -> None:
        self._do("end")
        self.alive = False

    def _do(self, name: str) -> None:
        self.events.append(name)
        if name in self.during:
            self.during[name]()
        if errors := self.failing.get(name):
            raise errors.pop(0)

    # --- vhpcd ----------------------------------------------------------------

    def answer(self) -> KeeperOrder:
        turn: Turn = self.script.pop(0) if self.script else OVER
        if isinstance(turn, BaseException):
            raise turn
        return turn if isinstance(turn, KeeperOrder) else turn()

    # --- process --------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        self._stop()
        self.now += seconds

    def await_done(self, done: threading.Event, seconds: float) -> bool:
        self._stop()
        if self.storage.is_set():
            assert done.wait(30)
            self._stop()
            return True
        self.now += seconds
        return False

    def ask(self, question: Callable[[], KeeperOrder]) -> KeeperOrder:
        self._stop()
        return question()

    def comment(self, text: str) -> None:
        self.events.append(f"comment {text}")

    def replaced(self) -> bool:
        return self.new_version

    def job_ends(self) -> bool:
        return self.tombstone

    def again(self, begin: Begin) -> NoReturn:
        self.begun = begin
        self.new_version = False
        raise Replaced

    def storage_answers(self) -> KeeperOrder:
        """A turn of the script: from now on saves end."""
        self.storage.set()
        return WAIT

    def terminate(self) -> None:
        self.terminated = True

    def _stop(self) -> None:
        if self.terminated:
            raise Terminated


@dataclass
class ScriptedVhpcd:
    """vhpcd as the keeper asks it; HOLD in the script means PREPARE, and then HOLD."""

    rig: Rig
    then: KeeperOrder | None = None

    def keeper(
        self, generation: Generation, node: str, report: KeeperReport | None, wait_s: float
    ) -> KeeperOrder:
        assert (generation, node) == (GENERATION, "n1")
        assert report is None or (report.state is KeeperState.SAVED) == (report.saved is not None)
        said = None if report is None else (report.serial, report.state)
        if self.then is not None and said == (self.then.serial, KeeperState.PREPARED):
            answer, self.then = self.then, None
            return answer
        self.rig.reports.append(report)
        answer = self.rig.answer()
        if answer.kind is OrderKind.HOLD and (report is None or report.serial != answer.serial):
            self.then = answer
            return order("prepare", answer.serial)
        if answer.kind is OrderKind.WAIT:
            self.rig.now += wait_s
        return answer
