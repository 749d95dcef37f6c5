# SPDX-License-Identifier: Apache-2.0
"""Databases of the earlier backend vxlan, whose VNIs were assignments of the fabric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from key_fabric import an_assignment

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.keys import KeyState

VNI = (1 << 24) + 5000


@pytest.mark.parametrize("state", [KeyState.ACTIVE, KeyState.DRAINING, KeyState.TOMBSTONE])
def test_a_database_with_vnis_in_use_is_refused(tmp_path: Path, state: KeyState) -> None:
    store = SqliteStore(tmp_path / "db")
    with store.transaction():
        store.keys.add(an_assignment(1, pkey=VNI))
        store.keys.update([replace(an_assignment(1, pkey=VNI), state=state)])
    store.close()
    with pytest.raises(FabricError, match=r"1 jobs have a VNI of fabric\.backend vxlan"):
        SqliteStore(tmp_path / "db")


def test_a_database_with_vnis_in_quarantine_only_is_used(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    with store.transaction():
        store.keys.add(an_assignment(1, pkey=VNI, state=KeyState.QUARANTINE, left_s=9.0))
    store.close()
    SqliteStore(tmp_path / "db").close()
