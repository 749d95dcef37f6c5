# SPDX-License-Identifier: Apache-2.0
"""vhpc fabric: the file it prints, the defects it names, the keys it lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from key_fabric import an_assignment
from vhpc_command import Vhpc

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric.keys import KeyState

FILE = """\
# Written by vhpcd; changes to this file are lost.
# vhpcd epoch 2 tag 0
Default=0x7fff, ipoib :
    ALL=limited, SELF=full ;
key_1000=0x1000, indx0, ipoib :
    0x02cc100000000000=full, 0x02cc100000000100=full ;
"""
STORAGE = "storage=0x0010 : 0x0002c90300000001=full, 0x02cc100000000000=limited ;\n"


@pytest.fixture
def vhpc(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Vhpc:
    store = SqliteStore(tmp_path / "db")
    with store.transaction():
        store.keys.add(an_assignment(1, state=KeyState.ACTIVE))
        store.keys.add(an_assignment(2, pkey=0x1001, state=KeyState.QUARANTINE, left_s=61.0))
    store.close()
    settle(tmp_path, monkeypatch)
    return Vhpc(tmp_path, capsys)


def settle(folder: Path, monkeypatch: pytest.MonkeyPatch, fabric: str = "") -> None:
    config = folder / "vhpc.toml"
    config.write_text(f'[controller]\ndatabase = "{folder}/db"\n[fabric]\n{fabric}')
    monkeypatch.setenv("VHPC_CONFIG", str(config))


def test_keys_are_listed(vhpc: Vhpc) -> None:
    assert [line.split() for line in vhpc("fabric", "ls").splitlines()[1:]] == [
        ["0x1000", "active", "1.0.00000001", "job", "1", "2"],
        ["0x1001", "quarantine", "2.0.00000002", "job", "2", "2", "for", "1m01s"],
    ]
    listed = vhpc.json("fabric", "ls")
    assert listed["epoch"] == 2
    assert listed["assignments"][1]["left_s"] == 61.0


def test_the_file_is_printed_and_passes_the_check(vhpc: Vhpc, tmp_path: Path) -> None:
    text = vhpc("fabric", "render")
    assert re.sub("tag [0-9a-f]{8}$", "tag 0", text, flags=re.MULTILINE) == FILE
    (tmp_path / "file").write_text(FILE)
    assert vhpc("fabric", "lint", str(tmp_path / "file")) == ""
    assert vhpc.json("fabric", "render")["partitions"][1] == {
        "name": "key_1000",
        "pkey": "0x1000",
        "flags": ["indx0", "ipoib"],
        "members": {"0x02cc100000000000": "full", "0x02cc100000000100": "full"},
    }


def test_the_pool_is_printed_without_a_database(
    vhpc: Vhpc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "db").unlink()
    settle(
        tmp_path, monkeypatch, "pkey_last = 0x1002\npkey_reserved = [0x1001]\npool_guests = 2\nrails = 2\n"
    )
    text = vhpc("fabric", "render", "--pool")
    assert [line.split("=")[0] for line in text.splitlines() if "indx0" in line] == ["key_1000", "key_1002"]
    assert (
        "    "
        + ", ".join(f"0x02cc1002{rail:02x}{rank:04x}00=full" for rank in (0, 1) for rail in (0, 1))
        + " ;\n"
        in text
    )


def test_site_partitions_are_added_unless_they_take_a_job_key(
    vhpc: Vhpc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    settle(tmp_path, monkeypatch, f'site_partitions = "{site}"\n')
    default = "Default=0x7fff, ipoib : ALL=limited, SELF=full ;\n"
    site.write_text(default + STORAGE)
    assert vhpc("fabric", "render").endswith(
        "storage=0x0010 :\n    0x0002c90300000001=full, 0x02cc100000000000=limited ;\n"
    )
    site.write_text(default + STORAGE.replace("0x0010", "0x1234"))
    vhpc("fabric", "render", code=4)
    assert "has the key 0x1234" in vhpc.error
    site.write_text(STORAGE)
    vhpc("fabric", "render", code=4)
    assert "must be Default" in vhpc.error
    site.unlink()
    vhpc("fabric", "render", code=4)
    assert "No such file" in vhpc.error


def test_defects_are_shown_with_file_and_line(vhpc: Vhpc, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text(FILE.replace("0x1000,", "0x9000,"))
    assert vhpc("fabric", "lint", str(bad), code=1) == (
        f"{bad}:5: 0x9000 has the membership bit: OpenSM takes it for 0x1000\n"
    )
    found = vhpc.json("fabric", "lint", str(bad), code=1)
    assert found == {
        "file": str(bad),
        "defects": [{"line": 5, "reason": "0x9000 has the membership bit: OpenSM takes it for 0x1000"}],
    }
    assert json.dumps(found)


@pytest.mark.parametrize("name", ["absent", ".", "pipe"])
def test_a_path_that_is_no_file_is_refused_at_once(vhpc: Vhpc, tmp_path: Path, name: str) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    vhpc("fabric", "lint", str(tmp_path / name), code=1)
    assert "cannot read" in vhpc.error


def test_without_a_database_there_is_nothing_to_print(vhpc: Vhpc, tmp_path: Path) -> None:
    (tmp_path / "db").unlink()
    vhpc("fabric", "render", code=4)
    assert "cannot read the keys" in vhpc.error
