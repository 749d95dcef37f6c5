# SPDX-License-Identifier: Apache-2.0
"""The journal is the promise that nothing leaks; these hold it to that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace import examples
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store.journal import Journal, Stopped, generations

GENERATION = Generation(42, 1, "0123abcd")


def keys(journal: Journal) -> list[str]:
    return [entry.key for entry in journal.held()]


def test_releases_come_newest_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path, GENERATION)
    for key in ("a", "b", "c"):
        journal.acquire("uid", key, uid=1)
    journal.released("b")
    assert keys(journal) == ["c", "a"]


def test_a_new_process_sees_held_resources_with_updates(tmp_path: Path) -> None:
    journal = Journal(tmp_path, GENERATION)
    journal.acquire("process", "p", role="shim")
    journal.update("p", pid=7, started=9)
    journal.close()
    (entry,) = Journal(tmp_path, GENERATION).held()
    assert (entry.kind, entry.key, entry.data) == ("process", "p", {"role": "shim", "pid": 7, "started": 9})


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    journal = Journal(tmp_path, GENERATION)
    journal.acquire("uid", "a", uid=1)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"event":"acq')
    again = Journal(tmp_path, GENERATION)
    assert keys(again) == ["a"]
    again.acquire("uid", "b", uid=2)
    again.close()
    assert keys(Journal(tmp_path, GENERATION)) == ["b", "a"]


@pytest.mark.parametrize(
    "line", ["{}", "[]", '{"event":"eat","key":"a"}', '{"event":"update","key":"x","data":{}}']
)
def test_a_damaged_line_is_refused_with_the_files_name(tmp_path: Path, line: str) -> None:
    journal = Journal(tmp_path, GENERATION)
    journal.close()
    journal.path.write_text(line + "\n")
    with pytest.raises(NodeError, match=str(journal.path)):
        Journal(tmp_path, GENERATION)


def test_nothing_is_acquired_after_the_tombstone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", GENERATION)
    journal.stop_when(tmp_path / "tomb")
    journal.acquire("uid", "a", uid=1)
    (tmp_path / "tomb").touch()
    with pytest.raises(Stopped):
        journal.acquire("uid", "b", uid=2)
    assert keys(journal) == ["a"]


def test_a_journal_that_holds_something_is_not_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, GENERATION)
    journal.acquire("uid", "a", uid=1)
    with pytest.raises(NodeError):
        journal.remove()
    journal.released("a")
    journal.remove()
    assert list(generations(tmp_path)) == []


def test_a_symlink_in_place_of_the_journal_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / f"{GENERATION}.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NodeError):
        Journal(tmp_path / "j", GENERATION)
    assert not (tmp_path / "elsewhere").exists()


def test_announced_resources_survive_sigkill(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from vhpc_slurm.model import Generation
from vhpc_slurm.node.store.journal import Journal
journal = Journal(Path({str(tmp_path)!r}), Generation(42, 1, "0123abcd"))
for n in range(5):
    journal.acquire("uid", f"k{{n}}", uid=n)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert keys(Journal(tmp_path, GENERATION)) == ["k4", "k3", "k2", "k1", "k0"]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["acquire", "released", "reopen"]), st.integers(0, 5)), max_size=30)
)
def test_the_file_always_equals_the_memory(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, GENERATION)
    expected: list[str] = []
    for act, number in acts:
        key = f"k{number}"
        if act == "acquire" and key not in expected:
            journal.acquire("uid", key, uid=number)
            expected.append(key)
        elif act == "released" and key in expected:
            journal.released(key)
            expected.remove(key)
        elif act == "reopen":
            journal.close()
            journal = Journal(folder, GENERATION)
        assert keys(journal) == expected[::-1]
    journal.close()
