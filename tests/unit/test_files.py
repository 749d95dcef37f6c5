# SPDX-License-Identifier: Apache-2.0
"""Durable writes and file locks, in folders and with processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vhpc_slurm import files

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_a_replaced_file_has_its_mode_with_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o077)
    try:
        files.replace(path, b"old")
        files.replace(path, b"new", 0o644)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o7777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".file.new").symlink_to(victim)
    files.replace(tmp_path / "file", b"new")
    assert (victim.read_text(), (tmp_path / "file").read_text()) == ("kept", "new")
    assert not (tmp_path / "file").is_symlink()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.replace(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    files.replace(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_a_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not files.is_locked(path)
    assert not path.exists()
    fd = files.open_lock(path)
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert files.is_locked(path)
        assert not files.try_lock(fd)
        began = time.monotonic()
        assert not files.lock(fd, 0.2)
        assert time.monotonic() - began >= 0.2
        holder.kill()
    assert files.lock(fd, 10.0)
    assert files.is_locked(path)
    os.close(fd)
    assert not files.is_locked(path)


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        files.open_lock(tmp_path / "lock")
