# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor on GPUs and virtual functions: Slurm's word against the node's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from attribute_fs import fixed
from device_rig import Rig, machine
from fake_fmpm import Fmpm, fake_fmpm
from fake_gpu_tools import GpuTools, gpu_tools
from fake_mdev import LARGE, TYPE, FakeMdev, FakeVgpus
from site_catalog import publish

from vhpc_slurm.cli.host.checks import CheckResult, Level, devices, nvswitch
from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.node.devices import quarantine, setup
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm.hosts import parse_node_resources
from vhpc_slurm.slurm.port import NodeResources

fmpm, tools = fake_fmpm, gpu_tools
AGREES = "NodeName=n1 Arch=x86_64 Gres=gpu:h200:2(S:0),ibvf:4 State=IDLE"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(setup, "GPU_NODES", tmp_path / "nodes")
    with machine(tmp_path) as found:
        yield found


def resources(line: str) -> NodeResources:
    return next(iter(parse_node_resources(line)), NodeResources("n1"))


def findings(rig: Rig, slurm: str = AGREES) -> dict[str, CheckResult]:
    return {
        found.check: found for found in devices.check(rig.layout.config, "n1", resources(slurm), root=True)
    }


def test_a_node_whose_map_agrees_with_slurm_is_ok(rig: Rig) -> None:
    (rig.root / "proc/devices").write_text("Character devices:\n\nBlock devices:\n")
    list(setup._gpu_nodes(rig.layout, setup.Place(rig.root / "proc", rig.root / "nodes"), dry_run=False))
    found = findings(rig)
    assert {name: one.level for name, one in found.items()} == {
        "devices.map": Level.OK,
        "devices.vfs": Level.OK,
        "devices.adapters": Level.OK,
        "devices.iommu": Level.OK,
        "devices.gpudirect": Level.OK,
        "devices.vfio": Level.OK,
        "devices.clearing": Level.WARN,
        "devices.nodes": Level.OK,
    }
    assert found["devices.iommu"].what == "6 devices in 6 groups"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 {gpu0}\n", "lists 1 GPUs, but slurm.conf has 2"),
        ("0 {gpu0}\n1 {gpu0}\n", "{gpu0} is listed twice"),
        ("0 {gpu0}\n1 0000:ff:00.0\n", "0000:ff:00.0 is not a GPU of this node"),
        ("0 {gpu0}\n1 {pf}\n", "{pf} is not a GPU of this node"),
        ("", "Slurm allocates 2 GPUs of this node, but"),
        ("1 {gpu0}\n", "line 1 of"),
    ],
)
def test_a_map_that_disagrees_is_an_error(rig: Rig, text: str, says: str) -> None:
    names = {"gpu0": rig.gpus[0].address, "pf": rig.pfs[0].address}
    (rig.root / "gpu.map").write_text(text.format(**names))
    found = findings(rig)["devices.map"]
    assert found.level is Level.ERROR
    assert says.format(**names) in found.what


def test_too_few_good_functions_and_a_quarantine_are_reported(rig: Rig) -> None:
    quarantine.put(rig.layout, quarantine.record(rig.vfs[0].address, "vf", "still has a GUID"))
    found = findings(rig)
    assert found["devices.vfs"].what == "slurm.conf has 4 ibvf, but only 3 virtual functions are usable"
    assert found["devices.vfs"].level is Level.ERROR
    assert "still has a GUID" in found["devices.quarantine"].what
    assert findings(rig, AGREES.replace("ibvf:4", "ibvf:3"))["devices.vfs"].level is Level.OK


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"net/ens1/type": "1", "net/ens1/flags": "0x1002"}, "interface ens1 of {pf} is down"),
        ({"infiniband/mlx5_9/ports/1/state": "1: DOWN"}, "port 1 of mlx5_9 is DOWN"),
        ({"net/ens1/type": "1", "net/ens1/flags": "0x1003"}, ""),
        ({"net/ens1/type": "32", "net/ens1/flags": "0x1002"}, ""),
        ({"infiniband/mlx5_9/ports/1/state": "4: ACTIVE"}, ""),
    ],
)
def test_functions_of_an_adapter_that_is_off_are_reported(rig: Rig, state: dict[str, str], says: str) -> None:
    for name, text in state.items():
        rig.pfs[0].folder.put(name, fixed(f"{text}\n"))
    found = findings(rig)["devices.adapters"]
    assert found.level is (Level.WARN if says else Level.OK)
    assert says.format(pf=rig.pfs[0].address) in found.what


