# SPDX-License-Identifier: Apache-2.0
"""vhpc devices, and whether a node with a device in quarantine continues to work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_rig import GENERATION, Rig, machine
from fake_pci_device import Device, fail

from vhpc_slurm.cli import context
from vhpc_slurm.cli.main import main
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.reconcile import drain_policy
from vhpc_slurm.slurm.port import Slurm
from vhpc_slurm.slurm.scontrol import Scontrol


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        (tmp_path / "vhpc.toml").write_text(
            f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
            f'[host]\nsysfs_root = "{tmp_path}/sys"\n[placement]\ngpu_map = "{tmp_path}/gpu.map"\n'
        )
        monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
        monkeypatch.setattr(context, "is_root", lambda: True)
        yield found


def hold(rig: Rig, *addresses: str) -> None:
    journal = rig.journal()
    journal.acquire(
        "claim", "claim:g0", generation=str(GENERATION), guest=0, cpus=[], cells=[], devices=addresses
    )


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["devices", "--json", "--node", "n1"]) == 0
    return {row["address"]: row for row in json.loads(capsys.readouterr().out)}


def test_devices_are_listed_with_owner_or_reason(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = rig.gpus
    hold(rig, one.address)
    quarantine.put(rig.layout, quarantine.record(rig.vfs[0].address, "vf", "still has a GUID"))
    rows = listed(capsys)
    assert set(rows) == {d.address for d in [*rig.gpus, *rig.vfs]}
    assert (rows[one.address]["index"], rows[one.address]["state"]) == (0, "held")
    assert rows[one.address]["holder"] == str(GENERATION)
    assert (rows[other.address]["index"], rows[other.address]["state"]) == (1, "free")
    assert rows[rig.vfs[0].address]["state"] == "quarantined"
    assert main(["devices", "--node", "n1"]) == 0
    assert re.search(r"still has a GUID, \d+s ago", capsys.readouterr().out)


def test_a_quarantine_is_cleared_by_a_check_alone(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = rig.gpus[0]
    quarantine.put(
        rig.layout, quarantine.record(gpu.address, "gpu", "it smells", state={"driver": "vfio-pci"})
    )

    def refuse(device: Device) -> None:
        raise fail(25)

    gpu.on_reset = refuse
    assert main(["devices", "clear", gpu.address]) == 3
    assert "stays in quarantine: device" in capsys.readouterr().err
    assert listed(capsys)[gpu.address]["state"] == "quarantined"
    gpu.on_reset = lambda device: None
    assert main(["devices", "clear", gpu.address]) == 0
    assert capsys.readouterr().out == f"{gpu.address} is clean; jobs may get it again\n"
    assert listed(capsys)[gpu.address]["state"] == "free"
    assert main(["devices", "clear", gpu.address]) == 1
    assert main(["devices", "clear", "../../etc"]) == 1


@pytest.mark.promise("devices.drain")
@pytest.mark.parametrize(
    ("said", "drained"),
    [
        ("NodeName=n1 Gres=gpu:h200:2(S:0-1),ibvf:4 State=IDLE", True),
        ("NodeName=n1 Gres=gpu:h200:2,ibvf:hdr:3(S:0) State=IDLE", False),
        ("NodeName=n1 Gres=ibvf:1,ibvf:2,nic:9 State=IDLE", False),
        ("NodeName=n1 Gres=(null) State=IDLE", True),
        (None, True),
    ],
)
def test_a_bad_vf_costs_the_node_only_when_slurm_counts_on_it(
    rig: Rig, tmp_path: Path, said: str | None, drained: bool
) -> None:
    bad = quarantine.record(rig.vfs[0].address, "vf", "trusted")
    quarantine.put(rig.layout, bad)
    assert drain_policy.must_drain(rig.layout, slurm_that_prints(tmp_path, said), "n1", [bad]) is drained


def slurm_that_prints(folder: Path, said: str | None) -> Slurm:
    """The port over a scontrol that prints one line for this node, or fails."""
    scontrol = folder / "slurm/scontrol"
    scontrol.parent.mkdir()
    reply = "exit 1" if said is None else f"echo '{said}'"
    scontrol.write_text(f'#!/bin/sh\ntest "$*" = "-o show node n1" || exit 2\n{reply}\n')
    scontrol.chmod(0o755)
    return Scontrol(str(scontrol.parent))


@pytest.mark.promise("devices.drain")
def test_a_bad_gpu_always_costs_the_node(rig: Rig, tmp_path: Path) -> None:
    gpu = quarantine.record(rig.gpus[0].address, "gpu", "hot")
    slurm = slurm_that_prints(tmp_path, "NodeName=n1 Gres=gpu:1,ibvf:1 State=IDLE")
    assert drain_policy.must_drain(rig.layout, slurm, "n1", [gpu])
