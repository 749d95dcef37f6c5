# SPDX-License-Identifier: Apache-2.0
"""A real vhpcd and its client: a job is saved while vhpcd is killed, and another job continues it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_rig import nodes, saved
from controller_lab import HAVE_MUNGED, NOBODY, ChildError, Munged, as_uid, request, stop, wait_for
from vhpcd_process import Vhpcd, make

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import (
    CONTINUED,
    CheckpointState,
    InUse,
    KeeperOrder,
    KeeperReport,
    KeeperState,
    LeaseState,
    OrderKind,
    SavedNode,
)

pytestmark = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")
RUNNING = Path(__file__).parents[2] / "data/scontrol/24.11/single.txt"
"""Job 1 of alice, on n1."""


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged) -> Iterator[Vhpcd]:
    found = make(tmp_path, daemon)
    shutil.copyfile(RUNNING, tmp_path / "scontrol.out")
    (tmp_path / "squeue.out").write_text("1 0 RUNNING None 2026-11-20T18:47:20\n")
    (tmp_path / "bin/scancel").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/cancelled\n')
    yield found.start()
    if found.process is not None:
        stop(found.process)


def test_a_job_is_saved_and_another_one_continues_it(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    lease = client.open_generation(request(1), nodes("n1"))

    def keeper(state: KeeperState | None, what: SavedNode | None = None) -> KeeperOrder:
        report = None if state is None else KeeperReport(found.serial, state, what)
        return client.keeper(lease.generation, "n1", report, 0.1)

    with pytest.raises(UserError, match="the name of a checkpoint is expected"):
        client.save(1, "a/b")
    found = client.save(1, "run", stop=True)
    assert (found.name, found.state, found.node_count) == ("run", CheckpointState.HOLDING, 1)
    assert keeper(None).kind is OrderKind.PREPARE
    assert keeper(KeeperState.PREPARED).kind is OrderKind.HOLD
    vhpcd.kill()
    vhpcd.start()
    order = keeper(KeeperState.HELD)
    assert (order.kind, order.serial, order.name, len(order.key)) == (OrderKind.SAVE, found.serial, "run", 32)
    vhpcd.kill()
    vhpcd.start()
    assert keeper(KeeperState.SAVED, saved("n1", 0)).kind is OrderKind.END
    assert keeper(None).kind is OrderKind.END
    wait_for((vhpcd.folder / "cancelled").exists, "the job was not ended")
    valid = client.checkpoint(found.serial)
    assert (valid.state, valid.held, valid.size) == (CheckpointState.VALID, 1, 4096)
    assert client.checkpoints() == client.checkpoints(1) == (valid,)
    assert client.known_checkpoints([found.serial, 77]) == {found.serial}
    client.ending(1, 0)
    assert keeper(None).kind is OrderKind.OVER
    again = client.open_generation(request(2, image=CONTINUED, resume="run"), nodes("n2"))
    assert (again.state, again.image) == (LeaseState.READY, lease.image)
    taken = client.lease(2, 0, "n2", 1.0)
    assert taken.resume is not None
    assert (taken.resume.key, taken.resume.nodes) == (order.key, (saved("n1", 0),))
    assert taken == again
    assert client.look(2, 0, "n2").resume is None
    assert client.remove_checkpoints(["run"]).in_use == (InUse("run", "job 2 continues it"),)
    client.ending(2, 0)
    names = ["a/b", "run", *(f"no-{number}" for number in range(5000))]
    done = client.remove_checkpoints(names)
    assert (done.removed, done.missing) == (("run",), ("a/b", *names[2:]))
    assert client.known_checkpoints([found.serial]) == frozenset()
    assert client.checkpoint(found.serial).state is CheckpointState.REMOVED
    with pytest.raises(UserError, match="there is no checkpoint of number 9"):
        client.checkpoint(9)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_users_cannot_save_see_or_remove_it(vhpcd: Vhpcd) -> None:
    client = vhpcd.client
    lease = client.open_generation(request(1), nodes("n1"))
    with pytest.raises(ChildError, match="job 1 belongs to another user"):
        as_uid(NOBODY, lambda: client.save(1, "mine"))
    found = client.save(1, "run")
    failed = KeeperReport(found.serial, KeeperState.FAILED, line="no", paused_s=1.25)
    client.keeper(lease.generation, "n1", failed, 0.0)
    assert client.checkpoint(found.serial).error == "n1: no"
    assert client.checkpoint(found.serial).paused_s == 1.25
    assert as_uid(NOBODY, client.checkpoints) == ()
    assert as_uid(NOBODY, lambda: client.remove_checkpoints(["run"])).missing == ("run",)
    with pytest.raises(ChildError, match="only root and SlurmUser may send this request"):
        as_uid(NOBODY, lambda: client.keeper(lease.generation, "n1", None, 0.0))
    with pytest.raises(ChildError, match="only root and SlurmUser may send this request"):
        as_uid(NOBODY, lambda: client.known_checkpoints([1]))
