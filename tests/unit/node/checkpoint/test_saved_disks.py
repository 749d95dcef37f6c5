# SPDX-License-Identifier: Apache-2.0
"""Disks of guests in a checkpoint: data come back, holes cost nothing, other bytes are refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoint_files import DISK_KEY, RESUME, changed, full_after, names, nothing_is_left, root
from stepd import needs_root

from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import SavedGuest, Seal
from vhpc_slurm.node.checkpoint import folder, restore, save, stream
from vhpc_slurm.node.checkpoint.seal import BrokenSealError

__all__ = ["nothing_is_left", "root"]
pytestmark = needs_root
MIB = 1 << 20
DATA = random.Random(3).randbytes(MIB)


def disk_with(path: Path, size: int, at: tuple[int, ...]) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
        for one in at:
            file.seek(one)
            file.write(DATA[: size - one])
    return path


def saved_disk(root: Path, disk: Path) -> Seal:
    with folder.made(root, 7) as place:
        return save.save_disk(place, DISK_KEY, disk)


def new_disk(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("size", "at", "ranges"),
    [
        (0, (), 0),
        (64 * MIB, (), 0),
        (64 * MIB, (0,), 1),
        (64 * MIB, (0, 63 * MIB), 2),
        (64 * MIB, (8 * MIB, 9 * MIB + 4096, 20 * MIB), 2),
        (5 * MIB + 100, (4 * MIB,), 1),
    ],
)
def test_a_disk_comes_back_without_its_holes_being_saved(
    root: Path, tmp_path: Path, size: int, at: tuple[int, ...], ranges: int
) -> None:
    disk = disk_with(tmp_path / "disk", size, at)
    seal = saved_disk(root, disk)
    with disk.open("rb") as file:
        assert len(list(save.data_ranges(file.fileno()))) == ranges
    assert seal.size <= len(at) * (MIB + 8192) + 100
    new = new_disk(tmp_path / "new", size)
    restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, seal, seal), new)
    assert new.read_bytes() == disk.read_bytes()
    assert new.stat().st_blocks <= disk.stat().st_blocks + 64


def test_a_full_file_system_ends_the_save_of_a_disk(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_with(tmp_path / "disk", 64 * MIB, tuple(one * MIB for one in range(32)))
    full_after(monkeypatch, 2)
    with pytest.raises(NodeError, match=r"0\.disk: No space left"):
        saved_disk(root, disk)
    assert names(root / "7") == []


def test_a_disk_of_another_size_is_refused(root: Path, tmp_path: Path) -> None:
    seal = saved_disk(root, disk_with(tmp_path / "disk", 4 * MIB, (0,)))
    new = new_disk(tmp_path / "new", 5 * MIB)
    with pytest.raises(UserError, match="it is of a disk of 4194304 bytes, and the guest has one of 5242880"):
        restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, seal, seal), new)


@pytest.mark.parametrize("at", [0, 100, MIB])
def test_a_changed_disk_is_refused(root: Path, tmp_path: Path, at: int) -> None:
    seal = saved_disk(root, disk_with(tmp_path / "disk", 4 * MIB, (0, MIB)))
    changed(root / "7/0.disk", at, b"changed")
    new = new_disk(tmp_path / "new", 4 * MIB)
    with pytest.raises(UserError, match="its bytes from 0 on were changed"):
        restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, seal, seal), new)
    assert new.read_bytes() == bytes(4 * MIB)


@pytest.mark.parametrize(
    "table",
    [
        save.DISK_HEAD.pack(b"vhpcdsk2", MIB, 0),
        save.DISK_HEAD.pack(b"vhpcdsk1", MIB, 1),
        save.DISK_HEAD.pack(b"vhpcdsk1", MIB, 1 << 60),
        save.DISK_HEAD.pack(b"vhpcdsk1", MIB, 0) + b"more",
        save.DISK_HEAD.pack(b"vhpcdsk1", MIB, 1) + save.DISK_RANGE.pack(MIB, 1) + b"x",
        save.DISK_HEAD.pack(b"vhpcdsk1", MIB, 1) + save.DISK_RANGE.pack(1 << 63, 1 << 63) + b"x",
        b"vhpc",
        b"",
    ],
    ids=["magic", "none", "endless", "more", "outside", "overflow", "short", "empty"],
)
def test_a_table_of_ranges_that_is_wrong_is_refused(root: Path, tmp_path: Path, table: bytes) -> None:
    with folder.made(root, 7) as place, stream.SealedWriter(place, DISK_KEY) as writer:
        writer.write(table)
        seal = writer.finish()
    new = new_disk(tmp_path / "new", MIB)
    with pytest.raises(BrokenSealError):
        restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, seal, seal), new)


def test_a_guest_without_a_disk_has_none_restored(root: Path, tmp_path: Path) -> None:
    restore.restore_disk(root, RESUME, SavedGuest(0, "n1", 1, 1, Seal(0, b"")), tmp_path / "none")
