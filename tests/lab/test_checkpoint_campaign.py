# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints under random kills: each job does all of its turns once, and nothing is left."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from campaign.lives import KINDS, Return, last_turns, lines, wrong
from campaign.savings import Kill, Plan, carry_out
from cluster import Lab
from injection import settled
from saving import FOLDER, checkpoints_on

pytestmark = pytest.mark.lab

TURNS, CHECKPOINTS, KILLS = 200, 200, 60


@pytest.mark.promise("checkpoint.campaign")
@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_200_checkpoints_and_60_kills_lose_no_turn(lab: Lab) -> None:
    plan = Plan(random.randrange(1 << 32), TURNS, CHECKPOINTS, KILLS)
    print(plan)
    with checkpoints_on(lab):
        record = carry_out(lab, plan)
        kills = Counter(kill.what for kill in record.kills)
        print(record.valid, "checkpoints, refused:", *record.refused, "kills:", kills, sep="\n")
        assert record.found == []
        settled(lab)
        known = lab.vhpc("ctl", "checkpoint", "ls")["checkpoints"]
        lab.run("ctl", "vhpc", "checkpoint", "rm", *(one["name"] for one in known if one["state"] == "valid"))
        for node in lab.nodes:
            lab.run(node, "vhpc", "reconcile")
        assert lab.run("n1", "find", FOLDER, "-type", "f").out == ""
        assert lab.leases() == []


# --- of the campaign itself: it must be able to find something -------------------------------

NO_RETURN: tuple[Return, ...] = ()


def output(*parts: range, rank: int = 0, turns: int = 9) -> str:
    """The output of a task in runs with these turns."""
    all_turns = lines(rank, turns)
    said = [all_turns[turn - 1] for part in parts for turn in part]
    return "\n".join([*said, f"{rank} has {turns} turns", "end", ""])


@pytest.mark.vlab_itself
def test_all_turns_of_one_run_or_several_are_right() -> None:
    for parts in ([range(1, 10)], [range(1, 5), range(5, 10)]):
        assert list(wrong(output(*parts), (0,), 9, NO_RETURN)) == []


@pytest.mark.vlab_itself
@pytest.mark.parametrize(
    ("text", "clause"),
    [
        (output(range(1, 5), range(6, 10)), "task 0 has lost turns 5 to 5"),
        (output(range(1, 6), range(5, 10)), "task 0 repeats turns 5 to 5"),
        (output(range(1, 9)), "task 0 ends with turn 8"),
        (output(range(1, 10)).replace(" 9 turns", " 8 turns"), "task 0 has other turns in its own file"),
        (output(range(1, 10)) + "end\n", "the script has not ended once"),
        (output(range(1, 10)).replace(lines(0, 9)[3], f"0 4 {'0' * 16}"), "task 0 has wrong bytes in turn 4"),
        (output(range(1, 10)).replace(lines(0, 9)[3], lines(1, 9)[3].replace("1 4", "0 4")),
         "task 0 has wrong bytes in turn 4"),
    ],
)  # fmt: skip
def test_a_lost_doubled_or_wrong_turn_is_found(text: str, clause: str) -> None:
    assert clause in list(wrong(text, (0,), 9, NO_RETURN))


@pytest.mark.vlab_itself
def test_turns_are_repeated_after_a_fault_back_to_its_checkpoint() -> None:
    text = output(range(1, 7), range(4, 10))
    for after, least, right in (({0: 6}, 3, True), ({0: 6}, 0, True), ({0: 6}, 4, False), ({0: 5}, 3, False)):
        found = list(wrong(text, (0,), 9, [Return(after, {0: least})]))
        assert (found == []) is right, (after, least, found)
    assert list(wrong(text, (0,), 9, [Return(None, {0: 3})])) == []
    assert list(wrong(text, (0,), 9, [Return(None, {0: 4})])) == ["task 0 repeats turns 4 to 6"]
    for ends, right in ((1, True), (2, True), (3, False)):
        found = list(wrong(output(range(1, 10)) + "end\n" * (ends - 1), (0,), 9, [Return(None, {0: 0})]))
        assert (found == []) is right, (ends, found)


@pytest.mark.vlab_itself
def test_tasks_of_one_output_are_told_apart() -> None:
    texts = [output(range(1, 10), rank=rank).splitlines() for rank in (0, 1)]
    both = "\n".join(line for pair in zip(*texts, strict=True) for line in pair if line != "end") + "\nend\n"
    assert list(wrong(both, (0, 1), 9, NO_RETURN)) == []
    assert last_turns(both, (0, 1)) == {0: 9, 1: 9}
    assert last_turns("", KINDS["step"].ranks) == {0: 0, 1: 0}


@pytest.mark.vlab_itself
def test_a_kill_explains_what_happens_to_its_job_soon_after() -> None:
    assert Kill("qemu", 100, "n1", 7).touches([6, 7], 150, 160)
    assert not Kill("qemu", 100, "n1", 7).touches([8], 100, 160)
    assert Kill("vhpcd", 100, "ctl", 0).touches([8], 150, 160)
    assert not Kill("vhpcd", 100, "ctl", 0).touches([8], 170, 180)
    assert not Kill("vhpcd", 100, "ctl", 0).touches([8], 50, 90)
