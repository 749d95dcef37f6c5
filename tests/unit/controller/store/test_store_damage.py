# SPDX-License-Identifier: Apache-2.0
"""A database that is not what vhpcd wrote: one line says what it is and what to do, wherever it shows."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, identity, request, stop
from key_fabric import an_assignment
from lease_records import put, record
from vhpcd_process import Vhpcd, make

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.errors import DamagedError, explain
from vhpc_slurm.controller.store.keys import read_snapshot
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, NetworkIdentity

CURE = "(stop vhpcd, keep the file, and see 'A damaged database' in docs/install.md)"


def sql(*statements: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA foreign_keys = OFF")
            for statement in statements:
                db.execute(statement)
        db.close()

    return damage


def overwritten(path: Path) -> None:
    """Garbage in each page but the first, as a disk or somebody's dd leaves it."""
    with path.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size
        opened.seek(4096)
        opened.write(b"\xa5" * (size - 4096))


def cut(path: Path) -> None:
    os.truncate(path, 4096 * 3)


def text(path: Path) -> None:
    path.write_text("hello, this is no database at all\n" * 1000)


DAMAGE = {
    "pages": overwritten,
    "cut": cut,
    "text": text,
    "no table": sql("DROP TABLE node"),
    "no column": sql("ALTER TABLE lease RENAME COLUMN body TO corpse"),
    "a lease that is no JSON": sql("UPDATE lease SET body = CAST('{' AS BLOB)"),
    "a lease without nodes": sql("""UPDATE lease SET body = CAST('{"generation":"1.0.00000001"}' AS BLOB)"""),
    "a state that is none": sql(
        "UPDATE lease SET body = CAST(replace(CAST(body AS TEXT), 'reserved', 'asleep') AS BLOB)"
    ),
    "an assignment without an owner": sql("DELETE FROM key_owner"),
    "an assignment that is in no state": sql("UPDATE key_claim SET state = 'asleep'"),
    "an assignment of no generation": sql("UPDATE key_claim SET generation = 'x'"),
}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """One with a lease, a node and an assignment, closed."""
    path = tmp_path / "leases.sqlite"
    store = SqliteStore(path)
    put(store, record(1), *(record(job) for job in range(2, 200)))
    with store.transaction():
        store.take(record(1).lease.generation, "n1", 1.0)
        store.keys.add(an_assignment(1))
    store.close()
    return path


@pytest.mark.promise("db.damaged")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_database_is_reported_and_not_opened(
    database: Path, damage: Callable[[Path], None]
) -> None:
    damage(database)
    with pytest.raises(DamagedError) as caught:
        SqliteStore(database)
    assert caught.value.line().startswith(f"the database {database} is damaged: ")
    assert caught.value.line().endswith(CURE)
    assert "disk full" not in caught.value.line()


@pytest.mark.promise("db.damaged")
@pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
@pytest.mark.parametrize("name", ["pages", "text", "a lease that is no JSON"])
def test_vhpcd_does_not_start_on_it_and_says_why_in_one_line(
    tmp_path: Path, daemon: Munged, database: Path, name: str
) -> None:
    vhpcd = make(tmp_path, daemon)
    mine = Path(vhpcd.config.controller.database)
    mine.parent.mkdir()
    database.rename(mine)
    DAMAGE[name](mine)
    process = vhpcd.spawn(subprocess.PIPE)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    (line,) = said.splitlines()
    assert line.startswith(f"vhpcd: the database {mine} is damaged: ")
    assert line.endswith(CURE)


@pytest.fixture
def running(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    vhpcd = make(tmp_path, daemon).start()
    yield vhpcd
    if vhpcd.process is not None:
        stop(vhpcd.process)


@pytest.mark.promise("db.damaged")
@pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
def test_a_fault_in_vhpcd_is_answered_and_logged_once(running: Vhpcd) -> None:
    running.client.open_generation(request(1), allocation())
    sql("ALTER TABLE node RENAME TO nobody")(Path(running.config.controller.database))
    for _ in range(5):
        with pytest.raises(FabricError, match="is damaged: no such table"):
            running.client.leases()
    assert running.log.count("is damaged") == 1
    assert "Traceback" not in running.log
    sql("ALTER TABLE nobody RENAME TO node")(Path(running.config.controller.database))
    assert len(running.client.leases()) == 1, "it goes on when that is over"


@pytest.mark.promise("db.damaged")
def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(FabricError, match=r"cannot use its database .*full \(make room on its disk\)"):
        put(store, *(record(job) for job in range(1, 500)))
    assert store.live() == (), "all or nothing"


def test_a_locked_database_is_reported(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    store._db.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(tmp_path / "db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(FabricError, match="another process holds it"):
        put(store, record())
    other.close()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FabricError, match=r"unable to open database file .*must belong to vhpcd's user"):
        SqliteStore(tmp_path / "none" / "db")


def test_the_command_that_reads_keys_says_it_too(database: Path) -> None:
    sql("UPDATE key_claim SET state = 'asleep'")(database)
    with pytest.raises(DamagedError, match="an assignment of a key cannot be read"):
        read_snapshot(database)
    overwritten(database)
    with pytest.raises(DamagedError, match="malformed"):
        read_snapshot(database)


def test_an_unknown_error_is_reported_unchanged() -> None:
    found = explain(sqlite3.ProgrammingError("what?"), "/db")
    assert found.line() == "vhpcd cannot use its database /db: ProgrammingError: what? (see docs/install.md)"


def test_a_lease_of_each_kind_is_read_back() -> None:
    """Writes the rows that later tests damage."""
    generation = Generation(1, 0, "0" * 8)
    one = rules.reserve(generation, request(1), allocation(), identity(), NetworkIdentity(), 1.0)
    store = SqliteStore(":memory:")
    put(store, one)
    assert store.get(generation) == one
