# SPDX-License-Identifier: Apache-2.0
"""QEMU's uids: allocated once, released, and not reused too soon."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from node_rig import GENERATION, node_layout, spawn
from stepd import needs_root

from pace import limit
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.resource import uid as uids
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.xdist_group("slurmstepd")
layout = node_layout


def test_uids_are_allocated_once_and_the_range_ends(layout: Layout) -> None:
    announced: list[int] = []
    for _ in range(3):
        uids.allocate(layout, GENERATION, announced.append)
    assert announced == [4_100_000, 4_100_001, 4_100_002]
    with pytest.raises(NodeError, match="uid_count"):
        uids.allocate(layout, GENERATION, announced.append)
    uids.release(layout, 4_100_001, GENERATION)
    assert uids.allocate(layout, "43.0.0123abcd", announced.append) == 4_100_001


def test_a_uid_is_used_again_when_all_others_have_been(layout: Layout) -> None:
    """Also after a reboot, which takes the allocations."""
    used = []
    for _ in range(5):
        used.append(uids.allocate(layout, GENERATION, lambda _: None))
        shutil.rmtree(layout.uids)
    assert [uid - 4_100_000 for uid in used] == [0, 1, 2, 0, 1]
    (layout.state / "uid-next").write_text("torn")
    assert uids.allocate(layout, GENERATION, lambda _: None) == 4_100_000


@needs_root
def test_a_uid_that_owns_a_file_is_not_handed_out(layout: Layout, tmp_path: Path) -> None:
    """A setuid file of an earlier guest's QEMU would make its starter this guest's."""
    checked = tmp_path / "world"
    (checked / "deep" / "er").mkdir(parents=True)
    (checked / "deep" / "er" / "sh").touch()
    os.chown(checked / "deep" / "er" / "sh", 4_100_000, 4_100_000)
    raw = msgspec.to_builtins(layout.config)
    raw["guests"]["uid_check_paths"] = [str(checked), str(tmp_path / "absent")]
    changed = Layout(msgspec.convert(raw, Config))
    assert uids.allocate(changed, GENERATION, lambda _: None) == 4_100_001


def test_a_uid_of_another_generation_is_not_released(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    uids.release(layout, uid, "43.0.0123abcd")
    assert list(uids.allocated(layout)) == [(uid, GENERATION)]


@needs_root
def test_a_uid_in_use_is_not_given_out_and_release_ends_it(layout: Layout) -> None:
    uid = uids.allocate(layout, GENERATION, lambda _: None)
    ref = spawn("/bin/sleep", "60", who=process.Credentials(uid, 65534))
    (layout.uids / str(uid)).unlink()  # as after a loss of /run
    deadline = time.monotonic() + limit(30)
    while not list(process.of_uid(uid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert uids.allocate(layout, GENERATION, lambda _: None) == uid + 1
    (layout.uids / str(uid)).write_text(GENERATION)
    uids.release(layout, uid, GENERATION)
    assert not process.alive(ref)


@needs_root
def test_after_a_reboot_a_uid_may_be_another_guests(layout: Layout) -> None:
    """The journal of the guest that a power cut ended still names it; allocations were on a tmpfs."""
    other = "43.0.0123abcd"
    uid = uids.allocate(layout, other, lambda _: None)
    ref = spawn("/bin/sleep", "60", who=process.Credentials(uid, 65534), generation=other)
    try:
        while not list(process.of_uid(uid)):
            time.sleep(0.01)
        journal = Journal(layout.journals, Generation.parse(GENERATION))
        journal.acquire("uid", f"uid:{uid}", uid=uid)
        journal.acquire("domain", "domain:vhpc-none", name="vhpc-none", uid=uid)
        assert registry.release_all(layout, journal, ()) == []
        assert process.alive(ref)
        assert list(uids.allocated(layout)) == [(uid, other)]
    finally:
        process.end(ref)
