# SPDX-License-Identifier: Apache-2.0
"""What is in a snapshot of a folder, and what is refused because not all users can read it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stepd import needs_root

from vhpc_slurm.errors import UserError
from vhpc_slurm.importing import snapshot
from vhpc_slurm.importing.erofs import FileSystem, Inode


@pytest.fixture
def tree() -> Iterator[Path]:
    """A software tree that all users can read, below a folder that all can enter."""
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "sw/bin").mkdir(parents=True)
        (top / "sw/bin/tool").write_bytes(b"#!/bin/sh\n" * 5000)
        (top / "sw/bin/tool").chmod(0o755)
        os.link(top / "sw/bin/tool", top / "sw/bin/same")
        (top / "sw/bin/latest").symlink_to("tool")
        (top / "sw/empty").touch()
        os.mkfifo(top / "sw/pipe")
        (top / "sw/secret").mkdir(mode=0o755)
        (top / "sw/secret/key").write_text("x")
        yield top / "sw"


def written(tree: Path, *excluded: str) -> tuple[tuple[int, int], Path]:
    target = tree.parent / "new.erofs"
    target.touch(0o600)
    uid = snapshot.reader()
    os.chown(target, uid, -1)
    return snapshot.write(tree, target, excluded, uid), target


def content(image: Path) -> dict[str, Inode]:
    with image.open("rb") as file:
        return {path.decode(): inode for path, inode in FileSystem(file.fileno()).walk(1000)}


def test_a_snapshot_has_the_files_with_their_attributes(tree: Path) -> None:
    if os.geteuid() == 0:
        os.chown(tree / "bin/tool", 1234, 4321)
    counts, image = written(tree)
    assert counts == (3, 50001)
    found = content(image)
    names = {"bin", "bin/tool", "bin/same", "bin/latest", "empty", "pipe", "secret", "secret/key"}
    assert set(found) == names
    for path, inode in found.items():
        about = (tree / path).lstat()
        assert (inode.mode, inode.uid, inode.gid) == (about.st_mode, about.st_uid, about.st_gid), path
    assert found["bin/tool"].number == found["bin/same"].number
    folder = image.parent / "extracted"
    subprocess.run(["fsck.erofs", f"--extract={folder}", str(image)], check=True, capture_output=True)
    assert (folder / "bin/tool").read_bytes() == (tree / "bin/tool").read_bytes()
    assert (folder / "bin/latest").readlink() == Path("tool")


CLOSED = {"secret": 0o751, "secret/key": 0o640, "bin": 0o754, "empty": 0o600, ".": 0o750}


@pytest.mark.parametrize("path", CLOSED)
def test_what_not_all_users_can_read_is_refused(tree: Path, path: str) -> None:
    (tree / path).chmod(CLOSED[path])
    with pytest.raises(UserError, match=rf"a guest's root could read then: {re.escape(path)} \(") as raised:
        written(tree)
    assert "--exclude=PATH" in raised.value.hint


def test_a_folder_below_a_closed_one_is_refused(tree: Path) -> None:
    tree.parent.chmod(0o750)
    assert snapshot.scan(tree, ()) == (0, 0, ["."])
    with pytest.raises(UserError, match="cannot make a snapshot of"):
        written(tree)


def test_a_refusal_names_some_files_and_counts_the_rest(tree: Path) -> None:
    for number in range(8):
        (tree / f"f{number}").touch(0o600)
    with pytest.raises(UserError, match="f0, f1, f2, f3, f4 and 3 more"):
        written(tree)


@pytest.mark.skipif(shutil.which("setfacl") is None, reason="needs setfacl: apt install acl")
def test_a_file_with_an_acl_is_refused(tree: Path) -> None:
    subprocess.run(["setfacl", "-m", "u:12345:---", str(tree / "empty")], check=True)
    with pytest.raises(UserError, match="empty"):
        written(tree)


def test_excluded_paths_are_not_in_it(tree: Path) -> None:
    (tree / "secret/key").chmod(0o600)
    counts, image = written(tree, "secret", "bin/same")
    assert counts == (2, 50000)
    assert set(content(image)) == {"bin", "bin/tool", "bin/latest", "empty", "pipe"}


def test_a_link_to_a_folder_is_the_folder(tree: Path) -> None:
    link = tree.parent / "link"
    link.symlink_to("sw")
    counts, image = written(link, "secret")
    assert counts == (2, 50000)
    assert "bin/tool" in content(image)


@needs_root
def test_no_account_and_no_other_command_has_the_readers_uid() -> None:
    found = {snapshot.reader() for _ in range(8)}
    assert len(found) == 8
    for uid in found:
        with pytest.raises(KeyError):
            pwd.getpwuid(uid)


@needs_root
def test_root_reads_without_rights_what_changes_meanwhile(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "scan", lambda *_: (1, 1, []))
    (tree / "secret/key").chmod(0o600)
    with pytest.raises(UserError, match=r"mkfs.erofs ended with status 1: .*[Pp]ermission denied"):
        written(tree)


def test_a_full_catalogue_is_an_error(tree: Path) -> None:
    with pytest.raises(UserError, match="cannot make a snapshot of"):
        snapshot.write(tree, Path("/dev/full"), (), snapshot.reader())


def test_a_reader_that_is_killed_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_written", lambda *_: os.kill(os.getpid(), 9))
    with pytest.raises(UserError, match="the process that read it was killed"):
        written(tree)
