# SPDX-License-Identifier: Apache-2.0
"""The state machine of a lease and its key: every state against every event."""

from __future__ import annotations

import itertools
from dataclasses import replace

from controller_lab import allocation, identity, request

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.leases.transitions import (
    STATES,
    Aged,
    Applied,
    Ended,
    Event,
    Holding,
    LostLease,
    Proven,
    Stripped,
    Unclean,
    transition,
)
from vhpc_slurm.fabric.keys import KeyAssignment, KeyState
from vhpc_slurm.model import Generation, LeaseRecord, LeaseState, NetworkIdentity

GENERATION = Generation(1, 0, "0" * 8)
BORN = rules.reserve(GENERATION, request(1), allocation("n1"), identity(), NetworkIdentity(), 1.0)
KEY = KeyAssignment(GENERATION, 0x1000, "job", 0, 1, 1, 1)

NODES: dict[str, dict[str, object]] = {
    "nobody took it": {},
    "taken": {"taken": ("n1",)},
    "clean": {"taken": ("n1",), "acknowledged": ("n1",)},
    "not clean": {"taken": ("n1",), "unclean": (("n1", "VF still bound"),)},
    "fenced, then not clean": {"unclean": (("n1", "VF still bound"),)},
}
EVENTS: tuple[Event, ...] = (
    Applied(),
    Proven(),
    Ended(),
    Unclean("n1: why"),
    LostLease(),
    Stripped(30.0),
    Aged(1.0),
    Aged(31.0),
)

# Transitions of docs/fabric.md: (lease, key) and event -> (lease, key). "-" is none.
STEPS = """
reserved reserved   Applied   reserved applied
reserved applied    Proven    ready active
reserved reserved   Ended     ending draining
reserved applied    Ended     ending draining
ready active        Ended     ending draining
ready -             Ended     ending -
refused -           Ended     ending -
ending draining     Unclean   ending tombstone
released quarantine Unclean   released tombstone
- quarantine        Unclean   - tombstone
ending -            Stripped  released -
ending draining     Stripped  released quarantine
ending tombstone    Stripped  released quarantine
released tombstone  Stripped  released quarantine
- tombstone         Stripped  - quarantine
released quarantine Aged(31)  released -
- quarantine        Aged(31)  - -
"""


def drawn() -> dict[tuple[str, str, str], tuple[str, str]]:
    rows = (line.split() for line in STEPS.strip().splitlines())
    return {(lease, key, event): (to_lease, to_key) for lease, key, event, to_lease, to_key in rows}


def holding(lease: LeaseState | None, key: KeyState | None, nodes: str) -> Holding:
    record: LeaseRecord | None = None
    if lease is not None:
        record = replace(BORN, lease=replace(BORN.lease, state=lease), **NODES[nodes])  # type: ignore[arg-type]
    left_s = 30.0 if key is KeyState.QUARANTINE else 0.0
    return Holding(record, None if key is None else replace(KEY, state=key, left_s=left_s))


def names(held: Holding) -> tuple[str, str]:
    return (held.state.value if held.state else "-", held.key_state.value if held.key_state else "-")


CASES = [
    (lease, key, nodes, event)
    for lease, keys in STATES.items()
    for key, nodes, event in itertools.product(sorted(keys, key=str), NODES, EVENTS)
]


def label(event: Event) -> str:
    return f"Aged({event.elapsed_s:.0f})" if isinstance(event, Aged) else type(event).__name__


def may_hold(held: Holding, nodes: str) -> bool:
    """Whether a node may still hold a generation that has ended."""
    if held.state in (None, LeaseState.RELEASED):
        return held.state is not None and "not clean" in nodes
    if nodes == "fenced, then not clean":  # it never took the lease, so only a tombstone keeps it
        return held.key_state is KeyState.TOMBSTONE
    return nodes in ("taken", "not clean")


def test_each_event_leads_where_the_table_says_and_else_nowhere() -> None:
    table, seen = drawn(), set()
    for lease, key, nodes, event in CASES:
        before = holding(lease, key, nodes)
        step = (*names(before), label(event))
        expected = table.get(step, names(before))
        if step in table and isinstance(event, Ended) and key and "not clean" in nodes:
            expected = ("ending", "tombstone")
        if isinstance(event, Stripped) and may_hold(before, nodes):
            expected = names(before)
        after = transition(before, event, 2.0)
        assert names(after) == expected, (step, nodes)
        assert after.key_state in STATES[after.state]
        if names(after) != names(before):
            seen.add(step)
        else:
            assert after == before or isinstance(event, Aged)
    assert seen == set(table), "each step of the table was taken"


def test_a_key_without_a_lease_gets_a_tombstone_in_any_state() -> None:
    for key in (KeyState.RESERVED, KeyState.APPLIED, KeyState.ACTIVE, KeyState.DRAINING):
        after = transition(holding(None, key, "taken"), LostLease(), 2.0)
        assert after.key_state is KeyState.TOMBSTONE
        assert after.key is not None
        assert after.key.note == "it has no lease any more"


def test_a_tombstone_names_the_first_unclean_node() -> None:
    after = transition(holding(LeaseState.READY, KeyState.ACTIVE, "not clean"), Ended(), 2.0)
    assert after.key is not None
    assert after.key.note == "n1: VF still bound"
