# SPDX-License-Identifier: Apache-2.0
"""Folders of shares at second places, and variables of the user, in a boot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boot_rig import NODE, SHARES, Agent, boot_layout, connect, prepared, run
from stepd import needs_root

from vhpc_slurm.device import NodeDevices
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import NodePlan
from vhpc_slurm.node import plan as node_plan
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import NOTHING

layout = boot_layout
pytestmark = [needs_root, pytest.mark.promise("mount.folder")]


def test_folders_are_mounted_after_the_shares(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = prepared(layout, monkeypatch, mounts="/scratch/a/x:/x,/scratch/a:/y:ro", env="A=1,B=2")
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    rig.work.journal.close()
    assert peer.asked == ["hello", "identity", "mount", "bind", "bind", "environment", "ready"]


@pytest.mark.parametrize(
    ("number", "why", "line"),
    [
        (
            2,
            "the user cannot open /scratch/a/x: No such file",
            "the user cannot open /scratch/a/x: No such file",
        ),
        (
            38,
            "unknown",
            "the agent of image tiny:1 is older than this option (build or import the image again)",
        ),
    ],
)
def test_a_folder_that_cannot_be_mounted_fails_the_job(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *, number: int, why: str, line: str
) -> None:
    rig = prepared(layout, monkeypatch, mounts="/scratch/a/x:/x")
    connect(monkeypatch, Agent("bind", ChannelRefusedError("guest operation bind failed", number, why)))
    with pytest.raises(UserError) as raised:
        run(rig)
    rig.work.journal.close()
    assert raised.value.line() == f"--vhpc-mount=/scratch/a/x:/x is not possible on n1: {line}"


@pytest.mark.parametrize(
    ("mounts", "says"),
    [
        ("/scratch/a:/x:ro", ""),
        ("/scratch/a/b:/x", ""),
        ("/scratch/ab:/x", "--vhpc-mount=/scratch/ab:/x: /scratch/ab is in no folder"),
        ("/scratch:/x", "(they have /scratch/a; see --vhpc-shares)"),
        ("/scratch/a:/scratch", "guests have the shared folder /scratch/a"),
        ("/scratch/a:/scratch/a/b", "guests have the shared folder /scratch/a"),
        ("/scratch/a:/local", "the disk is mounted at /local"),
    ],
)
def test_folders_come_from_shares_and_are_apart_from_them(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *, mounts: str, says: str
) -> None:
    rig = prepared(layout, monkeypatch)
    rig.work.journal.close()
    asked = replace(rig.work.lease.request, mounts=mounts, disk_mib=64, disk_mount="/local")
    case = node_plan.of_lease(replace(rig.work.lease, request=asked), NODE, SHARES, NOTHING, NodeDevices())
    made = node_plan.make(rig.work.layout, case)
    if says:
        assert isinstance(made, Refusal)
        assert says in made.error().line()
    else:
        assert isinstance(made, NodePlan)
