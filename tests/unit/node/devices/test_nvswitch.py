# SPDX-License-Identifier: Apache-2.0
"""NVSwitch partitions, against a fake fmpm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from device_rig import GENERATION, Rig, machine
from fake_fmpm import Fmpm, fake_fmpm
from fake_gpu_tools import GpuTools, gpu_tools
from job_devices import gpus, host, lease, prepare
from placement_rig import MANIFEST, REQUEST

from vhpc_slurm.cli.host import planchecks, qemu
from vhpc_slurm.config import Devices
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, UserError
from vhpc_slurm.model import ImageIdentity, NodePlan
from vhpc_slurm.node import plan as node_plan
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import assignment, nvswitch
from vhpc_slurm.node.store import journal
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import NOTHING

fmpm, tools = fake_fmpm, gpu_tools


@pytest.fixture
def rig(tmp_path: Path, fmpm: Fmpm) -> Iterator[Rig]:
    with machine(tmp_path, gpus=4, gpu_bar=1 << 34) as found:
        lines = (f"{index} {gpu.address} {index + 1}\n" for index, gpu in enumerate(found.gpus))
        (tmp_path / "gpu.map").write_text("".join(lines))
        found.with_devices(fmpm=(str(fmpm.script),))
        yield found


@pytest.mark.promise("devices.nvswitch")
def test_an_nvswitch_partition_is_active_for_its_guests(rig: Rig, fmpm: Fmpm) -> None:
    _, journal = prepare(rig, lease(gpus(1, 3)))
    assert fmpm.active == [4]
    assert journal.held()[0].kind == "nvswitch"  # goes before the GPUs do
    journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert fmpm.active == []


def test_gpus_without_a_partition_are_refused_or_wait(rig: Rig, fmpm: Fmpm) -> None:
    with pytest.raises(UserError, match="would have 3 GPUs: the NVSwitch there joins 1 or 2 or 4 or 8 of"):
        prepare(rig, lease(gpus(0, 1, 2)))
    teardown.clear(rig.layout, GENERATION, "n1")
    with pytest.raises(FabricError, match="no partition of the GPUs with modules 1, 2: Slurm chose them"):
        prepare(rig, lease(gpus(0, 1)))
    teardown.clear(rig.layout, GENERATION, "n1")
    assert fmpm.active == []


@pytest.mark.promise("devices.nvswitch")
def test_a_partition_of_another_owner_is_not_taken(rig: Rig, fmpm: Fmpm) -> None:
    fmpm.set(active=[4])
    with pytest.raises(NodeError, match="partition 4 of n1 is active already"):
        prepare(rig, lease(gpus(1, 3)))
    teardown.clear(rig.layout, GENERATION, "n1")
    assert fmpm.active == [4]
    fmpm.set(active=[0])
    with pytest.raises(NodeError, match="partition's GPUs are in use"):
        prepare(rig, lease(gpus(1, 3)))
    teardown.clear(rig.layout, GENERATION, "n1")
    assert fmpm.active == [0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"down": True}, "cannot connect to the Fabric Manager"),
        ({"deaf": [4]}, "partition 4 of n1 does not become active"),
    ],
)
def test_a_fabric_manager_that_does_not_do_it_is_the_nodes_fault(
    rig: Rig, fmpm: Fmpm, state: dict[str, object], words: str
) -> None:
    fmpm.set(**state)
    with pytest.raises(NodeError, match=words):
        prepare(rig, lease(gpus(1, 3)))


def test_a_partition_that_stays_active_keeps_its_entry(rig: Rig, fmpm: Fmpm) -> None:
    prepare(rig, lease(gpus(1, 3)))[1].close()
    for state in ({"stuck": [4]}, {"stuck": [], "down": True}):
        fmpm.set(**state)
        with pytest.raises(TeardownError, match=r"NVSwitch partition 4 (is still|may still be) active"):
            teardown.clear(rig.layout, GENERATION, "n1")
        assert [entry.kind for entry in journal.read_entries(rig.layout.journals, GENERATION)] == ["nvswitch"]
    fmpm.set(down=False)
    teardown.clear(rig.layout, GENERATION, "n1")
    assert fmpm.active == []


def test_a_map_without_modules_is_reported(rig: Rig) -> None:
    (rig.root / "gpu.map").write_text(f"0 {rig.gpus[0].address}\n")
    with pytest.raises(
        NodeError, match=r"has no module for .*: the Fabric Manager identifies GPUs only by their modules"
    ):
        prepare(rig, lease(gpus(0)))


def test_an_invalid_list_of_partitions_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lies").write_text('#!/bin/sh\necho \'{"partitionInfo": [{"isActive": 1}]}\'\n')
    (tmp_path / "lies").chmod(0o755)
    for argv in ((str(tmp_path / "lies"),), ("/bin/echo",)):
        with pytest.raises(NodeError, match="the list of NVSwitch partitions cannot be read"):
            nvswitch.Fmpm(Devices(fmpm=argv)).partitions()
    with pytest.raises(NodeError, match="/nowhere/fmpm -l failed"):
        nvswitch.Fmpm(Devices(fmpm=("/nowhere/fmpm",))).partitions()


def planned(rig: Rig, *indexes: int) -> NodePlan:
    case = node_plan.of_lease(
        lease(gpus(*indexes)), host(rig), (), NOTHING, assignment.handed_out(rig.layout)
    )
    found = node_plan.make(rig.layout, case)
    assert isinstance(found, NodePlan)
    return found


def image(*drivers: tuple[str, str]) -> ImageIdentity:
    return ImageIdentity(REQUEST.image, "sha256:" + "0" * 64, replace(MANIFEST, driver_versions=drivers))


@pytest.mark.promise("devices.nvswitch-driver")
def test_an_image_with_another_driver_is_refused(rig: Rig, fmpm: Fmpm) -> None:
    """No version is near enough: NVIDIA has no compatibility between Fabric Manager and driver."""
    rig.with_devices(fabric_manager=(str(fmpm.manager), "--version"))
    plan, config = planned(rig, 1, 3), rig.layout.config.devices
    nvswitch.check(config, plan, image(("nvidia", "580.95.05")))
    nvswitch.check(config, plan, image())  # images.gpu_drivers decides about images without a driver
    for other in ("580.95", "580.95.06", "590.48.01"):
        with pytest.raises(UserError) as caught:
            nvswitch.check(config, plan, image(("nvidia", other)))
        assert caught.value.line() == (
            f"image debian-minimal:latest has NVIDIA's driver {other}: the Fabric Manager of n1 has version "
            "580.95.05, and GPUs there need this driver (choose another image, see: vhpc image show)"
        )
    no_gpus = replace(plan, guests=tuple(replace(guest, devices=()) for guest in plan.guests))
    nvswitch.check(config, no_gpus, image(("nvidia", "1.0")))


@pytest.mark.promise("devices.nvswitch-driver")
@pytest.mark.parametrize(("driver", "refused"), [("570.86.15", True), ("580.95.05", False)])
def test_vhpc_plan_refuses_another_driver(
    rig: Rig, fmpm: Fmpm, monkeypatch: pytest.MonkeyPatch, driver: str, *, refused: bool
) -> None:
    monkeypatch.setattr(qemu, "version", lambda _config: 0)
    rig.with_devices(fabric_manager=(str(fmpm.manager), "--version"))
    what = replace(lease(gpus(1, 3)), image=image(("nvidia", driver)))
    devices = assignment.handed_out(rig.layout)
    case = node_plan.of_lease(what, host(rig), (), NOTHING, devices)
    found = planchecks.checked(rig.layout.config, case, planned(rig, 1, 3))
    assert isinstance(found, Refusal) == refused


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ""),
        (("/bin/echo", "580.95.05"), "580.95.05"),
        (("/bin/echo", "no idea"), "/bin/echo no idea printed no version: b'no idea"),
        (("/nowhere/fm", "--version"), "/nowhere/fm --version failed"),
    ],
)
def test_the_version_of_the_fabric_manager(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # a node without nv-fabricmanager
    config = Devices(fabric_manager=command)
    if words and not words[0].isdigit():
        with pytest.raises(NodeError) as caught:
            nvswitch.version(config)
        assert caught.value.line().startswith(words)
    else:
        assert nvswitch.version(config) == words


def test_the_nodes_own_fabric_manager_is_found(monkeypatch: pytest.MonkeyPatch, fmpm: Fmpm) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(fmpm.manager))
    assert nvswitch.version(Devices()) == "580.95.05"


@pytest.mark.promise("devices.nvswitch-driver")
def test_parts_of_gpus_and_partitions_exclude_each_other(rig: Rig) -> None:
    one, two = (gpu.address for gpu in rig.gpus[:2])
    (rig.root / "gpu.map").write_text(f"0 {one} 1\n1 {two} mdev=nvidia-474\n")
    with pytest.raises(NodeError, match=f"the GPU map of n1 divides {two}: devices.fmpm joins whole GPUs"):
        nvswitch.check(rig.layout.config.devices, planned(rig, 0, 1), image())
    nvswitch.check(Devices(), planned(rig, 0, 1), image())


@pytest.mark.promise("devices.nvswitch-driver")
def test_a_gpu_in_mig_mode_gets_no_partition(rig: Rig, fmpm: Fmpm, tools: GpuTools) -> None:
    gpu = next(gpu for _, gpu in sorted(rig.pci.devices.items()) if gpu.vendor == 0x10DE)
    tools.mig(gpu, on=True)
    with pytest.raises(NodeError, match=f"GPU {gpu.address} is in MIG mode: MIG and NVSwitch partitions"):
        prepare(rig, lease(gpus(0, 2)))
    assert fmpm.active == []
    teardown.clear(rig.layout, GENERATION, "n1")  # which ends the mode
    prepare(rig, lease(gpus(0, 2)))
    assert fmpm.active == [3]