def test_without_iommu_or_driver_nothing_can_be_passed_through(rig: Rig) -> None:
    rig.pci.regroup(rig.gpus[1].address, None)
    rig.pci.unload("vfio-pci")
    found = findings(rig)
    assert found["devices.iommu"].what == f"without an IOMMU group: {rig.gpus[1].address}"
    assert found["devices.vfio"].level is Level.ERROR


def test_a_missing_scrub_command_is_an_error(rig: Rig) -> None:
    rig.with_devices(gpu_scrub=("/nowhere/scrub", "{address}"))
    assert findings(rig)["devices.clearing"].what == "/nowhere/scrub does not exist"


def parts(rig: Rig, *lines: str) -> CheckResult:
    """Findings of doctor about a map with parts of GPUs."""
    (rig.root / "gpu.map").write_text("".join(f"{index} {line}\n" for index, line in enumerate(lines)))
    found = findings(rig, f"NodeName=n1 Gres=gpu:{len(lines)},ibvf:4")
    assert found["devices.map"].level is Level.OK
    return found["devices.types"]


def test_missing_mdev_types_and_instances_are_named(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.give_to_host(gpu)
    mdev = f"{gpu.address} mdev={TYPE}"
    assert "/class/mdev_bus/" in parts(rig, mdev).what
    kernel = FakeMdev(rig, gpu)
    assert (parts(rig, mdev, mdev).level, parts(rig, mdev, mdev).what) == (
        Level.OK,
        "2 mediated devices and vGPUs can be created",
    )
    kernel.create("76687063-0000-8000-8000-000000000b00")  # of a job: the first line is in use
    assert parts(rig, mdev, mdev).level is Level.OK
    assert "available_instances is 1" in parts(rig, mdev, mdev, mdev).what
    found = parts(rig, f"{gpu.address} mdev=nvidia-1")
    assert found.level is Level.ERROR
    assert f"no mediated devices of type nvidia-1: its types are {TYPE}, {LARGE}" in found.what


def test_virtual_functions_that_cannot_be_vgpus_are_named(rig: Rig) -> None:
    kernel = FakeVgpus(rig, rig.gpus[0])
    one, two = (vf.address for vf in kernel.vfs)
    assert parts(rig, f"{one} vgpu=H200X-1-18C", f"{two} vgpu=1414").level is Level.OK
    kernel.set(one, "1414")
    kernel.instances = 1
    found = parts(rig, f"{one} vgpu=H200X-1-18C", f"{two} vgpu=1414")
    assert found.what == f"virtual function {two} cannot become a vGPU of type 1414: no type is creatable now"
    assert "the GPU map names none" in parts(rig, two).what
    gpu = rig.gpus[1].address
    assert f"device {gpu} is not a virtual function" in parts(rig, f"{gpu} vgpu=1414").what


def test_a_gpu_whose_mig_mode_lasts_is_named(rig: Rig) -> None:
    rig.gpus[1].folder.entries["device"] = fixed("0x20b5\n")
    found = findings(rig)["devices.mig"]
    assert found.level is Level.WARN
    assert "after a job that MIG mode is off: 0000:0c:00.0" in found.what
    rig.with_devices(gpu_scrub=("/bin/true",))
    assert "devices.mig" not in findings(rig)


def test_the_tool_that_ends_mig_mode_is_enough(rig: Rig, tools: GpuTools) -> None:
    rig.gpus[1].folder.entries["device"] = fixed("0x20b5\n")
    found = findings(rig)
    assert "devices.mig" not in found
    assert found["devices.clearing"].level is Level.OK
    rig.gpus[0].folder.entries["device"] = fixed("0x1db4\n")  # V100, whose memory the tool cannot clear
    warning = findings(rig)["devices.clearing"]
    assert (warning.level, warning.hint) == (Level.WARN, "set devices.gpu_scrub")
    assert warning.what.endswith(f"which need not clear their memory: {rig.gpus[0].address}")


def shared_config(rig: Rig, fmpm: Fmpm, lines: str, version: str = "580.95.05") -> Config:
    (rig.root / "gpu.map").write_text(lines)
    rig.with_devices(fmpm=(str(fmpm.script),), fabric_manager=("/bin/echo", version) if version else ())
    catalog = Images(catalog=str(rig.root / "catalog"))
    rig.layout = Layout(msgspec.structs.replace(rig.layout.config, images=catalog))
    return rig.layout.config


def shared(rig: Rig, fmpm: Fmpm, lines: str, version: str = "") -> CheckResult:
    """Finding of doctor about a node with NVSwitch partitions; a line is a GPU's index and what follows."""
    names = {f"gpu{index}": gpu.address for index, gpu in enumerate(rig.gpus)}
    shared_config(rig, fmpm, lines.format(**names), version)
    return findings(rig, "NodeName=n1 Gres=gpu:2,ibvf:4")["devices.nvswitch"]


@pytest.mark.promise("devices.nvswitch-driver")
def test_nvswitch_partitions_that_cannot_work_are_named(
    rig: Rig, fmpm: Fmpm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # a node without nv-fabricmanager
    right = "0 {gpu0} 1\n1 {gpu1} 3\n"
    for lines, says in (
        ("0 {gpu0} 1\n1 {gpu1} mdev=nvidia-474\n", "has 1 parts of GPUs: devices.fmpm joins whole GPUs"),
        ("0 {gpu0} 1\n1 {gpu1}\n", f"has no module for {rig.gpus[1].address}"),
        ("0 {gpu0} 1\n1 {gpu1} 9\n", f"no NVSwitch partition has {rig.gpus[1].address} (module 9)"),
    ):
        found = shared(rig, fmpm, lines)
        assert (found.level, says in found.what) == (Level.ERROR, True), found
    found = shared(rig, fmpm, right)
    assert (found.level, "the version of the Fabric Manager is unknown" in found.what) == (Level.WARN, True)
    found = shared(rig, fmpm, right, "580.95.05")
    assert (found.level, found.what) == (Level.OK, "15 NVSwitch partitions, Fabric Manager 580.95.05")
    fmpm.set(down=True)
    assert shared(rig, fmpm, right, "580.95.05").what.endswith("cannot connect to the Fabric Manager")


@pytest.mark.promise("devices.nvswitch-driver")
def test_images_with_another_driver_are_named(rig: Rig, fmpm: Fmpm) -> None:
    for name, driver in (("old", "570.86.15"), ("new", "580.95.05"), ("unknown", "")):
        publish(rig.root / "catalog", name, name.encode(), drivers={"nvidia": driver})
    found = shared(rig, fmpm, "0 {gpu0} 1\n1 {gpu1} 3\n", "580.95.05")
    assert found.level is Level.WARN
    assert found.what.endswith("are refused here: old:latest (570.86.15)")
    assert 'images.gpu_drivers = ["nvidia==580.95.05"]' in found.hint


@pytest.mark.promise("devices.nvswitch-driver")
def test_an_idle_gpu_in_mig_mode_is_named_on_an_nvswitch(rig: Rig, fmpm: Fmpm, tools: GpuTools) -> None:
    gpu = rig.gpus[1]
    tools.mig(gpu, on=True)
    found = list(
        nvswitch.check(
            shared_config(rig, fmpm, f"0 {rig.gpus[0].address} 1\n1 {gpu.address} 3\n"),
            [rig.gpus[0].address, gpu.address],
            [gpu.address],
        )
    )
    assert [one.level for one in found] == [Level.ERROR, Level.OK]
    assert found[0].what.startswith(f"GPU {gpu.address} is in MIG mode: MIG and NVSwitch partitions")
