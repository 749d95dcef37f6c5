# SPDX-License-Identifier: Apache-2.0
"""The keeper's rules: each order in each state, and what it does without vhpcd, guests or time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from keeper_rig import AWAY, CONTINUE, END, HOLD, OVER, SAVE, SAVED, WAIT, Rig, Turn, order

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import KeeperOrder, KeeperReport, KeeperState, OrderKind
from vhpc_slurm.record import Record

DONE = ["find", "hold", "save"]
REFUSED = NodeError("guest n1 cannot be stopped", "step 5 runs")


def test_a_checkpoint_holds_saves_and_continues() -> None:
    rig = Rig([WAIT, HOLD, WAIT, SAVE, WAIT, CONTINUE, WAIT])
    assert rig.run() == [*DONE, "go_on"]
    assert rig.said == ["held", "saved", "continued"]
    assert (rig.held, rig.alive) == (False, True)


def test_a_comment_is_begun_when_the_guests_continue() -> None:
    told = KeeperOrder(OrderKind.CONTINUE, 5, "x", comment="vhpc: saved")
    assert Rig([HOLD, SAVE, told, WAIT]).run() == [*DONE, "go_on", "comment vhpc: saved"]
    # guests that do not continue come first
    rig = Rig([HOLD, SAVE, told, WAIT], failing={"go_on": [REFUSED]})
    assert rig.run() == [*DONE, "go_on", "go_on"]


def test_guests_are_held_only_when_all_nodes_are_prepared() -> None:
    rig = Rig([order("prepare"), WAIT, WAIT, HOLD, CONTINUE])
    assert rig.run() == ["find", "hold", "go_on"]
    assert rig.said == ["prepared", "held", "continued"]


def test_a_job_that_ends_with_its_checkpoint_never_continues() -> None:
    rig = Rig([HOLD, SAVE, END, END, OVER])
    assert rig.run() == [*DONE, "end"]
    assert rig.said == ["held", "saved"]
    assert not rig.alive


def test_a_job_may_be_saved_again() -> None:
    rig = Rig([HOLD, SAVE, CONTINUE, order("hold", 6), order("save", 6), order("continue", 6)])
    assert rig.run() == [*DONE, "go_on", *DONE, "go_on"]
    assert [report.serial for report in rig.reports if report is not None][-1] == 6


def test_held_guests_are_reported_with_each_question() -> None:
    rig = Rig([HOLD, WAIT, SAVE, WAIT, WAIT, CONTINUE, WAIT, WAIT])
    rig.run()
    held = KeeperReport(5, KeeperState.HELD)
    saved = KeeperReport(5, KeeperState.SAVED, SAVED)
    assert rig.reports == [
        *(None, held, held, saved, saved, saved),
        # the answers to three questions took 25 s each
        *(KeeperReport(5, KeeperState.CONTINUED, paused_s=75.0), None, None),
    ]


def test_guests_that_are_being_saved_are_reported_as_held() -> None:
    rig = Rig([HOLD, SAVE, SAVE, WAIT])
    rig.storage.clear()
    rig.script += [rig.storage_answers, CONTINUE]
    assert rig.run() == [*DONE, "go_on"]
    assert [report.state.value for report in rig.reports if report] == [
        *(["held"] * 4),
        "saved",
        "continued",
    ]


class Case(Record, frozen=True):
    """The effect of one more order in the state after some turns."""

    before: tuple[KeeperOrder, ...]
    order: KeeperOrder
    does: tuple[str, ...]
    says: str = ""
    begin: str = "run"


RUNNING, HELD, KEPT = (), (HOLD,), (HOLD, SAVE, WAIT)
ENDED = (HOLD, SAVE, END)
OTHER_HOLD, OTHER_SAVE = order("hold", 6), order("save", 6)
CASES = {
    "running-wait": Case(RUNNING, WAIT, ()),
    "running-hold": Case(RUNNING, HOLD, ("find", "hold"), "held"),
    "running-save": Case(RUNNING, SAVE, (), "failed"),
    "running-continue": Case(RUNNING, CONTINUE, (), "continued"),
    "running-end": Case(RUNNING, END, ("end",)),
    "held-wait": Case(HELD, WAIT, (), "held"),
    "held-hold": Case(HELD, HOLD, (), "held"),
    "held-other": Case(HELD, OTHER_HOLD, ("go_on", "find", "hold"), "held"),
    "held-save": Case(HELD, SAVE, ("save",), "saved"),
    "held-other-save": Case(HELD, OTHER_SAVE, ("go_on",), "failed"),
    "held-continue": Case(HELD, CONTINUE, ("go_on",), "continued"),
    "held-end": Case(HELD, END, ("end",)),
    "saved-wait": Case(KEPT, WAIT, (), "saved"),
    "saved-hold": Case(KEPT, HOLD, (), "saved"),
    "saved-save": Case(KEPT, SAVE, (), "saved"),
    "saved-other": Case(KEPT, OTHER_HOLD, ("go_on", "find", "hold"), "held"),
    "saved-continue": Case(KEPT, CONTINUE, ("go_on",), "continued"),
    "saved-end": Case(KEPT, END, ("end",)),
    "ended-wait": Case(ENDED, WAIT, ()),
    "ended-hold": Case(ENDED, OTHER_HOLD, (), "failed"),
    "ended-save": Case(ENDED, OTHER_SAVE, (), "failed"),
    "ended-continue": Case(ENDED, CONTINUE, ()),
    "ended-end": Case(ENDED, END, ()),
    "unknown-wait": Case((), WAIT, ("go_on",), begin="ask"),
    "unknown-hold": Case((), HOLD, ("go_on", "find", "hold"), "held", begin="ask"),
    "unknown-save": Case((), SAVE, ("go_on",), "failed", begin="ask"),
    "unknown-continue": Case((), CONTINUE, ("go_on",), "continued", begin="ask"),
    "unknown-end": Case((), END, ("end",), begin="ask"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_order_in_each_state(case: Case) -> None:
    rig = Rig(list(case.before))

    def mark() -> KeeperOrder:
        rig.events.append("now")
        return case.order

    rig.script += [mark, WAIT]
    events = rig.run(case.begin)
    done = events[events.index("now") + 1 :]
    if done[-1:] == ["go_on"] and case.does[-1:] in (("hold",), ()):
        done.pop()  # at its end
    assert tuple(done) == case.does
    last = rig.reports[len(case.before) + 1]
    assert (last.state.value if last else "") == case.says


@pytest.mark.parametrize(
    ("turns", "begin", "does"),
    [
        ([OVER], "run", []),
        ([HOLD, OVER], "run", ["find", "hold", "go_on"]),
        ([HOLD, SAVE, WAIT, OVER], "run", DONE),
        ([OVER], "ask", []),
        ([OVER], "release", ["go_on"]),
    ],
)
def test_guests_that_a_checkpoint_may_have_ended_stay_held(
    turns: list[Turn], begin: str, does: list[str]
) -> None:
    assert Rig(turns).run(begin) == does


# --- vhpcd is away ----------------------------------------------------------------


@pytest.mark.parametrize("before", [HELD, KEPT])
def test_guests_are_not_held_for_ever_without_vhpcd(before: tuple[KeeperOrder, ...]) -> None:
    rig = Rig([*before, *[AWAY] * 80, WAIT])
    began = rig.now
    ended: list[float] = []
    rig.during["go_on"] = lambda: ended.append(rig.now)
    rig.run()
    assert rig.events[-1] == "go_on"
    assert 120 < ended[0] - began - 25 * (len(before) == 3) <= 125
    assert rig.reports[-1] is None
    failed = [report for report in rig.reports if report is not None and report.state is KeeperState.FAILED]
    assert failed[-1].line == "vhpcd did not answer for 120 s"
    assert rig.said[-1] == "failed"


def test_a_short_absence_of_vhpcd_changes_nothing() -> None:
    rig = Rig([HOLD, *[AWAY] * 50, SAVE, *[AWAY] * 50, CONTINUE])
    assert rig.run() == [*DONE, "go_on"]


def test_a_lost_report_is_repeated_until_vhpcd_has_it() -> None:
    rig = Rig([HOLD, AWAY, SAVE, AWAY, CONTINUE, AWAY, AWAY, WAIT, WAIT])
    rig.run()
    states = [report.state.value if report else "" for report in rig.reports]
    assert states == ["", "held", "held", *["saved"] * 2, *["continued"] * 3, "", ""]


def test_an_absent_vhpcd_is_asked_less_often_by_running_jobs() -> None:
    rig = Rig([*[AWAY] * 20, HOLD, CONTINUE])
    began = rig.now
    assert rig.run() == ["find", "hold", "go_on"]
    assert rig.now - began > 600


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(5, "I/O error")])
def test_an_unexpected_error_counts_as_no_answer(error: Exception) -> None:
    assert Rig([HOLD, error, SAVE, CONTINUE]).run() == [*DONE, "go_on"]


def test_the_wait_for_an_order_to_save_guests_ends() -> None:
    rig = Rig([HOLD, *[WAIT] * 20])
    began = rig.now
    ended: list[float] = []
    rig.during["go_on"] = lambda: ended.append(rig.now)
    rig.run()
    assert 360 < ended[0] - began <= 390
    assert rig.said == ["held", "failed"]


# --- failures of this node --------------------------------------------------------


def test_guests_that_cannot_be_held_continue_with_a_reason() -> None:
    rig = Rig([HOLD, HOLD, WAIT], failing={"hold": [REFUSED]})
    assert rig.run() == ["find", "hold", "go_on"]
    failed = KeeperReport(5, KeeperState.FAILED, line=REFUSED.line(), paused_s=0.0)
    assert rig.reports == [None, failed, failed, None], "the order is repeated, not the attempt"


def test_a_pause_is_told_of_its_own_checkpoint() -> None:
    rig = Rig([HOLD, WAIT, CONTINUE, order("prepare", 6), order("continue", 6), order("hold", 7), WAIT])

    def slow() -> None:
        rig.now += 3.0
        if rig.events.count("hold") == 2:
            rig.failing["hold"] = [REFUSED]

    rig.during["hold"] = slow
    rig.run()
    ended = [one for one in rig.reports if one and one.state.value in ("continued", "failed")]
    assert [(one.serial, one.state.value, one.paused_s) for one in ended] == [
        (5, "continued", 28.0),
        (6, "continued", None),
        (7, "failed", 3.0),
    ]


def test_guests_that_cannot_be_found_are_not_touched() -> None:
    rig = Rig([HOLD, WAIT], failing={"find": [NodeError("no record of the guests")]})
    assert rig.run() == ["find"]
    assert rig.said == ["failed"]


@pytest.mark.parametrize("error", [NodeError("the folder is full"), RuntimeError("a bug")])
def test_a_save_that_fails_lets_the_guests_continue(error: Exception) -> None:
    rig = Rig([HOLD, SAVE, WAIT], failing={"save": [error]})
    assert rig.run() == [*DONE, "go_on"]
    assert rig.said == ["held", "failed"]


def test_guests_are_told_to_continue_until_they_do() -> None:
    rig = Rig([HOLD, CONTINUE, WAIT, WAIT, WAIT], failing={"go_on": [REFUSED, REFUSED]})
    assert rig.run() == ["find", "hold", *["go_on"] * 3]
    assert not rig.held


def test_a_failure_is_reported_before_the_guests_continue() -> None:
    rig = Rig([HOLD, SAVE, WAIT, WAIT], failing={"save": [REFUSED], "go_on": [REFUSED, REFUSED]})
    assert rig.run() == [*DONE, *["go_on"] * 3]
    assert rig.said == ["held", "failed"]


def test_guests_that_cannot_be_ended_never_continue() -> None:
    rig = Rig([HOLD, SAVE, END, *[AWAY] * 200, END, END], failing={"end": [REFUSED, REFUSED]})
    assert rig.run() == [*DONE, "end", "end", "end"]
    assert not rig.alive


# --- the program starts again -----------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "begin"),
    [(CONTINUE, "release"), (OTHER_HOLD, "release"), (OTHER_SAVE, "release"), (OVER, "leave"), (END, "ask")],
)
def test_an_order_that_ends_a_save_restarts_the_program(turn: Turn, begin: str) -> None:
    rig = Rig([HOLD, SAVE, turn])
    rig.storage.clear()
    assert rig.run() == ["find", "hold"]
    assert rig.begun is not None
    assert rig.begun.value == begin
    rig.storage.set()


def test_without_vhpcd_a_save_is_given_up_as_well() -> None:
    rig = Rig([HOLD, SAVE, *[AWAY] * 20])
    rig.storage.clear()
    rig.run()
    assert rig.begun is not None
    assert rig.begun.value == "release"
    rig.script = [SAVE, WAIT]
    events = list(rig.run("release"))
    rig.storage.set()
    assert "go_on" in events
    assert rig.said[-1] == "failed", "vhpcd still waits for this node's guests"


def test_a_new_version_is_started_before_guests_are_held() -> None:
    rig = Rig([HOLD], new_version=True)
    assert rig.run() == []
    assert rig.begun is not None
    rig.script = [HOLD, SAVE, CONTINUE]
    assert rig.run(rig.begun.value) == [*DONE, "go_on"]


# --- SIGTERM ----------------------------------------------------------------------


POINTS: dict[str, tuple[list[Turn], list[str]]] = {
    "find": ([HOLD, SAVE], ["find", "go_on"]),
    "hold": ([HOLD, SAVE], ["find", "hold", "go_on"]),
    "save": ([HOLD, SAVE], [*DONE]),
    "go_on": ([HOLD, SAVE, CONTINUE, HOLD], [*DONE, "go_on"]),
    "end": ([HOLD, SAVE, END, END], [*DONE, "end"]),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("epilog", [False, True])
def test_sigterm_while_something_is_done_with_the_guests(point: str, epilog: bool) -> None:
    turns, does = POINTS[point]
    rig = Rig(list(turns), tombstone=epilog)
    rig.during[point] = rig.terminate
    events = rig.run()
    if epilog and does[-1] == "go_on" and point != "go_on":
        does = does[:-1]  # the Epilog ends the guests
    assert events == does
    if point == "save":
        assert (rig.begun is not None) == (not epilog)


def terminating(rig: Rig, answer: KeeperOrder) -> Callable[[], KeeperOrder]:
    def terminated() -> KeeperOrder:
        rig.terminate()
        return answer

    return terminated


@pytest.mark.parametrize(
    ("before", "answer", "begin", "does"),
    [
        ((), WAIT, "run", []),
        (HELD, WAIT, "run", ["find", "hold", "go_on"]),
        (KEPT, WAIT, "run", [*DONE, "go_on"]),
        (ENDED, WAIT, "run", [*DONE, "end"]),
        ((), HOLD, "run", ["find", "go_on"]),
        ((), END, "ask", ["end"]),
        ((), WAIT, "release", ["go_on"]),
    ],
)
def test_sigterm_while_vhpcd_is_asked(
    before: tuple[KeeperOrder, ...], answer: KeeperOrder, begin: str, does: list[str]
) -> None:
    rig = Rig(list(before))
    rig.script.append(terminating(rig, answer))
    assert rig.run(begin) == does
    assert not rig.held or not rig.alive


def test_sigterm_before_the_first_answer_changes_nothing() -> None:
    rig = Rig(held=True, terminated=True)
    assert rig.run("ask") == []


def test_a_keeper_that_leaves_tries_for_a_while() -> None:
    rig = Rig(held=True, failing={"go_on": [REFUSED] * 3})
    assert rig.run("leave") == ["go_on"] * 4
    rig = Rig(held=True, failing={"go_on": [REFUSED] * 100})
    assert 10 < len(rig.run("leave")) < 20


# --- kill -9 ----------------------------------------------------------------------


@pytest.mark.parametrize("before", [HELD, KEPT])
@pytest.mark.parametrize(("answer", "does"), [(WAIT, "go_on"), (CONTINUE, "go_on"), (END, "end")])
def test_a_new_keeper_asks_before_guests_continue(
    before: tuple[KeeperOrder, ...], answer: KeeperOrder, does: str
) -> None:
    rig = Rig([*before, RuntimeKill()])
    with pytest.raises(RuntimeKill):
        rig.run()
    assert rig.held
    rig.script = [AWAY, answer]
    assert rig.run("ask") == [does]
    assert rig.reports[-2:].count(None) >= 1


def test_guests_of_a_new_keeper_continue_without_vhpcd() -> None:
    rig = Rig([*[AWAY] * 70], held=True)
    assert rig.run("ask") == ["go_on"]


class RuntimeKill(BaseException):
    """SIGKILL: nothing of the keeper runs any more."""
