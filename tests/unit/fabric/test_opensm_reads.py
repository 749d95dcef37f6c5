# SPDX-License-Identifier: Apache-2.0
"""Effects of partitions files on the real opensm: the ports' tables, read by smpquery."""

from __future__ import annotations

import random

import pytest
from fabric_lab import DEFAULT, GUIDS, HAVE_SIMULATOR, KEYS, NEEDED, SM_GUID, SimulatedFabric
from partition_files import BAD, OPEN

from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot, KeyState
from vhpc_slurm.fabric.opensm import complaint_of
from vhpc_slurm.model import Generation

pytestmark = pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED)

GOOD = DEFAULT + f"key_1000=0x1000, indx0 : {GUIDS[0]:#018x}=full, {GUIDS[1]:#018x}=full ;\n".encode()


@pytest.mark.parametrize("seed", range(4))
def test_opensm_reads_rendered_files_as_the_key_table(fabric: SimulatedFabric, seed: int) -> None:
    chance = random.Random(seed)
    assignments = []
    for number, pkey in enumerate(KEYS, 1):
        first, ranks = chance.randrange(4), chance.randrange(1, 5)
        state = chance.choice(list(KeyState))
        name = Generation(number, 0, "0" * 8)
        assignments.append(KeyAssignment(name, pkey, "x", first, min(ranks, 4 - first), 1, 1, state))
    # A pool of many keys also has ports that are not on this fabric (yet).
    assignments += [
        KeyAssignment(Generation(100 + number, 0, "0" * 8), 0x2000 + number, "x", 0, 100, 2, 1)
        for number in range(chance.randrange(20))
    ]
    meant = {guid: {0x7FFF} for guid in GUIDS} | {SM_GUID: {0xFFFF}}
    for assignment in assignments[:4]:
        if assignment.state.value in ("reserved", "applied", "active", "draining"):
            for rank in range(assignment.first_rank, assignment.first_rank + assignment.ranks):
                meant[GUIDS[KEYS.index(assignment.pkey) * 4 + rank]].add(0x8000 | assignment.pkey)
    snapshot = KeySnapshot(seed, tuple(assignments))
    data = partitions.render(partitions.of_snapshot(snapshot, ipoib=bool(seed % 2)), seed)
    assert partitions.lint(data) == ()
    fabric.replace(data)
    fabric.sweep()
    tables = fabric.tables()
    assert {guid: set(entries) for guid, entries in tables.items()} == meant
    for guid in GUIDS:
        if len(meant[guid]) == 2:
            assert tables[guid][0] != 0x7FFF, "indx0: the job's key is at index 0"


@pytest.mark.parametrize("text", [text for text, _, _, does in BAD if does == OPEN])
def test_opensm_fails_open_where_the_linter_reports_it(fabric: SimulatedFabric, text: str) -> None:
    fabric.replace(GOOD)
    fabric.sweep()
    assert set(fabric.tables(GUIDS[0])[GUIDS[0]]) == {0x7FFF, 0x9000}
    fabric.replace(text.encode())
    fabric.sweep()
    assert set(fabric.tables(GUIDS[0])[GUIDS[0]]) == {0xFFFF}
    assert partitions.lint(text.encode())


FULL = b"Nov 21 17:40:11 930111 [A] 0x01 -> pkey_mgr_process_physical_port: ERR 0512: no room left"
UP = b"Nov 21 17:40:11 940222 [A] 0x02 -> SUBNET UP"
MORE = b"Nov 21 17:40:11 935000 [A] 0x01 -> pkey_mgr_process_physical_port: ERR 0512: again"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((UP,), None),
        ((FULL,), (FULL, False)),
        ((UP, FULL), (FULL, False)),
        ((FULL, MORE, UP), (FULL, True)),
        ((), None),
    ],
)
def test_a_complaint_is_over_when_its_own_sweep_is(
    lines: tuple[bytes, ...], found: tuple[bytes, bool] | None
) -> None:
    said = complaint_of(b"\n".join(lines))
    assert said == (None if found is None else (found[0].decode(), found[1]))
