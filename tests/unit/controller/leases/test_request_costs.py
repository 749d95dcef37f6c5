# SPDX-License-Identifier: Apache-2.0
"""Requests that each node of a job makes: what one costs does not grow with the number of nodes."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from controller_lab import Alone, allocation, identity, request
from row_counter import Counting
from store_backends import ENGINES, open_at, place

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import Generation, LeaseState, NodeUsage


def rows_of_acknowledgements(engine: str, folder: Path, count: int, *, first_ends: bool) -> list[int]:
    """Rows that were read for the acknowledgement of each node of a job."""
    store = open_at(place(engine, folder))
    counting = Counting(store.database)
    store._build(counting)
    alone = Alone(store, NoNetwork(), reserve_mib=64)
    names = [f"n{number}" for number in range(count)]
    generation = alone.open(request(), allocation(*names), identity()).lease.generation
    for name in names:
        assert alone.take(42, 0, name) is not None
    if first_ends:
        alone.end(42, None)
    found = [acknowledged(alone, counting, generation, name) for name in names]
    alone.end(42, None)
    assert store.state(generation) is LeaseState.RELEASED
    store.close()
    return found


def acknowledged(alone: Alone, counting: Counting, generation: Generation, name: str) -> int:
    before = counting.rows
    alone.acknowledge(generation, name, clean=True, note="", timeline=None)
    return counting.rows - before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_look_at_a_lease_reads_no_list_of_nodes(engine: str, tmp_path: Path) -> None:
    store = open_at(place(engine, tmp_path))
    counting = Counting(store.database)
    store._build(counting)
    alone = Alone(store, NoNetwork(), reserve_mib=64)
    names = [f"n{number}" for number in range(300)]
    lease = alone.open(request(), allocation(*names), identity()).lease
    for name in names:
        assert alone.take(42, 0, name) is not None
    before = counting.rows
    for restart in (None, 0):
        found = alone.look(42, restart)
        assert found is not None
        assert found.lease == lease
    assert counting.rows - before <= 2
    assert alone.look(42, 1) is None
    store.close()


@pytest.mark.promise("net.ack-cost")
@pytest.mark.parametrize("first_ends", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_acknowledgement_reads_no_list_of_nodes(engine: str, tmp_path: Path, *, first_ends: bool) -> None:
    """Only the last one does, which releases the lease."""
    (tmp_path / "few").mkdir()
    few = rows_of_acknowledgements(engine, tmp_path / "few", 3, first_ends=first_ends)
    many = rows_of_acknowledgements(engine, tmp_path, 300, first_ends=first_ends)
    assert set(many[:-1]) == set(few[:-1])
    assert max(many[:-1]) <= 3


def _count(steps: Iterator[int]) -> int:
    next(steps)
    return 0  # go on


@pytest.mark.parametrize("backwards", [False, True])
def test_a_report_of_usage_costs_the_same_in_jobs_of_any_size(tmp_path: Path, *, backwards: bool) -> None:
    """Counted are steps of SQLite's virtual machine, in hundreds."""
    costs = {}
    for count in (40, 2000):
        store = SqliteStore(":memory:")
        assert isinstance(store.database, sqlite3.Connection)
        names = sorted(f"n{number}" for number in range(count))
        alone = Alone(store, NoNetwork(), reserve_mib=64)
        generation = alone.open(request(), allocation(*names), identity()).lease.generation
        for name in names:
            assert alone.take(42, 0, name) is not None
        steps = itertools.count()
        store.database.set_progress_handler(partial(_count, steps), 100)
        for name in names[:0:-1] if backwards else names[:-1]:
            assert not alone.leases.nodes.keep_usage(NodeUsage(generation, name, ()))
        costs[count] = next(steps) / count
        assert alone.leases.nodes.keep_usage(NodeUsage(generation, names[0 if backwards else -1], ()))
        store.close()
    assert costs[2000] <= 2 * costs[40]
