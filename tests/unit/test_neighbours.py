# SPDX-License-Identifier: Apache-2.0
"""Data and messages of the version before this one, and of one that comes after it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from node_rig import node_layout

from vhpc_slurm.controller.api import older
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.schema import SCHEMA_VERSION
from vhpc_slurm.controller.wire_types import LeaseWire, TimelineWire
from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.model import Generation, LeaseState, Viewer
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store import journal, statefile
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
DATA = Path(__file__).parents[1] / "data"
OLDER = Generation(1000, 0, "94637090")


def database(path: Path, schema: int) -> Path:
    """A database that an older vhpcd has written."""
    old = sqlite3.connect(path)
    old.executescript((DATA / f"vhpcd/schema-{schema}.sql").read_text())
    old.close()
    return path


@pytest.mark.promise("db.versions")
@pytest.mark.parametrize("schema", [9, 10, 11])
def test_databases_of_earlier_schemas_are_read(tmp_path: Path, schema: int) -> None:
    store = SqliteStore(database(tmp_path / "db", schema))
    found = {record.lease.generation.job_id: record for _, record in store.page(0)}
    assert {job: record.lease.state.value for job, record in found.items()} == {
        42: "ready", 43: "ending", 44: "released", 45: "reserved",
    }  # fmt: skip
    assert (found[42].taken, found[43].unclean) == (("n1", "n2"), (("n2", "stuck"),))
    ((_, line),) = store.timelines(0)
    assert (line.node, [stage.name for stage in line.stages]) == ("n1", ["plan"])
    # its owner sees them: the migration has filled the columns for that
    uid = found[42].lease.request.uid
    assert len(store.page(0, viewer=Viewer(uid=uid))) == 4
    store.close()


@pytest.mark.promise("db.versions")
@pytest.mark.parametrize("schema", [1, 9, 10, 11])
def test_the_older_database_is_kept_beside_the_new_one(tmp_path: Path, schema: int) -> None:
    path = database(tmp_path / "db", schema)
    old = sqlite3.connect(path)
    before = list(old.iterdump())
    old.close()
    SqliteStore(path).close()
    copy = tmp_path / f"db.schema-{schema}"
    assert copy.stat().st_mode & 0o777 == 0o600
    kept = sqlite3.connect(copy)
    assert list(kept.iterdump()) == before
    assert kept.execute("PRAGMA user_version").fetchone() == (schema,)
    kept.close()
    with sqlite3.connect(path) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


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
    shutil.copyfile(DATA / "older/journal.jsonl", layout.journals / f"{OLDER}.jsonl")
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
    assert isinstance(first, TeardownError)
    assert "its entry in the journal cannot be used" in first.line()
    assert "the kind 'hologram', which this version does not know" in second.line()
    assert "install the version that wrote it" in second.line()
    assert [entry.kind for entry in held.held()] == ["image", "hologram"]
    assert not folder.exists()
    held.close()


def test_a_state_file_of_the_previous_release_is_read() -> None:
    state = statefile.read_state(DATA / "older/state")
    assert state.keys() <= statefile.PLUGIN_KEYS | statefile.HOOK_KEYS
    assert (state["version"], state["status"], state["guests"]) == (statefile.VERSION, "ready", "1")
    assert state["generation"] == str(OLDER)
    assert LeaseState.READY.value == state["status"]


def fields(*kinds: object) -> dict[str, list[str]]:
    """Names of the fields of all structures in these."""
    _, parts = msgspec.json.schema_components(kinds)
    return {name: sorted(part["properties"]) for name, part in parts.items() if "properties" in part}


def test_messages_have_no_field_that_older_peers_do_not_expect() -> None:
    """docs/upgrade.md, For developers, has the steps for a change of messages."""
    before = json.loads((DATA / "older/fields.json").read_text())["messages"]
    now = fields(wire.Request, wire.Answer)
    assert now == before or older.VERSION > 9, "messages have changed: raise older.VERSION"
    new = {name for kind in before.keys() & now.keys() for name in set(now[kind]) - set(before[kind])}
    listed = {one.path[-1] for one in older.ADDED}
    assert new <= listed, "fields that an older peer does not know: add them to older.ADDED"
    gone = {name for kind in before.keys() & now.keys() for name in set(before[kind]) - set(now[kind])}
    assert gone == set(), "an older peer expects these fields"


def test_stored_leases_change_with_the_schema_only() -> None:
    before = json.loads((DATA / "older/fields.json").read_text())["stored"]
    now = fields(LeaseWire, TimelineWire)
    assert now == before or SCHEMA_VERSION > 11, "an older vhpcd misreads the leases: add a step to schema.py"
