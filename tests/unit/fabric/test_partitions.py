# SPDX-License-Identifier: Apache-2.0
"""OpenSM's partitions file: what the linter refuses, and that it takes what is rendered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_files import BAD, DEFAULT, A, B, C

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot, KeyState
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.model import Generation

GOOD = (
    f"# two jobs\n\n{DEFAULT}key_1000=0x1000, indx0, ipoib :\n"
    f"    {A}=full,\n    {B}=full ;\nkey_1001=0x1001 : {C}=full ;\n"
)


def test_a_good_file_is_read() -> None:
    assert partitions.lint(GOOD.encode()) == ()
    default, first, second = partitions.parse(GOOD.encode())
    assert default == partitions.DEFAULT
    assert first == IbPartition("key_1000", 0x1000, ((A, True), (B, True)), ("indx0", "ipoib"))
    assert second == IbPartition("key_1001", 0x1001, ((C, True),))


@pytest.mark.parametrize(("text", "line", "reason", "opensm"), BAD)
def test_files_that_opensm_would_misread_are_refused(text: str, line: int, reason: str, opensm: str) -> None:
    defects = partitions.lint(text.encode())
    assert [defect for defect in defects if defect.line == line and reason in defect.reason], defects
    with pytest.raises(FabricError, match="is refused"):
        partitions.parse(text.encode())


@pytest.mark.parametrize("line", [b"what is this ;\n", b"\xff\n", b"x" * 5000 + b"\n"])
def test_the_linter_stops_after_a_thousand_defects(line: bytes) -> None:
    defects = partitions.lint(DEFAULT.encode() + line * 3000)
    assert [one.line for one in defects] == list(range(2, 1002))


def test_an_endless_statement_is_read_to_the_longest_allowed() -> None:
    (defect,) = partitions.lint(b"a\n" * (partitions.MAX_STATEMENT + 10))
    assert (defect.line, defect.reason) == (1, "the statement that begins here has no ';'")


def test_all_defects_are_listed_in_the_order_of_lines() -> None:
    text = DEFAULT + f"a=0x0 : {A}=full ;\nb=0x1001 : {B} ;\nb=0x1001 : X=full ;\n"
    assert [defect.line for defect in partitions.lint(text.encode())] == [2, 3, 4, 4, 4]


def assignments_strategy() -> st.SearchStrategy[tuple[KeyAssignment, ...]]:
    """Assignments as an allocator could have made them: each of a key of its own."""
    shape = st.tuples(
        st.integers(0, 60000),
        st.integers(1, 300),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from(list(KeyState)),
    )
    return st.dictionaries(st.integers(1, 0x7FFE), shape, max_size=5).map(
        lambda shapes: tuple(
            KeyAssignment(Generation(number, 0, "0" * 8), pkey, "x", first, ranks, rails, vfs, state)
            for number, (pkey, (first, ranks, rails, vfs, state)) in enumerate(shapes.items(), 1)
        )
    )


@given(assignments=assignments_strategy(), epoch=st.integers(0, 10**18 - 1), ipoib=st.booleans())
def test_rendered_files_pass_and_match_the_key_table(
    assignments: tuple[KeyAssignment, ...], epoch: int, ipoib: bool
) -> None:
    snapshot = KeySnapshot(epoch, assignments)
    data = partitions.render(partitions.of_snapshot(snapshot, ipoib=ipoib), epoch, "0f")
    assert partitions.lint(data) == ()
    assert partitions.origin(data) == (epoch, "0f")
    assert max(map(len, data.splitlines())) < 4095
    on = ("reserved", "applied", "active", "draining")
    meant = {
        one.pkey: {
            0x02CC << 48 | one.pkey << 32 | rail << 24 | rank << 8 | vf
            for rank in range(one.first_rank, one.first_rank + one.ranks)
            for rail in range(one.rails)
            for vf in range(one.vfs)
        }
        for one in assignments
        if one.state.value in on
    }
    read = {one.pkey: {int(guid, 16) for guid, _ in one.members} for one in partitions.parse(data)[1:]}
    assert read == meant


@given(st.binary(max_size=300) | st.text(alphabet="Dk=0x17f:;,#\n ALfulimted", max_size=200).map(str.encode))
def test_no_bytes_make_the_linter_fail(data: bytes) -> None:
    if not partitions.lint(data):
        assert partitions.parse(data)[0] == partitions.DEFAULT or b"ipoib" not in data


@given(assignments=assignments_strategy().filter(len), cut=st.integers(1, 10**6))
def test_a_file_that_is_cut_off_anywhere_is_refused(assignments: tuple[KeyAssignment, ...], cut: int) -> None:
    data = partitions.render(partitions.of_snapshot(KeySnapshot(1, assignments)), 1)
    torn = data[: len(data) - 1 - cut % (len(data) - 1)]
    whole_statements = torn.endswith(b";\n")
    assert bool(partitions.lint(torn)) != whole_statements
