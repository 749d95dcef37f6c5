# SPDX-License-Identifier: Apache-2.0
"""`vhpc share`, and what doctor says of snapshots."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vhpc_slurm.catalog import snapshots
from vhpc_slurm.cli.host.checks import Level
from vhpc_slurm.cli.host.checks import snapshots as check
from vhpc_slurm.cli.main import main
from vhpc_slurm.config import load


class Site:
    """A site with the folder ``sw`` and an empty catalogue."""

    def __init__(self, top: Path) -> None:
        self.folder, self.config = top / "sw", top / "vhpc.toml"
        for folder in (self.folder, top / "catalog"):
            folder.mkdir(mode=0o755)
        (self.folder / "tool").write_text("#!/bin/sh\n")
        keys = "".join(f'{key} = ["{self.folder}"]\n' for key in ("site", "read_only", "snapshots"))
        self.config.write_text(f'[images]\ncatalog = "{top}/catalog"\n[shares]\n{keys}')

    def levels(self) -> list[tuple[Level, str]]:
        return [(one.level, one.what) for one in check.check(load(self.config))]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        found = Site(Path(name))
        monkeypatch.setenv("VHPC_CONFIG", str(found.config))
        yield found


def test_a_snapshot_is_made_listed_and_checked(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.levels() == [(Level.WARN, f"guests get {site.folder} through virtiofsd: it has no snapshot")]
    assert main(["share", "ls"]) == 0
    assert f"none: vhpc share snapshot {site.folder}" in capsys.readouterr().out
    assert main(["share", "snapshot", str(site.folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["path"], made["files"], made["bytes"]) == (str(site.folder), 1, 10)
    assert main(["share", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"path": str(site.folder), "snapshot": made, "problem": ""}
    ]
    file = snapshots.folder(load(site.config).images) / made["file"]
    assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (os.geteuid(), 0o444)
    ((level, what),) = site.levels()
    assert level is Level.OK
    assert what.startswith(f"guests mount {site.folder} as it was on ")


def test_a_site_without_snapshots_is_told_the_setting(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.config.write_text("")
    assert main(["share", "ls"]) == 0
    assert capsys.readouterr().out == "no folder has snapshots: set shares.snapshots in vhpc.toml\n"


def test_the_result_is_one_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["share", "snapshot", str(site.folder)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{site.folder}: ")
    assert "1 files, 10 B in " in said.out
    assert said.err.startswith(f"vhpc: reading {site.folder}\n")


def test_a_refused_snapshot_changes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["share", "snapshot", str(site.folder), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    (site.folder / "licence").touch(0o600)
    assert main(["share", "snapshot", str(site.folder)]) == 1
    err = capsys.readouterr().err
    assert "not all users can read what a guest's root could read then: licence" in err
    config = load(site.config)
    assert snapshots.current(config.images, str(site.folder)) is not None
    found = sorted(path.name for path in snapshots.folder(config.images).iterdir())
    assert len(found) == 2
    assert before["file"] in found


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["/other"], "/other has no snapshots: shares.snapshots in vhpc.toml: {folder}"),
        (["{folder}", "--exclude=/etc"], "--exclude=/etc is not in {folder}"),
        (["{folder}", "--exclude=../x"], "--exclude=../x is not in {folder}"),
        (["{folder}", "--exclude=."], "--exclude=. is not in {folder}"),
        (["{folder}", "--exclude=nope"], "--exclude=nope does not exist in {folder}"),
    ],
)
def test_wrong_words_are_refused(
    site: Site, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    words = [word.format(folder=site.folder) for word in arguments]
    assert main(["share", "snapshot", *words]) == 1
    assert why.format(folder=site.folder) in capsys.readouterr().err


def test_an_excluded_path_may_be_absolute(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder / "licence").touch(0o600)
    exclude = f"--exclude={site.folder}/licence"
    assert main(["share", "snapshot", str(site.folder), exclude, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 1


def test_a_catalogue_that_cannot_be_written_is_named(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder.parent / "catalog").rmdir()
    assert main(["share", "snapshot", str(site.folder)]) == 4
    assert f"cannot write a snapshot into {site.folder.parent}/catalog/snapshots" in capsys.readouterr().err
