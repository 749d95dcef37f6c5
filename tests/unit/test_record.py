# SPDX-License-Identifier: Apache-2.0
"""Records against dataclasses with the same fields, by the functions of the module dataclasses."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from vhpc_slurm.record import Record


class Inner(Record, frozen=True):
    number: int


class Ours(Record, frozen=True, order=True):
    name: str
    inner: Inner = Inner(1)
    rest: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TheirsInner:
    number: int


@dataclasses.dataclass(frozen=True, order=True)
class Theirs:
    name: str
    inner: TheirsInner = TheirsInner(1)
    rest: tuple[int, ...] = ()


def test_records_are_copied_and_taken_apart_as_dataclasses() -> None:
    ours, theirs = Ours("a", Inner(2), (3, 4)), Theirs("a", TheirsInner(2), (3, 4))
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert dataclasses.replace(ours, name="b") == Ours("b", Inner(2), (3, 4))
    assert dataclasses.is_dataclass(ours)
    assert [one.name for one in dataclasses.fields(Ours)] == [one.name for one in dataclasses.fields(Theirs)]
    assert msgspec.json.encode(ours) == msgspec.json.encode(theirs)
    with pytest.raises(TypeError):
        dataclasses.replace(ours, nme="b")  # type: ignore[call-arg]


def test_records_are_values() -> None:
    assert {Ours("a"), Ours("a"), Ours("b")} == {Ours("b"), Ours("a")}
    assert Ours("a") < Ours("b")
    with pytest.raises(AttributeError):
        Ours("a").name = "b"  # type: ignore[misc]
