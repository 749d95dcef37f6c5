# SPDX-License-Identifier: Apache-2.0
"""Disks of guests: real files with a real file system, judged by e2fsck, stat and the kernel's own counts."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from node_rig import node_layout
from stepd import needs_root

from vhpc_slurm.cli.host.checks import Level
from vhpc_slurm.config import Config
from vhpc_slurm.config.disks import Disks
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.resource.disk import Disk
from vhpc_slurm.node.store import disks
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
pytestmark = needs_root
JOB = Generation(42, 0, "0123abcd")
MIB = 1 << 20


def with_disks(layout: Layout, **changes: object) -> Layout:
    """The same node with other settings of [disks]."""
    settings = msgspec.structs.replace(layout.config.disks, **changes)
    return Layout(msgspec.structs.replace(layout.config, disks=settings))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a disk, as on nodes: on tmpfs the file has fewer blocks than were reserved after mkfs.ext4."""
    with tempfile.TemporaryDirectory(prefix="vhpc-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def small(layout: Layout) -> Iterator[Layout]:
    """The node with 100 MiB for disks, on a file system of their own."""
    layout.disks.mkdir(mode=0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m,mode=0711", "disks", layout.disks], check=True)
    yield layout
    subprocess.run(["umount", layout.disks], check=True)


@pytest.mark.promise("disk.size", "attack.disk")
def test_a_disk_is_an_empty_ext4_whose_space_is_reserved(layout: Layout) -> None:
    disks.make(layout, JOB, 1, 256, "n1")
    disks.give(layout, JOB, 1, 4_100_001)
    file = layout.disks / "vhpc-42-0-0123abcd-g1.disk"
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (4_100_001, 0, 0o600)
    assert found.st_size == 256 * MIB
    assert found.st_blocks * 512 >= 256 * MIB
    done = subprocess.run(["e2fsck", "-fn", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    told = subprocess.run(["dumpe2fs", "-h", file], capture_output=True, text=True, check=True).stdout
    features = next(line for line in told.splitlines() if line.startswith("Filesystem features"))
    assert "has_journal" not in features
    assert list(disks.existing(layout)) == [(JOB, 1)]
    disks.delete(layout, JOB, 1)
    disks.delete(layout, JOB, 1)
    assert list(disks.existing(layout)) == []


@pytest.mark.promise("disk.size")
def test_a_disk_of_a_killed_prolog_is_made_again(layout: Layout) -> None:
    layout.disks.mkdir(mode=0o711)
    file = disks.path(layout, JOB, 0)
    file.write_bytes(b"secret" * 100_000)
    disks.make(layout, JOB, 0, 64, "n1")
    assert b"secret" not in file.read_bytes()
    assert file.stat().st_size == 64 * MIB


@pytest.mark.promise("attack.disk")
def test_a_disk_shows_no_bytes_of_the_disk_before_it(layout: Layout, tmp_path: Path) -> None:
    """The storage has room for one disk, so the second gets the blocks that the first has filled."""
    whole, size = tmp_path / "storage", 100 * MIB
    with whole.open("wb") as file:
        file.truncate(140 * MIB)
    subprocess.run(["mkfs.ext4", "-q", whole], check=True)
    layout.disks.mkdir()
    mount = subprocess.run(["mount", "-o", "loop", whole, layout.disks], check=False, capture_output=True)
    if mount.returncode != 0:
        pytest.skip("needs loop devices: run where /dev/loop-control exists, as root")
    try:
        layout.disks.chmod(0o711)
        disks.make(layout, JOB, 0, 100, "n1")
        with disks.path(layout, JOB, 0).open("r+b", buffering=0) as file:  # as its QEMU writes to it
            while file.tell() < size:
                file.write(b"SECRET!\n" * 131072)
            os.fsync(file.fileno())
        disks.delete(layout, JOB, 0)
        os.sync()
        assert whole.read_bytes().count(b"SECRET!\n") > size / 8 * 0.9, "the storage has the bytes still"
        other = Generation(43, 0, "0123abcd")
        disks.make(layout, other, 0, 100, "n1")
        with disks.path(layout, other, 0).open("rb", buffering=0) as file:
            while data := file.read(16 * MIB):
                assert b"SECRET" not in data
            assert file.tell() == size
    finally:
        subprocess.run(["umount", layout.disks], check=True)


@pytest.mark.promise("attack.disk")
def test_space_that_the_site_keeps_is_not_for_disks(small: Layout) -> None:
    assert disks.free_mib(small) == 100
    disks.check_space(small, 100, "n1")
    with pytest.raises(UserError, match=r"n1 has no space .*: 100 MiB of its storage are free .* needs 101 "):
        disks.check_space(small, 101, "n1")
    with pytest.raises(UserError, match="40 MiB of its storage"):
        disks.check_space(with_disks(small, keep_free_mib=60), 64, "n1")
    assert disks.free_mib(with_disks(small, keep_free_mib=101)) == 0


@pytest.mark.promise("disk.refuse")
def test_storage_that_becomes_full_fails_the_job(small: Layout) -> None:
    disks.make(small, JOB, 0, 64, "n1")
    assert disks.free_mib(small) == 36
    with pytest.raises(UserError, match=r"n1 has no space .* has become full; the job needs 64 MiB more"):
        disks.make(small, JOB, 1, 64, "n1")
    disks.delete(small, JOB, 1)
    disks.delete(small, JOB, 0)
    assert disks.free_mib(small) == 100


@pytest.mark.parametrize("damage", ["writable", "of a user", "link", "file"])
def test_a_folder_that_others_may_change_is_refused(layout: Layout, tmp_path: Path, damage: str) -> None:
    if damage == "link":
        (tmp_path / "other").mkdir()
        layout.disks.symlink_to(tmp_path / "other")
    elif damage == "file":
        layout.disks.touch()
    else:
        layout.disks.mkdir()
        layout.disks.chmod(0o1777 if damage == "writable" else 0o711)
        os.chown(layout.disks, 1000 if damage == "of a user" else 0, -1)
    with pytest.raises(NodeError, match=r"disks\.folder"):
        disks.make(layout, JOB, 0, 64, "n1")
    assert not (tmp_path / "other").exists() or not list((tmp_path / "other").iterdir())


def test_other_files_in_the_folder_are_ignored(layout: Layout) -> None:
    assert list(disks.existing(layout)) == []
    layout.disks.mkdir()
    names = "lost+found vhpc-42-0-0123abcd-g0 vhpc-0-0-0123abcd-g0.disk x.disk vhpc-1-0-g0.disk"
    for name in names.split():
        (layout.disks / name).touch()
    assert list(disks.existing(layout)) == []


def test_a_program_that_is_missing_is_named(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "MKFS", "/nonexistent/mkfs.ext4")
    with pytest.raises(NodeError, match=r"cannot run /nonexistent/mkfs.ext4: .*apt install e2fsprogs"):
        disks.make(layout, JOB, 0, 64, "n1")
    finding = next(iter(Disk().check(layout.config, "n1", root=True)))
    assert finding.what.startswith("/nonexistent/mkfs.ext4 not found: jobs with --vhpc-disk fail here")


def test_doctor_shows_the_disks_that_a_node_can_have(small: Layout) -> None:
    def levels(layout: Layout, *, root: bool = True) -> list[Level]:
        return [finding.level for finding in Disk().check(layout.config, "n1", root=root)]

    assert list(Disk().check(Config(disks=Disks()), "n1", root=True)) == []
    assert levels(with_disks(small, max_mib=100)) == [Level.OK]
    assert levels(with_disks(small, max_mib=101)) == [Level.WARN]
    assert levels(small, root=False) == [Level.WARN]
    small.disks.chmod(0o777)
    assert levels(small) == [Level.ERROR]
