# SPDX-License-Identifier: Apache-2.0
"""A store whose database server is killed, unreachable, busy, or taken by another vhpcd."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mariadb_server
import pytest
from key_fabric import an_assignment
from lease_records import put, record
from mariadb_server import Proxy, Server, shared
from store_backends import ME, open_at, open_through, written

from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store.errors import RetryError
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.writer import Writer
from vhpc_slurm.controller.store.writership import FencedError
from vhpc_slurm.errors import FabricError

pytestmark = pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT)
SOURCES = str(Path(__file__).parents[4] / "python")


def once(word: bytes) -> Callable[[bytes], bool]:
    """True for the first packet that has this word."""
    seen: list[bytes] = []

    def found(data: bytes) -> bool:
        if word not in data or seen:
            return False
        seen.append(data)
        return True

    return found


def add(store: MariaStore, job: int) -> int:
    """A change that fails if it is made twice."""
    store.put(record(job))
    store.keys.add(an_assignment(job, pkey=0x1000 + job))
    return job


def jobs(database: Database) -> list[int]:
    rows = shared().query("SELECT job_id FROM lease ORDER BY job_id", database.name)
    assert rows == shared().query("SELECT pkey - 4096 FROM key_claim ORDER BY pkey", database.name)
    return [job for (job,) in rows]


# --- connections that end -------------------------------------------------------------------------


@pytest.mark.promise("db.mariadb")
@pytest.mark.parametrize("word", [b"BEGIN", b"UPDATE vhpc_writer", b"INSERT INTO key_claim", b"COMMIT"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_connection_makes_each_change_exactly_once(
    mariadb_settings: Database, mariadb_proxy: Proxy, word: bytes, when: str
) -> None:
    store = open_through(mariadb_proxy, mariadb_settings)
    writer = Writer(store)
    assert writer.submit(add, store, 1).result(60) == 1
    setattr(mariadb_proxy, when, once(word))
    assert writer.submit(add, store, 2).result(60) == 2
    assert writer.submit(add, store, 3).result(60) == 3
    assert len(writer.submit(store.live).result(60)) == 3
    assert len(store.keys.snapshot().assignments) == 3
    assert jobs(mariadb_settings) == [1, 2, 3]
    writer.close()
    store.close()


def test_a_commit_with_unknown_result_is_reported(mariadb_settings: Database, mariadb_proxy: Proxy) -> None:
    store = open_through(mariadb_proxy, mariadb_settings)
    writer = Writer(store)

    def gone(data: bytes) -> bool:
        mariadb_proxy.refuses |= b"COMMIT" in data
        return b"COMMIT" in data

    mariadb_proxy.after = gone
    with pytest.raises(FabricError, match=r"may be in the database .* or not.*send the request again"):
        writer.submit(add, store, 1).result(60)
    mariadb_proxy.after, mariadb_proxy.refuses = (lambda _data: False), False
    time.sleep(1.1)  # a failed connection is not tried again within a second
    found = [one.lease.generation.job_id for one in writer.submit(store.live).result(60)]
    assert found == jobs(mariadb_settings)
    assert writer.submit(add, store, 2).result(60) == 2, "the database is used again"
    writer.close()
    store.close()


def test_an_unreachable_server_is_reported_in_time(mariadb_settings: Database, mariadb_proxy: Proxy) -> None:
    store = open_through(mariadb_proxy, mariadb_settings)
    writer = Writer(store)
    mariadb_proxy.refuses = True
    mariadb_proxy.before = lambda _data: True
    began = time.monotonic()
    waiting = [writer.submit(add, store, job) for job in range(20)]
    for one in waiting:
        with pytest.raises(FabricError, match="connects again by itself"):
            one.result(60)
    assert time.monotonic() - began < 10.0
    mariadb_proxy.refuses, mariadb_proxy.before = False, lambda _data: False
    time.sleep(1.1)
    assert writer.submit(add, store, 1).result(60) == 1
    assert jobs(mariadb_settings) == [1]
    writer.close()
    store.close()


def test_a_silent_server_is_given_up(mariadb_settings: Database, mariadb_proxy: Proxy) -> None:
    store = open_through(mariadb_proxy, mariadb_settings)
    writer = Writer(store)
    silence = threading.Event()

    def silent(_data: bytes) -> bool:
        return silence.wait(30)

    mariadb_proxy.before = silent
    began = time.monotonic()
    with pytest.raises(FabricError, match="cannot use the database"):
        writer.submit(add, store, 1).result(60)
    assert 2.0 <= time.monotonic() - began < 28.0, "before the server says something"
    mariadb_proxy.before = lambda _data: False
    silence.set()
    writer.close()
    store.close()


def test_an_idle_session_that_the_server_ended_is_replaced(mariadb_settings: Database) -> None:
    store = MariaStore(mariadb_settings, ME)
    put(store, record(1))
    for (number,) in shared().query(
        f"SELECT id FROM information_schema.processlist WHERE db = '{mariadb_settings.name}'"
    ):
        shared().query(f"KILL {number}")
    put(store, record(2))
    assert len(store.live()) == 2
    store.close()


# --- transactions that the server undoes ----------------------------------------------------------


@pytest.mark.promise("db.mariadb")
def test_a_deadlock_is_tried_again_and_nothing_is_done_twice(mariadb_settings: Database) -> None:
    store = MariaStore(mariadb_settings, ME)
    writer = Writer(store)
    writer.submit(add, store, 1).result(60)
    other = shared().root(mariadb_settings.name)
    cursor = other.cursor()
    cursor.execute("CREATE TABLE ballast (n INT) ENGINE = InnoDB")
    cursor.execute("BEGIN")
    cursor.execute("INSERT INTO ballast VALUES " + ", ".join(["(1)"] * 500))  # the victim is the smaller one
    cursor.execute("SELECT * FROM lease WHERE id = 1 FOR UPDATE")
    tried: list[int] = []
    ours = threading.Event()

    def both() -> None:
        tried.append(1)
        add(store, 2)
        ours.set()
        store.put(record(1, now=2.0))

    future = writer.submit(both)
    assert ours.wait(60)
    cursor.execute("SELECT * FROM vhpc_writer FOR UPDATE")  # which our transaction has locked
    other.rollback()
    future.result(60)
    assert len(tried) == 2, "the server chose our transaction as the victim, and it ran again"
    assert jobs(mariadb_settings) == [1, 2]
    other.close()
    writer.close()
    store.close()


def test_a_lock_that_is_not_released_is_reported(mariadb_settings: Database) -> None:
    store = MariaStore(mariadb_settings, ME)
    writer = Writer(store)
    other = shared().root(mariadb_settings.name)
    cursor = other.cursor()
    cursor.execute("BEGIN")
    cursor.execute("SELECT * FROM vhpc_writer FOR UPDATE")
    future = writer.submit(add, store, 1)
    with pytest.raises(FabricError, match="Lock wait timeout exceeded"):
        future.result(60)
    other.rollback()
    assert writer.submit(add, store, 2).result(60) == 2
    assert jobs(mariadb_settings) == [2]
    other.close()
    writer.close()
    store.close()


def test_other_calls_of_an_undone_transaction_are_undone_too(
    mariadb_settings: Database, mariadb_proxy: Proxy
) -> None:
    store = open_through(mariadb_proxy, mariadb_settings)
    mariadb_proxy.before = once(b"INSERT INTO key_claim")
    with pytest.raises(RetryError), store.transaction():  # noqa: PT012 - what is tried after it
        store.put(record(1))
        with pytest.raises(FabricError):
            lost(store)
        with pytest.raises(Exception, match=r"(?i)lost"):
            store.put(record(3))
    assert jobs(mariadb_settings) == []
    store.close()


def lost(store: MariaStore) -> None:
    with store.transaction():
        store.keys.add(an_assignment(2))


def test_inner_transactions_are_undone_alone(mariadb_settings: Database) -> None:
    store = MariaStore(mariadb_settings, ME)
    with store.transaction():
        add(store, 1)
        with pytest.raises(RuntimeError), store.transaction():  # noqa: PT012 - what was done before it
            add(store, 2)
            with store.transaction():
                add(store, 3)
            with pytest.raises(ZeroDivisionError), store.transaction():  # noqa: PT012
                add(store, 4)
                raise ZeroDivisionError
            assert [one.lease.generation.job_id for one in store.live()] == [1, 2, 3]
            raise RuntimeError
        with store.transaction():
            add(store, 5)
    assert jobs(mariadb_settings) == [1, 5]
    store.close()


def undone(store: MariaStore, job_id: int) -> None:
    """A part of a transaction that fails after its change."""
    with contextlib.suppress(ZeroDivisionError), store.transaction():
        add(store, job_id)
        raise ZeroDivisionError


def test_an_undone_part_takes_no_claim_with_it(mariadb_settings: Database) -> None:
    store = MariaStore(mariadb_settings, ME)
    with store.transaction():
        undone(store, 1)
    add_alone(store, 2)
    with store.transaction():  # undone, and then a change that stays
        undone(store, 3)
        add(store, 4)
    add_alone(store, 5)
    assert jobs(mariadb_settings) == [2, 4, 5]
    store.close()


# --- which vhpcd writes ---------------------------------------------------------------------------


@pytest.mark.promise("ha.replaced")
def test_a_vhpcd_that_was_replaced_changes_nothing(mariadb_settings: Database) -> None:
    old = MariaStore(mariadb_settings, ME, "here:1")
    add_alone(old, 1)
    new = MariaStore(mariadb_settings, ME, "here:2")
    with pytest.raises(FencedError, match=r"no longer has the database: here:2 has taken it"):
        add_alone(old, 2)
    with pytest.raises(FencedError), old.transaction():  # noqa: PT012 - the second change of one
        with pytest.raises(FencedError):
            old.put(record(2))
        with pytest.raises(FencedError):
            old.put(record(3))
    add_alone(new, 4)
    assert jobs(mariadb_settings) == [1, 4]
    old.close()
    add_alone(new, 5)
    new.close()
    assert shared().query("SELECT holder FROM vhpc_writer", mariadb_settings.name) == [("",)]


def add_alone(store: MariaStore, job: int) -> None:
    with store.transaction():
        add(store, job)


@pytest.mark.promise("ha.replaced")
def test_a_running_vhpcd_of_another_host_is_not_replaced(mariadb_settings: Database) -> None:
    first = MariaStore(mariadb_settings, ME, "first:7")
    with pytest.raises(FabricError, match=r"another vhpcd uses the database: first:7 wrote to it \d s ago"):
        MariaStore(mariadb_settings, ME, "second:7")
    add_alone(first, 1)
    shared().query("UPDATE vhpc_writer SET seen = seen - 60", mariadb_settings.name)
    MariaStore(mariadb_settings, ME, "second:7").close()
    first.close()


# --- processes and servers that are killed ---------------------------------------------------------


WRITES = """
import sys
sys.path.insert(0, sys.argv[2])
from lease_records import record
from store_backends import opened_from
from vhpc_slurm.controller.store.writer import Writer
store = opened_from(sys.argv[1])
writer = Writer(store)
turn = len(store.page(0, limit=10**6))
while True:
    turn += 1
    writer.submit(store.put, record(turn)).result()
    print(turn, flush=True)
