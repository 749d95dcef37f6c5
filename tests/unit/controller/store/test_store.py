# SPDX-License-Identifier: Apache-2.0
"""The store's contract, and what is left after kill -9."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lease_records import put, record
from store_backends import ENGINES, Place, open_at, place, written

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, LeaseState, Stage, Timeline


@pytest.fixture(params=["memory", *ENGINES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LeaseStore]:
    found = open_at(":memory:" if request.param == "memory" else place(request.param, tmp_path))
    yield found
    found.close()


def test_stored_leases_are_read_back_whole(store: LeaseStore) -> None:
    first, second = record(nonce=1), record(nonce=2)
    put(store, first, second, record(43))
    assert store.get(first.lease.generation) == first
    assert store.of_job(42) == (second, first)
    assert store.get(Generation(1, 2, "0" * 8)) is None


def test_the_latest_state_counts_and_released_leases_end(store: LeaseStore) -> None:
    first = record()
    put(store, first, record(43))
    gone = replace(first, lease=replace(first.lease, state=LeaseState.RELEASED), updated=9.0)
    put(store, gone)
    assert store.get(first.lease.generation) == gone
    assert [one.lease.generation.job_id for one in store.live()] == [43]
    assert store.counts() == {"reserved": 1, "ready": 0, "refused": 0, "ending": 0, "released": 1}


def test_released_leases_are_found_by_their_jobs(store: LeaseStore) -> None:
    first, second = record(42, 1), record(43, 2)
    put(store, first, second, record(42, 3))
    gone = [replace(one, lease=replace(one.lease, state=LeaseState.RELEASED)) for one in (first, second)]
    put(store, *gone)
    assert store.released([41, 42]) == (gone[0],)
    assert store.released([43, 42]) == tuple(gone)
    assert store.released([]) == ()


def test_nodes_take_and_acknowledge(store: LeaseStore) -> None:
    first = record()
    generation = first.lease.generation
    put(store, first)
    with store.transaction():
        store.take(generation, "n1", 2.0)
        store.take(generation, "n2", 2.0)
        store.acknowledge(generation, "n2", clean=False, note="stuck", now=3.0)
        store.acknowledge(generation, "n3", clean=True, note="", now=3.0)
    assert store.get(generation) == replace(
        first, taken=("n1", "n2"), acknowledged=("n3",), unclean=(("n2", "stuck"),)
    )
    with store.transaction():
        store.acknowledge(generation, "n2", clean=True, note="", now=4.0)
        store.take(generation, "n3", 5.0)
    assert store.get(generation) == replace(first, taken=("n1", "n2", "n3"), acknowledged=("n2",))
    put(store, replace(first, updated=6.0))
    found = store.get(generation)
    assert found is not None
    assert found.taken == ("n1", "n2", "n3"), "putting the lease leaves its nodes"
    assert store.has_holders(generation)
    with store.transaction():
        for node in ("n1", "n3"):
            store.acknowledge(generation, node, clean=True, note="", now=7.0)
    assert not store.has_holders(generation)


def test_timelines_are_replaced_and_paged(store: LeaseStore) -> None:
    put(store, record(1), record(2))
    lines = [
        Timeline(Generation(job, 0, "0" * 8), node, (Stage("plan", 1.5, 2.5, "ü"),))
        for job in (1, 2)
        for node in ("n1", "n2")
    ]
    with store.transaction():
        store.report(replace(lines[0], stages=()))
        for line in lines:
            store.report(line)
        store.report(Timeline(Generation(9, 0, "0" * 8), "n1", ()))
    first = store.timelines(0, limit=3)
    rest = store.timelines(first[-1][0], limit=3)
    assert [line for _, line in first + rest] == lines
    assert [line for _, line in store.timelines(0, job_id=2)] == lines[2:]


def test_pages_continue_at_the_end_of_the_last_one(store: LeaseStore) -> None:
    put(store, *(record(job) for job in range(1, 8)))
    found, after = [], 0
    while page := store.page(after, limit=3):
        found += [one.lease.generation.job_id for _, one in page]
        after = page[-1][0]
    assert found == list(range(1, 8))
    assert [one.lease.generation.job_id for _, one in store.page(0, job_id=5)] == [5]


def test_only_old_released_leases_are_forgotten(store: LeaseStore) -> None:
    old, new, live = record(1, now=1.0), record(2, now=100.0), record(3, now=1.0)
    gone = [replace(one, lease=replace(one.lease, state=LeaseState.RELEASED)) for one in (old, new)]
    put(store, *gone, live)
    with store.transaction():
        store.take(live.lease.generation, "n1", 1.0)
        store.report(Timeline(old.lease.generation, "n1", ()))
        assert store.prune(50.0) == 1
    assert [one.lease.generation.job_id for _, one in store.page(0)] == [2, 3]
    assert store.timelines(0) == ()


def test_an_error_undoes_the_whole_transaction(store: LeaseStore) -> None:
    with pytest.raises(RuntimeError), store.transaction():  # noqa: PT012
        store.put(record(1))
        store.put(record(2))
        raise RuntimeError
    assert store.live() == ()
    put(store, record(3))
    assert len(store.live()) == 1


def test_all_is_there_after_reopening(leases_at: Place) -> None:
    store = open_at(leases_at)
    put(store, record())
    store.close()
    assert open_at(leases_at).live() == (record(),)


def test_commits_are_synchronous_and_logged_ahead(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_database_of_a_newer_vhpcd_is_not_changed(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "db").close()
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(FabricError, match="schema 99"):
        SqliteStore(tmp_path / "db")


def test_a_database_of_another_program_is_not_changed(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "db")
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    with pytest.raises(FabricError, match="cannot use the database"):
        SqliteStore(tmp_path / "db")
    (tmp_path / "text").write_text("hello, this is no database at all\n" * 100)
    with pytest.raises(FabricError, match="is damaged: file is not a database"):
        SqliteStore(tmp_path / "text")


# Replaces job 1's lease again and again, and prints a line after each commit.
WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from controller_lab import Alone, allocation, identity, request
from store_backends import opened_from
from vhpc_slurm.fabric.backend import NoNetwork
service = Alone(opened_from(sys.argv[1]), NoNetwork(), reserve_mib=0)
turn = len(service.store.page(0, limit=1000000))
while True:
    record = service.open(request(1), allocation("n1", "n2", cpu_ids=(turn % 50,)), identity())
    service.take(1, 0, "n1")
    print(record.lease.generation, flush=True)
    turn += 1
"""


@pytest.mark.promise("db.durable", "db.mariadb")
def test_kill_9_at_any_moment_leaves_a_consistent_state(leases_at: Place) -> None:
    chance = random.Random(7)
    said: list[str] = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, written(leases_at), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert writer.stdout is not None
        said.append(writer.stdout.readline().strip())
        time.sleep(chance.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        said += [line.strip() for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        writer.stdout.close()

        store = open_at(leases_at)
        known = [one for _, one in store.page(0, limit=1_000_000)]
        by_name = {str(one.lease.generation): one for one in known}
        for name in said:
            assert by_name[name].taken == ("n1",), "what was said to be durable is there"
        usable = [one for one in known if one.lease.state in rules.USABLE]
        assert len(usable) == 1, "one usable lease, whatever was interrupted"
        assert usable[0] == known[-1]
        store.close()
    assert len(said) > 6
