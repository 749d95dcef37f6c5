# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor on GPUs and virtual functions: Slurm's word against the node's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attribute_fs import fixed
from device_rig import Rig, machine

from vhpc_slurm.cli.host.checks import CheckResult, Level, devices
from vhpc_slurm.node.devices import quarantine, setup
from vhpc_slurm.slurm.hosts import parse_node_resources
from vhpc_slurm.slurm.port import NodeResources

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


def test_a_node_without_devices_has_no_findings_of_them(tmp_path: Path) -> None:
    with machine(tmp_path, gpus=0, vfs=0) as rig:
        assert findings(rig, "NodeName=n1 Gres=(null)") == {}
