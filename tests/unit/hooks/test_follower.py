# SPDX-License-Identifier: Apache-2.0
"""The follower's rules, with a vhpcd that follows a script and a clock of its own."""

from __future__ import annotations

import pytest
from follower_rig import AWAY, OVER, OWN, Rig, member, with_gone

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, Roster

ONE, TWO, THREE = member(7, "n2", first=1), member(43, "n1", first=2), member(44, "n3", first=3)
NOTHING_NEW = Roster(5)


def test_all_members_are_applied_and_acknowledged() -> None:
    rig = Rig([Roster(5, (TWO, ONE)), NOTHING_NEW])
    assert rig.run(), "it is over"
    assert rig.events == ["network 5: 7 43", "guests 5: 7 43"]
    assert rig.asked == [(0, (), 25.0), (5, (), 25.0), (5, (), 25.0)]


def test_the_first_answer_is_applied_also_without_other_members() -> None:
    rig = Rig([Roster(0)])
    rig.run()
    assert rig.events == ["network 0: ", "guests 0: "]


def test_pages_are_asked_for_one_after_the_other() -> None:
    rig = Rig([Roster(3, (ONE,), more=True), Roster(4, (TWO,), more=True), Roster(5, (THREE,))])
    rig.run()
    assert rig.events[::2] == ["network 3: 7", "network 4: 7 43", "network 5: 7 43 44"]
    assert [applied for applied, _, _ in rig.asked] == [0, 3, 4, 5]
    assert rig.pauses == []


def test_members_join_change_and_leave() -> None:
    changed = with_gone(ONE, 0)
    left = (TWO.generation, Generation(99, 0, "0123abcd"))
    rig = Rig([Roster(5, (ONE, TWO)), Roster(6, (changed, THREE), left)])
    rig.run()
    assert rig.events[-1] == "guests 6: 7 44"
    assert rig.follower.known.others == (changed, THREE)


def test_the_own_record_is_no_other_member() -> None:
    own = with_gone(OWN, 0)
    rig = Rig([Roster(5, (ONE, own)), Roster(6, left=(own.generation,))])
    rig.run()
    assert rig.events[-1] == "guests 6: 7"
    assert rig.follower.known.own == own


def test_a_guest_that_ends_is_reported_at_once_and_from_then_on() -> None:
    rig = Rig([Roster(5, (ONE,))], own=member(42, "n1", "n2"))
    rig.script += [rig.ends(1), Roster(6, (TWO,)), NOTHING_NEW]
    rig.run()
    assert [gone for _, gone, _ in rig.asked] == [(), (), (1,), (1,), (1,)]
    assert rig.pauses == []


def test_a_network_that_refuses_is_not_acknowledged() -> None:
    refusals: list[Exception] = [NodeError("bridge failed"), NodeError("bridge failed"), OSError("full")]
    rig = Rig([Roster(5, (ONE,)), Roster(5, (ONE,)), Roster(6, (ONE, TWO))], refusing=refusals)
    rig.script += [Roster(6, (ONE, TWO))]
    rig.run()
    assert rig.events == ["refused", "refused", "refused", "network 6: 7 43", "guests 6: 7 43"]
    assert rig.asked == [(0, (), 25.0), (0, (), 0.0), (0, (), 0.0), (0, (), 0.0), (6, (), 25.0)]
    assert rig.pauses == [5.0, 5.0, 5.0]


def test_a_guest_that_does_not_answer_is_told_again_later() -> None:
    rig = Rig([Roster(5, (ONE,)), NOTHING_NEW, NOTHING_NEW], silent=[("n1",), ("n1",)])
    rig.run()
    assert rig.events == ["network 5: 7", *["guests 5: 7"] * 2]
    assert [(applied, wait_s) for applied, _, wait_s in rig.asked] == [
        (0, 25.0),
        (5, 25.0),
        (5, 5.0),
        (5, 25.0),
    ]


def test_without_an_answer_everything_stays_and_pauses_grow() -> None:
    rig = Rig([Roster(5, (ONE,)), *[AWAY] * 7, Roster(6, (ONE, TWO))])
    rig.run()
    assert rig.pauses == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]
    assert rig.events[-1] == "guests 6: 7 43"
    assert {applied for applied, _, _ in rig.asked[1:-1]} == {5}
    sooner = Rig([*[AWAY] * 4], chance=0.0)
    sooner.run()
    assert sooner.pauses == [0.5, 1.0, 2.0, 2.5]


def test_a_vhpcd_that_answers_early_is_not_asked_all_the_time() -> None:
    rig = Rig([Roster(5, (ONE,))])
    now = rig.now

    def early() -> Roster:
        rig.now -= 25.0
        return NOTHING_NEW

    rig.script += [early] * 4
    rig.run()
    assert rig.now - now == 4.0


def test_a_second_follower_begins_with_what_the_network_has() -> None:
    rig = Rig([NOTHING_NEW], version=5, others=(ONE, TWO))
    rig.run()
    assert rig.events == ["network 5: 7 43", "guests 5: 7 43"]
    assert rig.asked[0] == (5, (), 25.0)


def test_a_vhpcd_with_an_older_database_is_asked_for_all() -> None:
    rig = Rig([Roster(3, (TWO,)), Roster(3, (TWO,))], version=5, others=(ONE,))
    rig.run()
    assert rig.events[-1] == "guests 3: 43"
    assert [applied for applied, _, _ in rig.asked] == [5, 0, 3]


@pytest.mark.parametrize("tombstone", [True, False])
def test_sigterm_reports_all_guests_only_if_the_job_ends(tombstone: bool) -> None:
    rig = Rig([Roster(5, (ONE,))], own=member(42, "n1", "n2"))
    rig.script += [rig.terminate(tombstone=tombstone), OVER]
    assert not rig.run()
    assert rig.asked[2:] == ([(5, (0, 1), 0.0)] if tombstone else [])


def test_a_tombstone_ends_it_without_sigterm() -> None:
    rig = Rig(tombstone=True)
    assert not rig.run()
    assert rig.asked == [(0, (0,), 0.0)]
