# SPDX-License-Identifier: Apache-2.0
"""vhpc doctor on the way between GPUs and adapters: switches, ACS and ATS, BARs, huge pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from captured import read
from machine_tree import MachineTree
from real_machines import (
    MI100,
    MI300X,
    PORT_CAN,
    PORT_HAS,
    PORT_OPEN,
    PORT_WANTED,
    give,
    machine,
)

from vhpc_slurm.cli.host.checks import CheckResult, Level, gpudirect
from vhpc_slurm.device import HostDevice
from vhpc_slurm.model import HostInventory

QEMU_10_0, QEMU_10_1 = 10_000_002, 10_001_000


def found(tree: MachineTree, qemu: int = 0, host: HostInventory | None = None) -> dict[str, CheckResult]:
    host = host or read(tree.root)
    gpus = [HostDevice(one.address, "gpu", one) for one in host.pci if one.vendor == 0x1002]
    vfs = [HostDevice(one.address, "vf", one) for one in host.pci if one.physfn]
    return {one.check: one for one in gpudirect.check(str(tree.sys), host, gpus, vfs, qemu)}


def ports(tree: MachineTree) -> list[str]:
    """Downstream ports of all switches."""
    above = {bridge for one in read(tree.root).pci for bridge in one.bridges[2::2]}
    return sorted(above)


@pytest.fixture
def tree(tmp_path: Path) -> MachineTree:
    """A node that is set up as NVIDIA's guide says."""
    made = machine(tmp_path, MI100)
    for port in ports(made):
        give(made, port, acs=(PORT_CAN, PORT_WANTED))
    give(made, "0000:45:00.0", ats=True)
    return made


def test_a_node_that_is_set_up_for_gpudirect_is_ok(tree: MachineTree) -> None:
    checks = found(tree, QEMU_10_1)
    assert [*checks] == ["devices.gpudirect"]
    assert checks["devices.gpudirect"] == CheckResult(
        "devices.gpudirect", Level.OK, "2 of 2 GPUs have adapters below their switches, with ATS"
    )


def test_ports_and_adapters_that_hinder_gpudirect_are_named(tree: MachineTree) -> None:
    give(tree, "0000:45:00.0")
    give(tree, "0000:44:00.0", acs=(PORT_CAN, PORT_HAS))
    one = found(tree)["devices.gpudirect"]
    assert one.level is Level.WARN
    assert one.what == (
        "data between 2 GPUs and adapters below their switches pass through the CPU: adapter 0000:45:00.0 "
        "has no ATS, port 0000:44:00.0 does not forward translated requests"
    )
    assert one.hint == (
        "mlxconfig -d 0000:45:00.0 set ATS_ENABLED=true, then reboot the host; at each boot: setpci -s "
        "0000:44:00.0 ECAP_ACS+6.w=005d"
    )


def test_what_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    made = machine(tmp_path, MI300X)
    assert found(made)["devices.gpudirect"].what == (
        "8 of 8 GPUs have adapters below their switches, their ACS and ATS cannot be read"
    )


def test_a_node_without_a_common_switch_is_ok(tmp_path: Path) -> None:
    made = machine(tmp_path, "0 43 45 020700 15b3:101b\n0 63 65 038000 1002:738c")
    one = found(made)["devices.gpudirect"]
    assert (one.level, one.what[:49]) == (Level.OK, "no GPU is below one PCI Express switch with an ad")


@pytest.mark.promise("devices.acs")
@pytest.mark.parametrize("acs", [(PORT_CAN, PORT_OPEN), None], ids=["off", "missing"])
def test_ports_that_isolate_nothing_are_an_error(tree: MachineTree, acs: tuple[str, str] | None) -> None:
    give(tree, "0000:44:00.0", acs=acs)
    one = found(tree)["devices.acs"]
    assert one.level is Level.ERROR
    assert one.what.startswith(
        "ACS is off or missing in 0000:44:00.0: devices below a switch with them reach"
    )


def test_large_bars_need_a_new_qemu(tree: MachineTree) -> None:
    one = found(tree, QEMU_10_0)["devices.bars"]
    assert (one.level, "0000:4a:00.0, 0000:50:00.0 boot for minutes" in one.what) == (Level.WARN, True)


def test_gpus_without_huge_pages_are_named(tree: MachineTree) -> None:
    host = read(tree.root)
    bare = replace(host, cells=tuple(replace(cell, hugepages=((2048, 0, 0),)) for cell in host.cells))
    one = found(tree, host=bare)["devices.hugepages"]
    assert (one.level, one.hint) == (Level.WARN, "set host.hugepages")
