# SPDX-License-Identifier: Apache-2.0
"""Data and messages of the release before this version, and of a version that comes after it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lease_records import put, record
from message_fields import of_checkout
from next_version import MARIADB_STEP, NEXT_SCHEMA, SQLITE_STEP, become_next
from node_rig import node_layout
from store_backends import ENGINES, Place, open_at, place

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import versions
from vhpc_slurm.controller.store import mariaschema
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.model import Generation, LeaseState, Stage, Timeline, Viewer
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store import journal, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
RELEASE = Path(__file__).parents[1] / "data/release"
OLDER = Generation(1000, 0, "94637090")
STATES = {42: "ready", 43: "ending", 44: "released", 45: "reserved"}


def filled(found: Place) -> Place:
    """A database that this vhpcd has written, with leases in four states."""
    store = open_at(found)
    for job, state in STATES.items():
        one = record(job)
        put(store, replace(one, lease=replace(one.lease, state=LeaseState(state))))
    first, second = record(42).lease.generation, record(43).lease.generation
    with store.transaction():
        for node in ("n1", "n2"):
            store.take(first, node, 2.0)
        store.acknowledge(second, "n2", clean=False, note="stuck", now=3.0)
        store.report(Timeline(first, "n1", (Stage("plan", 1.5, 2.5),)))
    store.close()
    return found


@pytest.mark.promise("db.versions")
def schema_of(store: SqlStore) -> int:
    """The version that the database says."""
    if isinstance(store, MariaStore):
        return mariaschema.version(store.database)
    (found,) = store.database.execute("PRAGMA user_version").fetchone()
    return int(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_databases_of_earlier_schemas_are_read(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = filled(place(engine, tmp_path))
    become_next(monkeypatch)
    store = open_at(old)
    assert schema_of(store) == NEXT_SCHEMA
    found = {record.lease.generation.job_id: record for _, record in store.page(0)}
    assert {job: record.lease.state.value for job, record in found.items()} == STATES
    assert (found[42].taken, found[43].unclean) == (("n1", "n2"), (("n2", "stuck"),))
    ((_, line),) = store.timelines(0)
    assert (line.node, [stage.name for stage in line.stages]) == ("n1", ["plan"])
    assert len(store.page(0, viewer=Viewer(uid=found[42].lease.request.uid))) == 4
    # the step was done, and the next start does nothing
    hues = list(store.database.execute("SELECT DISTINCT hue FROM lease"))
    assert [tuple(row) for row in hues] == [("red",)]
    put(store, record(46))
    store.close()
    again = open_at(old)
    assert len(again.page(0)) == 5
    again.close()


@pytest.mark.promise("db.versions")
def test_the_older_database_is_kept_with_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    filled(path)
    old = sqlite3.connect(path)
    before = list(old.iterdump())
    old.close()
    become_next(monkeypatch)
    SqliteStore(path).close()
    copy = tmp_path / f"db.schema-{SCHEMA_VERSION}"
    assert copy.stat().st_mode & 0o777 == 0o600
    kept = sqlite3.connect(copy)
    assert list(kept.iterdump()) == before
    assert kept.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    kept.close()
    with sqlite3.connect(path) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (NEXT_SCHEMA,)


def test_a_migration_that_fails_leaves_the_old_database_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db"
    filled(path)
    become_next(monkeypatch, SQLITE_STEP + "CREATE TABLE lease (in_the_way);")
    with pytest.raises(FabricError, match="lease already exists"):
        SqliteStore(path)
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'colour'").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM lease").fetchone() == (4,)
    db.close()


@pytest.mark.parametrize("engine", [ENGINES[1]])
def test_a_migration_that_was_killed_is_completed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MariaDB commits after each statement of a step."""
    old = filled(place(engine, tmp_path))
    store = open_at(old)
    store.database.execute(MARIADB_STEP[0])
    store.close()
    become_next(monkeypatch)
    store = open_at(old)
    assert schema_of(store) == NEXT_SCHEMA
    assert len(store.page(0)) == 4
    store.close()


