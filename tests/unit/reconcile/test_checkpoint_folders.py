# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints that vhpcd does not keep are deleted, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kill_rig import killed_at

from vhpc_slurm.errors import FabricError
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.reconcile import checkpoint_folders
from vhpc_slurm.reconcile.finding import RepairResult, repair

FILES = ("0.state", "0.state.tags", "0.disk", "0.disk.tags")


@dataclass
class Vhpcd:
    """vhpcd with the serials of checkpoints that it keeps; None: it does not answer."""

    known: Collection[int] | None = ()
    asked: list[Collection[int]] = field(default_factory=list)

    def known_checkpoints(self, serials: Collection[int]) -> Collection[int]:
        self.asked.append(serials)
        if self.known is None:
            raise FabricError("vhpcd does not answer")
        return set(self.known) & set(serials)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir(mode=0o700)
    return made


def checkpoint(root: Path, serial: int | str) -> Path:
    folder = root / str(serial)
    folder.mkdir(mode=0o700)
    for name in FILES:
        (folder / name).write_text(f"{serial} {name}")
    return folder


def cleaned(root: Path, vhpcd: Vhpcd, *, check: bool = False) -> list[RepairResult]:
    return [repair(one, check=check) for one in checkpoint_folders.findings(str(root), vhpcd)]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_vhpcd_keeps_stays_and_the_rest_goes(root: Path) -> None:
    for serial in (3, 4, 12):
        checkpoint(root, serial)
    vhpcd = Vhpcd({4})
    results = cleaned(root, vhpcd)
    assert [(one.kind, one.repaired, one.error) for one in results] == [
        (Kind.ORPHAN_CHECKPOINT, True, "")
    ] * 2
    assert results[0].what == f"the folder {root}/12 belongs to no checkpoint of vhpcd's"
    assert vhpcd.asked == [[3, 4, 12]]
    assert names(root) == ["4"]
    assert names(root / "4") == sorted(FILES)


def test_a_check_deletes_nothing(root: Path) -> None:
    checkpoint(root, 3)
    assert [one.repaired for one in cleaned(root, Vhpcd(), check=True)] == [False]
    assert names(root) == ["3"]


def test_other_files_of_the_folder_belong_to_the_site(root: Path) -> None:
    for name in ("lost+found", "007", "3.old", "-4", "٣"):
        (root / name).mkdir()
    (root / "5").write_text("a file")
    vhpcd = Vhpcd()
    before = names(root)
    assert cleaned(root, vhpcd) == []
    assert vhpcd.asked == []
    assert names(root) == before


def test_without_an_answer_of_vhpcd_nothing_is_deleted(root: Path) -> None:
    checkpoint(root, 3)
    (result,) = cleaned(root, Vhpcd(None))
    assert (result.repaired, result.error, result.drains) == (False, "vhpcd does not answer", False)
    assert names(root) == ["3"]


def test_where_checkpoints_are_off_nothing_is_asked() -> None:
    vhpcd = Vhpcd()
    assert list(checkpoint_folders.findings("", vhpcd)) == []
    assert vhpcd.asked == []


def test_an_absent_folder_does_not_drain_the_node(tmp_path: Path) -> None:
    (result,) = cleaned(tmp_path / "absent", Vhpcd())
    assert "No such file or directory" in result.error
    assert not result.drains


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_left_alone(root: Path, mode: int) -> None:
    checkpoint(root, 3)
    root.chmod(mode)
    (result,) = cleaned(root, Vhpcd())
    assert f"mode {mode:o}" in result.error
    assert names(root) == ["3"]


def test_links_are_never_followed(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("x")
    (root / "7").symlink_to(other)
    (root / ".removed-8-0").symlink_to(other)
    folder = checkpoint(root, 3)
    (folder / "1.state").symlink_to(other / "precious")
    (folder / "below").mkdir()
    (folder / "below" / "all").symlink_to(other)
    assert [one.repaired for one in cleaned(root, Vhpcd())] == [True]
    assert (other / "precious").read_text() == "x"
    assert names(root) == [".removed-8-0", "7"]


def test_a_folder_that_became_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    checkpoint(tmp_path, "other")
    folder = checkpoint(root, 3)
    (found,) = checkpoint_folders.findings(str(root), Vhpcd())
    folder.rename(tmp_path / "moved")
    folder.symlink_to(other)
    result = repair(found, check=False)
    assert not result.repaired
    assert names(other) == sorted(FILES)


def test_a_linked_folder_of_checkpoints_is_refused(root: Path, tmp_path: Path) -> None:
    checkpoint(root, 3)
    link = tmp_path / "link"
    link.symlink_to(root)
    (result,) = cleaned(link, Vhpcd())
    assert not result.repaired
    assert names(root) == ["3"]


def test_a_killed_removal_leaves_no_part_of_a_checkpoint(root: Path) -> None:
    folder, step = checkpoint(root, 3), 0
    while killed_at(step, lambda: checkpoint_folders.remove(root, "3")):
        assert not folder.exists() or names(folder) == sorted(FILES)
        cleaned(root, Vhpcd())
        assert names(root) == []
        checkpoint(root, 3)
        step += 1
    assert step > len(FILES)
    assert names(root) == []


def test_nodes_may_delete_folders_at_the_same_time(root: Path) -> None:
    for serial in range(30):
        checkpoint(root, serial)
        checkpoint(root, f".removed-{serial + 100}-0")
    found = [list(checkpoint_folders.findings(str(root), Vhpcd())) for _ in range(4)]
    results: list[RepairResult] = []

    def work(node: int) -> None:
        results.extend(repair(one, check=False) for one in found[node])

    threads = [threading.Thread(target=work, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.error for one in results} == {""}
    assert names(root) == []


def test_silent_storage_does_not_stop_a_health_check(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(checkpoint_folders, "LIST_S", 0.1)
    monkeypatch.setattr(checkpoint_folders, "_names", lambda _: never.wait(30))
    (result,) = cleaned(root, Vhpcd())
    never.set()
    assert result.error == f"the folder {root} does not answer: waited 0.1 s (check the storage)"
