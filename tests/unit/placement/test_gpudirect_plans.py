# SPDX-License-Identifier: Apache-2.0
"""GPUs and adapters below one switch: the guest sees it, and a plan says what hinders GPUDirect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from captured import read
from gpu_plans import gres, planned
from placement_rig import case_of
from real_machines import A100, H100, MI100, MI250X, MI300X, PORT_CAN, PORT_HAS, PORT_WANTED, give, machine

from vhpc_slurm.cli.host import planchecks
from vhpc_slurm.config import Config
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.model import HostInventory, NodeAllocation
from vhpc_slurm.node.devices import direct


def host(tree: Path) -> HostInventory:
    return replace(read(tree), kvm=True, arch="x86_64", address_bits=52)


@pytest.mark.parametrize(
    ("lines", "gpu", "vf"),
    [
        (MI300X, "0c:00.0", "07:00.1"),
        (MI250X, "56:00.0", "5a:00.1"),
        (MI100, "50:00.0", "45:00.1"),
        (A100, "9d:00.0", "9a:00.1"),
        (H100, "d9:00.0", "da:00.1"),
    ],
    ids=["MI300X", "MI250X", "MI100", "A100", "H100"],
)
def test_gpu_and_vf_of_a_real_node_share_a_switch(tmp_path: Path, lines: str, gpu: str, vf: str) -> None:
    """One switch is enough in the guest, however many there are above both on the host."""
    found = host(machine(tmp_path, lines).root)
    cpus = range(4, 8) if lines in (MI100, A100, H100) else range(4)
    plan = planned(found, cpus, gres((0,), 1), given=NodeDevices((f"0000:{gpu}",)), memory_mib=8192)
    (guest,) = plan.guests
    assert [one.key for one in guest.devices] == [f"0000:{gpu}", f"0000:{vf}"]
    models = [one.model.removeprefix("pcie-") for one in guest.controllers]
    assert models.count("switch-upstream-port") == 1
    ports = {one.index: one for one in guest.controllers}
    above = {ports[one.port].parent for one in guest.devices}
    assert [ports[index].model for index in above] == ["pcie-switch-upstream-port"]


def test_each_gpu_of_a_job_has_the_adapter_of_its_inner_switch(tmp_path: Path) -> None:
    """Both adapters and both GPUs are below one outer switch."""
    found = host(machine(tmp_path, MI250X).root)
    cards = NodeDevices(("0000:51:00.0", "0000:59:00.0"))
    plan = planned(found, range(4), gres((0, 1), 2), given=cards, memory_mib=8192)
    assert [one.key[5:] for one in plan.guests[0].devices] == ["51:00.0", "4b:00.1", "59:00.0", "5a:00.1"]
    models = [one.model for one in plan.guests[0].controllers]
    assert models.count("pcie-switch-upstream-port") == 3


def test_a_plan_says_what_sends_data_through_the_cpu(tmp_path: Path) -> None:
    """The guest sees the switch that GPU and adapter share."""
    tree = machine(tmp_path, MI100)
    for port in ("44:00.0", "44:01.0", "44:02.0", "47:00.0", "49:00.0"):
        give(tree, f"0000:{port}", acs=(PORT_CAN, PORT_HAS if port == "44:01.0" else PORT_WANTED))
    give(tree, "0000:45:00.0", ats=True)
    found = host(tree.root)
    plan = planned(found, range(4, 8), gres((0,), 1), given=NodeDevices(("0000:4a:00.0",)), memory_mib=8192)
    (guest,) = plan.guests
    models = [one.model.removeprefix("pcie-") for one in guest.controllers]
    assert models == ["expander-bus", "root-port", "switch-upstream-port", *["switch-downstream-port"] * 2]
    case = case_of(NodeAllocation("n1", (4, 5, 6, 7), 8192), found)
    assert [*planchecks.near(case, plan, direct.reader(str(tree.sys)))] == [
        "data between GPU 0000:4a:00.0 and adapter 0000:45:00.0 of guest 0 pass through the CPU: port "
        "0000:44:01.0 does not forward translated requests (at each boot: setpci -s 0000:44:01.0 "
        "ECAP_ACS+6.w=005d)"
    ]


def test_a_plan_names_large_bars_that_qemu_maps_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = host(machine(tmp_path, MI100).root)
    plan = planned(found, range(4, 8), gres((0,)), given=NodeDevices(("0000:4a:00.0",)), memory_mib=8192)
    case = case_of(NodeAllocation("n1", (4, 5, 6, 7), 8192), found)
    for version, notes in ((10_000_007, 1), (10_001_000, 0), (0, 0)):
        monkeypatch.setattr("vhpc_slurm.cli.host.qemu.version", lambda _config, known=version: known)
        assert len([*planchecks.large(Config(), case, plan)]) == notes