@pytest.mark.parametrize("engine", [ENGINES[1]])
def test_a_newer_mariadb_database_is_refused(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = filled(place(engine, tmp_path))
    with monkeypatch.context() as newer:
        become_next(newer)
        open_at(found).close()
    with pytest.raises(FabricError, match=f"schema {NEXT_SCHEMA} .*downgraded"):
        open_at(found)


def test_a_new_database_has_no_copy(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "db").close()
    SqliteStore(tmp_path / "db").close()
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


@pytest.mark.promise("db.versions")
def test_a_newer_database_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "db"
    SqliteStore(path).close()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    newer.close()
    before = path.read_bytes()
    with pytest.raises(FabricError, match=f"schema {SCHEMA_VERSION + 1} .*downgraded"):
        SqliteStore(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["db"]


@pytest.mark.promise("db.versions")
def test_a_journal_of_the_previous_release_is_read(layout: Layout) -> None:
    layout.journals.mkdir(parents=True)
    shutil.copyfile(RELEASE / "journal.jsonl", layout.journals / f"{OLDER}.jsonl")
    held = journal.read_entries(layout.journals, OLDER)
    assert [entry.kind for entry in held] == [
        "rundir", "claim", "image", "cgroup", "memory", "uid",
        "process", "process", "domain", "process",
    ]  # fmt: skip
    assert held[-1].data == {"role": "shim", "pid": 262, "started": 6704193}
    assert held[4].data == {"owners": [2001, 700001], "inodes": [[1, 263448]]}
    # a release for each: what is needed there is what the older version has written
    assert {entry.kind for entry in held} <= {one.kind for one in registry.RESOURCES}


@pytest.mark.promise("db.versions")
def test_a_journal_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{OLDER}.jsonl"
    path.write_text('{"t":1,"v":2,"event":"acquire","key":"uid:1","kind":"uid","data":{"uid":1}}\n')
    before = path.read_bytes()
    for read in (lambda: journal.read_entries(tmp_path, OLDER), lambda: Journal(tmp_path, OLDER)):
        with pytest.raises(NodeError, match=r"written by a newer vhpc.*format 2") as raised:
            read()
        assert "install the version that wrote it" in raised.value.hint
    assert path.read_bytes() == before


def test_resources_of_unknown_kinds_keep_no_others(layout: Layout, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "jobs" / "1000"
    folder.mkdir(parents=True)
    held = Journal(layout.journals, OLDER)
    held.acquire("rundir", f"rundir:{folder}", path=str(folder))
    held.acquire("hologram", "hologram:1")
    held.acquire("image", "image:1")  # without the digest that its release needs
    first, second = registry.release_all(layout, held)
    assert "the entry image:1 of a journal is damaged, or of another version" in first.line()
    assert isinstance(second, TeardownError)
    assert "the kind 'hologram', which this version does not know" in second.line()
    assert "install the version that wrote it" in second.line()
    assert [entry.kind for entry in held.held()] == ["image", "hologram"]
    assert not folder.exists()
    held.close()


def test_a_state_file_of_the_previous_release_is_read() -> None:
    state = statefile.read_state(RELEASE / "state")
    assert state.keys() <= statefile.PLUGIN_KEYS | statefile.HOOK_KEYS
    assert (state["version"], state["status"], state["guests"]) == (statefile.VERSION, "ready", "1")
    assert state["generation"] == str(OLDER)
    assert LeaseState.READY.value == state["status"]


def fields_of_release() -> dict[str, Any]:
    """Protocol, schema and fields of the release before this checkout."""
    found: dict[str, Any] = json.loads((RELEASE / "fields.json").read_text())
    return found


def test_messages_have_no_field_that_older_peers_do_not_expect() -> None:
    """docs/upgrade.md, For developers, has the steps for a change of messages."""
    release = fields_of_release()
    before, now = release["messages"], of_checkout()["messages"]
    changed = "messages have changed: raise VERSION in controller/api/versions.py"
    assert now == before or release["protocol"] < wire.VERSION, changed
    new = {name for kind in before.keys() & now.keys() for name in set(now[kind]) - set(before[kind])}
    listed = {one.path[-1] for one in versions.ADDED}
    assert new <= listed, "fields that an older peer does not know: add them to versions.ADDED"
    gone = {name for kind in before.keys() & now.keys() for name in set(before[kind]) - set(now[kind])}
    assert gone == set(), "an older peer expects these fields"


def test_stored_leases_change_with_the_schema_only() -> None:
    release = fields_of_release()
    changed = "an older vhpcd misreads the leases: add a step to schema.py and one to mariaschema.py"
    assert of_checkout()["stored"] == release["stored"] or release["schema"] < SCHEMA_VERSION, changed


def test_the_protocol_of_the_release_is_read() -> None:
    assert wire.readable(fields_of_release()["protocol"])
