# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shared folders in the catalogue: which one is current, and which ones stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vhpc_slurm.catalog import snapshots
from vhpc_slurm.config.images import Images
from vhpc_slurm.errors import FabricError

DAY = 86400


@pytest.fixture
def site() -> Iterator[Images]:
    """A site whose catalogue all users can read."""
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "catalog").mkdir(mode=0o755)
        yield Images(catalog=str(top / "catalog"))


def made(site: Images, path: str, content: bytes, stamp: str = "") -> snapshots.Snapshot:
    new = snapshots.unfinished(site, path, os.geteuid())
    if stamp:  # as if it had been made then
        new = new.rename(new.with_name(f"{new.name.rpartition('-')[0]}-{stamp}.erofs"))
    new.write_bytes(content)
    return snapshots.publish(path, new, (3, 30), 1e9)


def names(site: Images) -> list[str]:
    return sorted(path.name for path in snapshots.folder(site).iterdir())


def age(path: Path, days: float) -> None:
    before = path.stat().st_mtime - days * DAY
    os.utime(path, (before, before))


def test_a_folder_has_no_snapshot_before_the_first(site: Images) -> None:
    assert snapshots.current(site, "/sw") is None
    assert snapshots.remove_old(site, "/sw", 0) == []


def test_the_last_snapshot_is_the_current_one(site: Images) -> None:
    made(site, "/sw", b"old", "20260101T000000Z")
    new = made(site, "/sw", b"newer", "20260102T000000Z")
    other = made(site, "/opt/sw", b"other")
    assert snapshots.current(site, "/sw") == new
    assert (new.size, new.files, new.bytes, new.began) == (5, 3, 30, 1e9)
    assert snapshots.current(site, "/opt/sw") == other
    file = snapshots.folder(site) / new.file
    assert file.read_bytes() == b"newer"
    assert file.stat().st_mode & 0o7777 == 0o444


def test_folders_with_similar_names_have_files_of_their_own(site: Images) -> None:
    found = {path: made(site, path, path.encode()) for path in ("/a/b", "/a-b", "/a b")}
    assert {path: snapshots.current(site, path) for path in found} == found


def test_a_replaced_snapshot_stays_for_its_days(site: Images) -> None:
    old = made(site, "/sw", b"old", "20260101T000000Z")
    new = made(site, "/sw", b"newer", "20260102T000000Z")
    age(snapshots.folder(site) / old.file, 100)
    assert snapshots.remove_old(site, "/sw", 14) == []
    age(snapshots.folder(site) / new.file, 13.9)
    assert snapshots.remove_old(site, "/sw", 14) == []
    age(snapshots.folder(site) / new.file, 0.2)
    assert snapshots.remove_old(site, "/sw", 14) == [old.file]
    assert [name for name in names(site) if not name.endswith(".json")] == [new.file]


def test_daily_snapshots_stay_for_their_days_and_no_longer(site: Images) -> None:
    """Each day's command makes one, and removes what is too old."""
    for day in range(20):
        for file in snapshots.folder(site).glob("*.erofs"):
            age(file, 1)
        made(site, "/sw", b"x", f"202601{day + 1:02}T000000Z")
        snapshots.remove_old(site, "/sw", 5)
    kept = [name for name in names(site) if name.endswith(".erofs")]
    # the current one, and those that were replaced 0, 1, 2, 3 and 4 days ago
    assert [name.rpartition("-")[2][6:8] for name in kept] == ["15", "16", "17", "18", "19", "20"]


def test_the_rest_of_a_killed_command_goes_after_a_day(site: Images) -> None:
    left, other = (snapshots.unfinished(site, path, os.geteuid()) for path in ("/sw", "/opt"))
    left = left.rename(left.with_name(f"{left.name.rpartition('-')[0]}-20260101T000000Z.erofs"))
    made(site, "/sw", b"new", "20260102T000000Z")
    assert snapshots.remove_old(site, "/sw", 0) == []
    for file in (left, other):
        age(file, 1.1)
    assert snapshots.remove_old(site, "/sw", 0) == [left.name]
    assert other.exists()


def hidden(file: Path) -> None:
    file.parents[1].chmod(0o750)


DAMAGES = {
    "is not one of /sw": lambda file: (file.rename(file.with_suffix(".x")), file.symlink_to("/etc/passwd")),
    "No such file": lambda file: file.unlink(),
    "has 2 bytes instead of 3": lambda file: os.truncate(file, 2),
    "QEMU cannot read": hidden,
}


@pytest.mark.parametrize("why", DAMAGES)
def test_a_snapshot_that_guests_cannot_use_is_refused(site: Images, why: str) -> None:
    one = made(site, "/sw", b"new")
    DAMAGES[why](snapshots.folder(site) / one.file)
    with pytest.raises(FabricError, match=why) as raised:
        snapshots.current(site, "/sw")
    assert raised.value.hint


@pytest.mark.parametrize(
    "text", ["", "{}", '{"path": "/sw", "file": "../x.erofs", "size": 1, "files": 1, "bytes": 1, "began": 1}']
)
def test_a_damaged_pointer_is_refused(site: Images, text: str) -> None:
    made(site, "/sw", b"new")
    (pointer,) = snapshots.folder(site).glob("*.json")
    (Path(site.catalog) / "x.erofs").write_bytes(b"x")
    pointer.write_text(text)
    with pytest.raises(FabricError, match="the snapshot of /sw cannot be used"):
        snapshots.current(site, "/sw")


def test_the_path_of_a_catalogue_must_be_plain(site: Images) -> None:
    moved = Path(site.catalog).rename(f"{site.catalog},x")
    strange = Images(catalog=str(moved))
    made(strange, "/sw", b"new")
    with pytest.raises(FabricError, match="letters, digits and"):
        snapshots.current(strange, "/sw")
