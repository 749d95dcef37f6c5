# SPDX-License-Identifier: Apache-2.0
"""Disks of guests in a boot: when they are made and mounted, and where they may not be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from boot_rig import NODE, SHARES, Agent, BootRig, boot_layout, connect, prepared, run
from stepd import needs_root

from vhpc_slurm.device import NodeDevices
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import NodePlan
from vhpc_slurm.node import plan as node_plan
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import NOTHING

layout = boot_layout
pytestmark = needs_root


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[BootRig]:
    found = prepared(layout, monkeypatch)
    yield found
    found.work.journal.close()


def test_a_disk_is_made_before_all_guests_and_given_to_qemu(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout, monkeypatch, guests=2, disk_mib=64)
    connect(monkeypatch, Agent())
    run(rig)
    held = rig.work.journal.held()
    kinds = ["disk", "disk", "memory", "cgroup", "image", "claim", "claim"]
    assert [entry.kind for entry in held][4:] == kinds
    stages = [stage.name for stage in rig.work.recorder.timeline().stages]
    assert stages.index("disks") < stages.index("start g0")
    uids = sorted(entry.data["uid"] for entry in held if entry.kind == "uid")
    files = [Path(guest.paths.disk) for guest in rig.work.plan.guests]
    assert sorted(file.stat().st_uid for file in files) == uids
    assert [file.stat().st_size for file in files] == [64 << 20] * 2
    for xml, file in zip(rig.hypervisor.domains, files, strict=True):
        assert f'<source file="{file}">' in xml
        assert " vhpc.disk=/dev/vdb" in xml
    assert registry.release_all(layout, rig.work.journal, keep=("domain", "memory", "cgroup", "image")) == []
    assert list(layout.disks.iterdir()) == []


def test_a_mounted_disk_is_the_agents_to_mount_before_all_else(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout, monkeypatch, disk_mib=64, disk_mount="/local")
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked == ["hello", "disk", "identity", "mount", "ready"]
    (xml,) = rig.hypervisor.domains
    assert " vhpc.agent.disk=/dev/vdb" in xml
    assert " vhpc.disk=" not in xml
    stages = {stage.name: stage.detail for stage in rig.work.recorder.timeline().stages}
    assert stages["disks"] == "1 of 64 MiB, mounted at /local"


@pytest.mark.promise("disk.mount")
def test_an_image_with_an_older_agent_gets_no_mounted_disk(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout, monkeypatch, disk_mib=64, disk_mount="/local")
    connect(monkeypatch, Agent("disk", ChannelRefusedError("guest operation disk failed", 38, "unknown")))
    with pytest.raises(UserError) as raised:
        run(rig)
    assert raised.value.line() == (
        "image tiny:1 cannot mount a disk at /local: its agent is older than --vhpc-disk=SIZE:/MOUNT/POINT "
        "(build or import the image again, or use --vhpc-disk=SIZE)"
    )


@pytest.mark.promise("disk.mount")
@pytest.mark.parametrize(
    ("mount", "fits"),
    [("/scratch/a", False), ("/scratch", False), ("/scratch/a/b/c", False), ("/scratch/ab", True)],
)
def test_no_disk_is_mounted_over_or_in_a_shared_folder(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, *, mount: str, fits: bool
) -> None:
    rig = prepared(layout, monkeypatch)
    asked = replace(rig.work.lease.request, disk_mib=64, disk_mount=mount)
    case = node_plan.of_lease(replace(rig.work.lease, request=asked), NODE, SHARES, NOTHING, NodeDevices())
    made = node_plan.make(rig.work.layout, case)
    if fits:
        assert isinstance(made, NodePlan)
        assert [guest.disk_mount for guest in made.guests] == [mount]
    else:
        assert isinstance(made, Refusal)
        line = made.error().line()
        assert line.startswith(f"a disk cannot be mounted at {mount}, because guests have the shared folder")


def test_disks_that_the_node_has_no_space_for_fail_the_job(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = prepared(layout, monkeypatch, guests=2, disk_mib=1 << 24)  # 16 TiB: more than any test machine has
    with pytest.raises(UserError, match=r"^n1 has no space for the disks .*: \d+ MiB .* needs 33554432"):
        run(rig)
    assert rig.hypervisor.domains == []
    assert list(layout.disks.iterdir()) == []
