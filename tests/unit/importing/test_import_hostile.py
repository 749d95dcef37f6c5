# SPDX-License-Identifier: Apache-2.0
"""Sources that are hostile or broken, each through a whole import: one clear line, and nothing is left.

The tables are in ``hostile_tars``, ``hostile_containers`` and ``hostile_files``; a new format is a
new table. Registries that misbehave are in ``test_import_registry``, manifests in ``test_manifest``,
signatures in ``test_image_signatures``.
"""

from __future__ import annotations

import io
import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import hostile_containers
import hostile_files
import hostile_tars
import pytest
from hostile_rig import Case, Site
from import_rig import applied, listing

from vhpc_slurm.importing import rootfs, taking
from vhpc_slurm.importing.layers import Budget
from vhpc_slurm.importing.tree import RefusedError, Tree

CASES = [*hostile_tars.CASES, *hostile_containers.CASES, *hostile_files.CASES]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(found.work))
    return found


@pytest.mark.promise("attack.import-bomb")
@pytest.mark.long  # more than two hundred imports
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_failed_import_is_one_line(site: Site, case: Case) -> None:
    line = site.refusal(case.make(site.source))
    assert re.search(case.says, line), line
    assert line.startswith("cannot import ")
    for word in ("Traceback", "Error", "/in/source", "/out", "its reader"):
        assert word not in line, line


def test_no_case_has_the_name_of_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.promise("attack.import-bomb")
@pytest.mark.parametrize("name", hostile_tars.KEPT)
def test_odd_names_and_links_stay_inside_of_the_image(tmp_path: Path, name: str) -> None:
    layers, expected = hostile_tars.KEPT[name]
    assert listing(*applied(tmp_path, *layers)) == expected


def folder_of(top: Path) -> Tree:
    tree = Tree(100)
    taking.take_folder(tree, top, Budget(1 << 20))
    return tree


def test_special_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        (tmp_path / "file").write_text("x")
        (tmp_path / "file").chmod(0o4755)
        (tmp_path / "link").symlink_to("/etc/shadow")
        (tmp_path / "a\nb \udcff").touch()
        tree = Tree(100)
        assert taking.take_folder(tree, tmp_path, Budget(1 << 20)) == 2
    assert listing(tree, []) == {"file": "x", "link": "-> /etc/shadow", "a\nb \udcff": ""}
    modes = {path: node.mode for path, node in tree.walk()}
    assert modes["file"] == 0o4755


@pytest.mark.promise("attack.source-swap")
@pytest.mark.parametrize(
    ("swap", "says"),
    [
        (lambda path: path.symlink_to("../outside/secret"), "cannot read 'a': Too many levels"),
        (os.mkfifo, "'a' is not a regular file any more"),
        (Path.mkdir, "'a' is not a regular file any more"),
        (lambda path: path.write_bytes(b"x"), "'a' became shorter"),
        (lambda path: None, "cannot read 'a': No such file"),
    ],
    ids=["link", "pipe", "folder", "short", "gone"],
)
def test_a_file_that_is_swapped_while_it_is_read(
    tmp_path: Path, swap: Callable[[Path], object], says: str
) -> None:
    """Between the reading of names and of contents."""
    top = tmp_path / "top"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("the secret of somebody")
    top.mkdir()
    (top / "a").write_bytes(b"x" * 1000)
    tree, out = folder_of(top), io.BytesIO()
    (top / "a").unlink()
    swap(top / "a")
    with pytest.raises(RefusedError, match=says):
        rootfs.write_tar(tree, [], out)
    assert b"secret" not in out.getvalue()
