# SPDX-License-Identifier: Apache-2.0
"""vhpc database copy: leases from one engine to the other, all or none."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from key_fabric import an_assignment
from lease_records import put, record
from mariadb_server import HAVE_SERVER, WHY_NOT
from store_backends import ENGINES, ME, Place, configured, open_at, place

from vhpc_slurm.cli.site.database import migrate
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store import copying, mariaschema
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.fabric.keys import KeyState
from vhpc_slurm.model import (
    ClusterMember,
    Figures,
    Generation,
    GuestUsage,
    KeeperState,
    LeaseState,
    NodeReport,
    NodeUsage,
    SavedGuest,
    SavedNode,
    Seal,
    Segment,
    SegmentPart,
    SshKeys,
    Stage,
    Timeline,
    TunnelKeyPairs,
)

SOURCES = str(Path(__file__).parents[4] / "python")
mariadb = ENGINES[1]


def filled(store: SqlStore, jobs: int = 3) -> None:
    """Rows in all tables, with values that engines may treat in different ways."""
    chance = random.Random(3)
    with store.transaction():
        for job in range(1, jobs + 1):
            one = record(job, now=1.7e9 + chance.random())
            store.put(replace(one, lease=replace(one.lease, state=LeaseState.READY)))
            generation = one.lease.generation
            for node in ("n1", "N1", "n-é"):
                store.take(generation, node, chance.random() * 1e9)
                store.report(Timeline(generation, node, (Stage("plan", 1.5, 2.5, "ü\u2028'\"\\%s?"),)))
                store.usage.keep(NodeUsage(generation, node, (GuestUsage(0, Figures(cpu_us=2**40)),)))
                store.readiness.report(generation, node, "failed", "fabric", "line\0with 'all' \U0001f600 \\")
                store.reports.add(NodeReport(generation, node, None, (), ("x" * 999,)))
            store.acknowledge(generation, "n1", clean=job % 2 == 0, note="nöte", now=0.1 + 0.2)
            store.ssh_keys.add(generation, SshKeys("a", "b", "c", "d"))
            store.tunnel_keys.add(generation, TunnelKeyPairs(("private",), ("public",)))
            saved = store.checkpoints.add(
                one.lease,
                f"n{job}",
                stop=job == 2,
                requeue=job == 1,
                key=bytes(range(256)),
                now=chance.random(),
            )
            guests = (SavedGuest(0, "n1", 2, 512, Seal(2**40, b"\0\xff")),)
            kept = SavedNode("n1", 10000003, "emulated", 1 / 3, guests)
            store.checkpoints.report(saved.serial, "n1", KeeperState.SAVED, kept)
            store.checkpoints.report(saved.serial, "N1", KeeperState.HELD, None)
            store.checkpoints.sizes.put(saved.serial, 2**40 + job)
            cluster = store.clusters.create(job, f"phys/n-{job}" if job == 2 else f"n-{job}", 1 / 3)
            segment = Segment(5000 + job, "10.200.0.0/16", "fd76::/64", 7634, 0, ("192.0.2.1",), first=job)
            member = ClusterMember(generation, segment, (SegmentPart(generation, ("n1",), (2,), 3),))
            store.clusters.add(cluster.serial, member, 3, uid=job + 1)
            store.clusters.join(generation, "host", "üser")
            store.clusters.set_gone(generation, (0, 2))
            store.keys.add(an_assignment(job, pkey=0x1000 + job, left_s=1 / 3))
            store.segments.add(5000 + job, generation, Generation(job + 1000, 0, "0" * 8))
        store.keys.update([an_assignment(1, pkey=0x1001, state=KeyState.QUARANTINE, left_s=1e-300, note="ü")])
        store.keys.free([an_assignment(2).generation])
        store.segments.rest(Generation(3, 0, "0" * 8), 2 / 3)


def answers(store: SqlStore) -> list[Any]:
    """All that the port tells about ``filled``."""
    known = [one for _, one in store.page(0)]
    generations = [one.lease.generation for one in known]
    return [
        store.page(0),
        store.timelines(0),
        store.keys.snapshot(),
        store.segments.held(),
        store.segments.freed(),
        [store.readiness.failure(one) for one in generations],
        [store.usage.page(one, "", 100) for one in generations],
        [store.reports.page(0, job_id=one.job_id) for one in generations],
        [(store.ssh_keys.get(one), store.tunnel_keys.get(one)) for one in generations],
        store.counts(),
        store.checkpoints.page(0),
        store.clusters.page(0, None, 10),
        [store.clusters.member(one) for one in generations],
        store.checkpoints.sizes.all(),
        [(one.key, store.checkpoints.saved(one.serial)) for one in store.checkpoints.page(0)],
        [store.checkpoints.reports(one.serial) for one in store.checkpoints.page(0)],
    ]


@pytest.fixture(params=["sqlite", mariadb])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(request.param, tmp_path)


@pytest.fixture
def target(source: Place, tmp_path: Path) -> Place:
    other = "sqlite" if isinstance(source, Database) else "mariadb"
    if other == "mariadb" and not HAVE_SERVER:
        pytest.skip(WHY_NOT)
    return place(other, tmp_path)


def test_a_copy_has_all_rows_and_says_the_same(source: Place, target: Place) -> None:
    old, new = open_at(source), open_at(target)
    filled(old)
    counts = copying.copy(old, new, "old", "new")
    assert all(counts.values()), f"the test has rows for all tables: {counts}"
    assert answers(new) == answers(old)
    put(new, record(99))
    assert new.page(0)[-1][0] > old.page(0)[-1][0], "serial numbers go on"
    old.close()
    new.close()


@pytest.mark.promise("db.copy")
def test_a_target_with_leases_is_not_changed(source: Place, target: Place) -> None:
    old, new = open_at(source), open_at(target)
    filled(old)
    put(new, record(7))
    with pytest.raises(UserError, match="its table lease has rows"):
        copying.copy(old, new, "old", "new")
    assert new.live() == (record(7),)
    old.close()
    new.close()


@pytest.mark.promise("db.copy")
def test_a_row_that_differs_leaves_the_target_empty(
    source: Place, target: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = open_at(source), open_at(target)
    filled(old)
    insert = copying._insert

    def other(db: Any, table: str, columns: Any, rows: Any) -> int:
        count = insert(db, table, columns, rows)
        if table == "node_report":
            db.execute("UPDATE node SET note = 'x' WHERE node = 'n1'")
        return count

    monkeypatch.setattr(copying, "_insert", other)
    with pytest.raises(FabricError, match=r"row \d+ of table node differs"):
        copying.copy(old, new, "old", "new")
    assert new.page(0) == ()
    assert new.keys.snapshot().assignments == ()
    monkeypatch.undo()
    copying.copy(old, new, "old", "new")
    old.close()
    new.close()


def test_many_rows_are_copied_in_pages(source: Place, target: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PAGE", 2)
    monkeypatch.setattr(copying, "_MOST_BYTES", 3000)
    old, new = open_at(source), open_at(target)
    filled(old, jobs=9)
    copying.copy(old, new, "old", "new")
    assert answers(new) == answers(old)
    old.close()
    new.close()


COPIES = """
import sys
import msgspec
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from store_backends import configured, place_from
from vhpc_slurm.cli.site.database import migrate
config = configured(Path(sys.argv[1]), place_from(sys.argv[2]))
print("begins", flush=True)
migrate(config, "mariadb")
"""


@pytest.mark.promise("db.copy")
@pytest.mark.parametrize("engine", [mariadb])
def test_kill_9_of_a_copy_leaves_all_or_nothing(engine: str, tmp_path: Path) -> None:
    found = place(engine, tmp_path)
    config = configured(tmp_path, found)
    Path(config.controller.database).parent.mkdir()
    store = SqliteStore(config.controller.database)
    filled(store, jobs=200)
    store.close()
    seen = set()
    for seconds in (0.0, 0.1, 0.3):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                COPIES,
                str(tmp_path),
                msgspec.json.encode(found).decode(),
                str(Path(__file__).parent),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/sbin:/usr/bin:/bin"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        new = open_at(found)
        seen.add(new.counts()["ready"])
        new.close()
    assert seen <= {0, 200}
    if 200 not in seen:
        migrate(config, "mariadb")
    new, old = open_at(found), SqliteStore(config.controller.database)
    assert new.page(0, limit=999) == old.page(0, limit=999)
    new.close()
    old.close()


@pytest.mark.parametrize("engine", [mariadb])
def test_the_command_copies_there_and_back(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, place(engine, tmp_path))
    path = Path(config.controller.database)
    path.parent.mkdir()
    store = SqliteStore(path)
    filled(store)
    before = answers(store)
    store.close()
    assert migrate(config, "mariadb") == 0
    said = capsys.readouterr().out
    assert "       3 lease\n" in said
    assert 'next: set engine = "mariadb"' in said
    path.rename(tmp_path / "kept")
    assert migrate(config, "sqlite") == 0
    back = SqliteStore(path)
    assert answers(back) == before
    back.close()


def test_only_vhpcds_user_copies(tmp_path: Path) -> None:
    other = "daemon" if os.geteuid() == 0 else "root"
    config = Config(controller=Controller(user=other, database=str(tmp_path / "db")))
    with pytest.raises(UserError, match=rf"must run as {other}.*runuser -u {other}"):
        migrate(config, "mariadb")


def test_a_running_vhpcd_is_not_disturbed(tmp_path: Path) -> None:
    from vhpc_slurm.controller.store.choice import only_one

    config = Config(controller=Controller(user=ME, database=str(tmp_path / "db")))
    with only_one(tmp_path / "db"), pytest.raises(VhpcError, match="another vhpcd uses"):
        migrate(config, "mariadb")


def test_the_copied_tables_are_all_that_there_are(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "db").close()
    db = sqlite3.connect(tmp_path / "db")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    db.close()
    assert tables - {"sqlite_sequence"} == set(copying.TABLES)


@pytest.mark.parametrize("engine", [mariadb])
def test_both_engines_have_the_same_columns_and_version(engine: str, tmp_path: Path) -> None:
    """A step of one schema needs its like in the other."""
    found = place(engine, tmp_path)
    stores = [SqliteStore(tmp_path / "db"), open_at(found)]
    for table in copying.TABLES:
        first, second = (list(copying._columns(table, store.database)) for store in stores)
        assert sorted(first) == sorted(second), table
    assert len(mariaschema.STEPS) == SCHEMA_VERSION
    for store in stores:
        store.close()
