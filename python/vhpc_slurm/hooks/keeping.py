# SPDX-License-Identifier: Apache-2.0
"""The keeper's rules: it asks vhpcd for orders about the guests of a job on this node, obeys, and reports.

vhpcd decides about all nodes of a job and keeps its decisions in its database, so an order may come
twice, and a keeper may begin in the middle: it forgets nothing that vhpcd could not tell it again.
Guests are held while vhpcd answers; without an answer they continue after a while, and the checkpoint fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from vhpc_slurm.hooks.interrupts import Terminated, error_line
from vhpc_slurm.hooks.keeperport import Begin, Guests, Process, Saving, Setting, Vhpcd
from vhpc_slurm.hooks.pacing import ASK_S, PACE_S, RETRY_S
from vhpc_slurm.model import KeeperOrder, KeeperReport, KeeperState, OrderKind, SavedNode

log = logging.getLogger("vhpc")

SAVING_ASK_S = 10.0
"""vhpcd is asked at this interval while the guests are written: it may have given up the checkpoint."""
AWAY_S, AWAY_MOST_S = 2.0, 60.0
"""The pause after a question without an answer, which becomes longer if no guest waits for vhpcd."""
SPARE_S = 60.0
"""Guests are held so much longer than ``hold_timeout_s`` without an answer of vhpcd."""
HELD_MOST_S = 300.0
"""Guests are held so much longer than ``hold_timeout_s`` until vhpcd orders that they are saved."""
LEAVE_S = 60.0
"""A keeper that ends tries so long to let guests continue."""


class Phase(Enum):
    """The state of the guests.

    UNKNOWN means that they may be held or prepared, ENDING that they never continue.
    """

    UNKNOWN = "unknown"
    RUNNING = "running"
    PREPARED = "prepared"
    HELD = "held"
    SAVING = "saving"
    SAVED = "saved"
    ENDING = "ending"
    ENDED = "ended"


class Keeper(Struct):
    """Holds, saves, continues or ends the guests of a job on this node as vhpcd orders."""

    setting: Setting
    vhpcd: Vhpcd
    guests: Guests
    process: Process
    clock: Callable[[], float] = time.monotonic
    phase: Phase = Phase.UNKNOWN
    _serial: int = 0
    _saving: Saving | None = None
    _saved: SavedNode | None = None
    _report: KeeperReport | None = None
    _failed: KeeperReport | None = None
    _must_release: bool = False
    _heard: float = 0.0
    _held_since: float = 0.0
    _stopped: float | None = None
    _paused_s: float | None = None
    _away_s: float = 0.0

    def run(self, begin: Begin) -> bool:
        """Work until the job is over, or until SIGTERM; True if vhpcd has said that the job is over."""
        self._heard = self.clock()
        self.phase = Phase.RUNNING if begin is Begin.RUN else Phase.UNKNOWN
        self._must_release = begin in (Begin.RELEASE, Begin.LEAVE)
        try:
            if begin is Begin.LEAVE:
                self._leave()
                return False
            while self._step():
                pass
        except Terminated:
            self._terminated()
            return False
        self._over()
        return True

    def _step(self) -> bool:
        """One question and what follows from the answer; False if the job is over."""
        if self._must_release:
            self._release()
        if self._saving is not None and self.process.await_done(self._saving.done, SAVING_ASK_S):
            self._after_save(self._saving)
        began, before = self.clock(), (self.phase, self._serial)
        order = self._ask()
        if order is None:
            self._without_answer()
            return True
        if order.kind is OrderKind.OVER:
            log.info("keeper: the job is over")
            return False
        self._obey(order)
        self._check_time()
        if (self.phase, self._serial) == before and self._saving is None:
            slow = self.phase in (Phase.UNKNOWN, Phase.ENDING, Phase.ENDED)
            left = (RETRY_S if slow else PACE_S) - (self.clock() - began)
            if left > 0:
                self.process.pause(left)
        return True

    # --- vhpcd ----------------------------------------------------------------

    def _ask(self) -> KeeperOrder | None:
        """Report and ask; None if vhpcd does not answer."""
        setting, report = self.setting, self._current_report()
        wait_s = ASK_S if self.phase in (Phase.RUNNING, Phase.PREPARED, Phase.HELD, Phase.SAVED) else 0.0
        try:
            order = self.process.ask(
                lambda: self.vhpcd.keeper(setting.generation, setting.node, report, wait_s)
            )
        except Exception as err:
            if not self._away_s:
                log.warning("keeper: vhpcd gives no orders: %s", error_line(err))
            return None
        if self._away_s:
            log.info("keeper: vhpcd gives orders again")
        self._heard, self._away_s = self.clock(), 0.0
        if report is self._report:
            self._report = None
        return order

    def _current_report(self) -> KeeperReport | None:
        """The report for the next question.

        It takes a keeper that reports no held guests for one that has none: that report is repeated. Others
        are sent until vhpcd has one.
        """
        if self.phase is Phase.PREPARED:
            return KeeperReport(self._serial, KeeperState.PREPARED)
        if self.phase in (Phase.HELD, Phase.SAVING):
            return KeeperReport(self._serial, KeeperState.HELD)
        if self.phase is Phase.SAVED:
            return KeeperReport(self._serial, KeeperState.SAVED, self._saved)
        return self._report

    def _without_answer(self) -> None:
        limit_s = self.setting.hold_timeout_s + SPARE_S
        if self._may_be_held and self.clock() - self._heard > limit_s:
            self._give_up(f"vhpcd did not answer for {limit_s:.0f} s")
        waiting = self._may_be_held
        self._away_s = AWAY_S if waiting else min(AWAY_MOST_S, max(AWAY_S, 2 * self._away_s))
        self.process.pause(self._away_s)

    def _check_time(self) -> None:
        """Give up if vhpcd answers, but lets the guests wait without end."""
        limit_s = self.setting.hold_timeout_s + HELD_MOST_S
        waits = self.phase in (Phase.PREPARED, Phase.HELD)
        if waits and self.clock() - self._held_since > limit_s:
            self._give_up(f"there was no order to save the guests for {limit_s:.0f} s")

    # --- orders ---------------------------------------------------------------

    @property
    def _may_be_held(self) -> bool:
        return self.phase in (Phase.UNKNOWN, Phase.PREPARED, Phase.HELD, Phase.SAVING, Phase.SAVED)

    def _obey(self, order: KeeperOrder) -> None:
        match order.kind:
            case OrderKind.PREPARE:
                self._prepare(order.serial)
            case OrderKind.HOLD:
                self._hold(order.serial)
            case OrderKind.SAVE:
                self._save(order)
            case OrderKind.CONTINUE:
                self._continue(order)
            case OrderKind.END:
                self._end()
            case _:
                if self.phase is Phase.UNKNOWN:
                    self._release()

    def _prepare(self, serial: int) -> None:
        if self._is_for(serial):
            return  # vhpcd gets the report again
        if self._failed is not None and self._failed.serial == serial:
            self._report = self._failed
            return
        if self.phase in (Phase.ENDING, Phase.ENDED):
            self._fail(serial, "the guests have been ended")
            return
        if self._saving is not None:
            self.process.again(Begin.RELEASE)
        if self._may_be_held and not self._release():
            return  # vhpcd repeats the order
        if self.process.replaced():
            self.process.again(Begin.RUN)  # what holds and saves guests is imported now, in one version
        try:
            self.guests.find()
        except Exception as err:
            self._fail(serial, error_line(err))
            return
        self.phase = Phase.UNKNOWN
        try:
            self.guests.prepare(serial, self.setting.hold_timeout_s)
        except Exception as err:
            self._fail(serial, error_line(err))
            return
        self.phase, self._serial, self._paused_s = Phase.PREPARED, serial, None
        self._heard = self._held_since = self.clock()
        log.info("keeper: the guests are prepared for checkpoint %d", serial)

    def _hold(self, serial: int) -> None:
        if self.phase is not Phase.PREPARED or serial != self._serial:
            self._unexpected(serial, "the guests are not prepared: the keeper was started again")
            return
        self.phase, self._stopped = Phase.UNKNOWN, self.clock()
        try:
            self.guests.hold(self.setting.hold_timeout_s)
        except Exception as err:
            self._fail(serial, error_line(err))
            return
        self.phase = Phase.HELD
        self._heard = self._held_since = self.clock()
        log.info("keeper: the guests are held for checkpoint %d", serial)

    def _save(self, order: KeeperOrder) -> None:
        serial = order.serial
        if self.phase is Phase.HELD and serial == self._serial:
            self.phase, self._saving = Phase.SAVING, Saving(self.guests, order)
        else:
            self._unexpected(serial, "the guests are not held: the keeper was started again")

    def _unexpected(self, serial: int, line: str) -> None:
        """An order for guests in another state: vhpcd gets the report of this one again, or why it failed."""
        if self._is_for(serial):
            return
        if self._saving is not None:
            self.process.again(Begin.RELEASE)
        if self._failed is not None and self._failed.serial == serial:
            self._report = self._failed
        else:
            self._fail(serial, line)

    def _is_for(self, serial: int) -> bool:
        """Whether guests are prepared, held, or being saved, for this checkpoint."""
        phases = (Phase.PREPARED, Phase.HELD, Phase.SAVING, Phase.SAVED)
        return serial == self._serial and self.phase in phases

    def _after_save(self, saving: Saving) -> None:
        self._saving = None
        if saving.saved is None:
            self._fail(saving.serial, saving.line)
            return
        self.phase, self._saved = Phase.SAVED, saving.saved
        self._heard = self.clock()  # vhpcd has as long to answer to this report
        log.info("keeper: the guests are saved in checkpoint %d", saving.serial)

    def _continue(self, order: KeeperOrder) -> None:
        if self._saving is not None:
            self.process.again(Begin.RELEASE)  # the files close, and libvirt ends what it does for them
        if self.phase in (Phase.ENDING, Phase.ENDED):
            return
        if not self._may_be_held or self._release():
            serial = order.serial
            self._report = KeeperReport(serial, KeeperState.CONTINUED, paused_s=self._pause(serial))
            if order.comment:
                self.process.comment(order.comment)

    def _end(self) -> None:
        if self._saving is not None:
            self.process.again(Begin.ASK)
        if self.phase is Phase.RUNNING:
            log.warning("keeper: vhpcd ends a job whose guests continued after the checkpoint")
        if self.phase is Phase.ENDED:
            return
        self.phase, self._must_release = Phase.ENDING, False
        try:
            self.guests.end()
        except Exception as err:
            log.error("keeper: the guests are not ended: %s", error_line(err))
            return  # vhpcd repeats the order
        self.phase = Phase.ENDED
        log.info("keeper: the guests are ended, as the job ends with its checkpoint")

    def _give_up(self, line: str) -> None:
        if self._saving is not None:
            log.error("keeper: checkpoint %d: %s", self._serial, line)
            self.process.again(Begin.RELEASE)
        if self.phase is Phase.UNKNOWN:
            self._release()
        else:
            self._fail(self._serial, line)

    def _fail(self, serial: int, line: str) -> None:
        """Let the guests continue, and report why the checkpoint failed, also if they do not."""
        log.error("keeper: checkpoint %d: %s", serial, line)
        if self._may_be_held:
            self._release()
        report = KeeperReport(serial, KeeperState.FAILED, line=line, paused_s=self._pause(serial))
        self._report = self._failed = report

    def _pause(self, serial: int) -> float | None:
        """How long programs were stopped for a checkpoint; None if they were not, or are still."""
        return self._paused_s if serial == self._serial else None

    def _release(self) -> bool:
        """Let the guests continue; if that fails it is tried again before the next question."""
        try:
            self.guests.go_on()
        except Exception as err:
            if not self._must_release:
                log.error("keeper: the guests do not continue: %s", error_line(err))
            self.phase, self._must_release = Phase.UNKNOWN, True
            return False
        self.phase, self._must_release, self._saved = Phase.RUNNING, False, None
        if self._stopped is not None:
            self._paused_s, self._stopped = round(self.clock() - self._stopped, 3), None
        log.info("keeper: the guests continue")
        return True

    # --- its end --------------------------------------------------------------

    def _over(self) -> None:
        """The job has ended: guests that may have been ended by a valid checkpoint never continue.

        Others continue, so that they can write back what they hold when they power off.
        """
        may_be_valid = self.phase is Phase.SAVED or (self.phase is Phase.UNKNOWN and not self._must_release)
        if not may_be_valid:
            self._leave()

    def _leave(self) -> None:
        """Let the guests continue if they are held."""
        if self._saving is not None:
            self.process.again(Begin.LEAVE)
        until = self.clock() + LEAVE_S
        while self._may_be_held and not self._release():
            if self.clock() >= until:
                log.error("keeper: it ends, and the guests are still held")
                return
            try:
                self.process.pause(RETRY_S)
            except Terminated:
                return

    def _terminated(self) -> None:
        """An Epilog ends the guests itself; if a checkpoint has ended the job, they must never continue."""
        if self.process.job_ends():
            return
        if self.phase is Phase.UNKNOWN and not self._must_release:
            return  # they may have been ended by a checkpoint: the next keeper asks vhpcd
        log.warning("keeper: it is ended by SIGTERM while the job runs")
        self._leave()