"""


@pytest.mark.promise("db.mariadb")
def test_kill_9_of_the_server_loses_nothing_confirmed(run_dir: str) -> None:
    server = Server(Path(run_dir)).start()
    settings = server.database()
    said: list[int] = []
    try:
        for seconds in (0.05, 0.2):
            process = subprocess.Popen(
                [sys.executable, "-c", WRITES, written(settings), str(Path(__file__).parent)],
                stdout=subprocess.PIPE,
                text=True,
                env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/sbin:/usr/bin:/bin"},
            )
            assert process.stdout is not None
            said.append(int(process.stdout.readline()))
            time.sleep(seconds)
            server.kill()
            server.start()
            said.append(int(process.stdout.readline()))
            process.kill()
            said += [int(line) for line in process.stdout if line.endswith("\n")]
            process.wait()
            process.stdout.close()
            store = open_at(settings)
            found = [one.lease.generation.job_id for _, one in store.page(0, limit=10**6)]
            assert found == list(range(1, len(found) + 1)), "each once, and in order"
            assert set(said) <= set(found)
            store.close()
    finally:
        server.stop()
    assert len(said) > 4


def test_calls_that_wait_together_share_a_commit(mariadb_settings: Database, mariadb_proxy: Proxy) -> None:
    commits: list[bytes] = []
    store = open_through(mariadb_proxy, mariadb_settings)
    writer = Writer(store)

    def counted(data: bytes) -> bool:
        if b"COMMIT" in data:
            commits.append(data)
        return False

    mariadb_proxy.before = counted
    gate = threading.Event()
    first = writer.submit(gate.wait, 10)
    waiting: list[Future[Any]] = [writer.submit(add, store, job) for job in range(1, 51)]
    gate.set()
    assert first.result(60)
    assert [one.result(60) for one in waiting] == list(range(1, 51))
    assert len(commits) <= 3
    writer.close()
    store.close()
