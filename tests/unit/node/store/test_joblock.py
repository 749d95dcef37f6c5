# SPDX-License-Identifier: Apache-2.0
"""The sweep of old locks and tombstones while hooks use them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from node_rig import node_layout

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.resource import uid as uids
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout

layout = node_layout
GENERATION = Generation(42, 0, "0123abcd")
OLD = (1.0, 1.0)


def old_lock(layout: Layout) -> Path:
    with joblock.held(layout, 42, timeout_s=1.0):
        pass
    path = layout.lock(42)
    os.utime(path, OLD)
    return path


def test_an_old_lock_is_removed(layout: Layout) -> None:
    path = old_lock(layout)
    joblock.write_tombstone(layout, GENERATION)
    os.utime(layout.tombstone(GENERATION), OLD)
    with joblock.held(layout, 43, timeout_s=1.0):
        os.utime(layout.lock(43), OLD)
        joblock.sweep(layout, older_than_s=60.0)
        assert layout.lock(43).exists(), "a hook holds it"
    assert not path.exists()
    assert not joblock.has_tombstone(layout, GENERATION)


def test_two_hooks_never_hold_a_lock_that_is_swept(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the job starts at the moment of the removal, another one after it."""
    swept, unlink = old_lock(layout), Path.unlink
    holders = 0
    with contextlib.ExitStack() as hooks:

        def a_hook_starts() -> None:
            nonlocal holders
            with contextlib.suppress(NodeError):
                hooks.enter_context(joblock.held(layout, 42, timeout_s=0.3))
                holders += 1

        def unlink_beside_a_hook(path: Path, **how: Any) -> None:
            if path == swept:
                a_hook_starts()
            unlink(path, **how)

        monkeypatch.setattr(Path, "unlink", unlink_beside_a_hook)
        joblock.sweep(layout, older_than_s=60.0)
        a_hook_starts()
        assert holders == 1


def test_a_lock_that_was_used_meanwhile_is_not_removed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook had it between the look at its age and the removal."""
    path, remove = old_lock(layout), joblock._remove_unheld

    def remove_after_a_hook(which: Path, older_than_s: float) -> None:
        with joblock.held(layout, 42, timeout_s=1.0):
            pass
        remove(which, older_than_s)

    monkeypatch.setattr(joblock, "_remove_unheld", remove_after_a_hook)
    joblock.sweep(layout, older_than_s=60.0)
    assert path.exists()


def test_unknown_files_stop_no_hook(layout: Layout) -> None:
    for folder in (layout.run / "locks", layout.run / "tombstones", layout.uids):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".nfs0001").write_text("")
        (folder / "17.d").mkdir()
        os.utime(folder / ".nfs0001", OLD)
    path = old_lock(layout)
    joblock.sweep(layout, older_than_s=60.0)
    assert not path.exists()
    assert sorted(entry.name for entry in (layout.run / "locks").iterdir()) == [".nfs0001", "17.d"]
    assert list(uids.allocated(layout)) == []
