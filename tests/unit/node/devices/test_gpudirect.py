# SPDX-License-Identifier: Apache-2.0
"""Peer-to-peer traffic below PCI Express switches: what hinders GPUDirect, and what breaks isolation."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import read, unpack
from device_rig import Rig, clear, device_rig, passthrough, take
from fake_pci_device import Device
from real_machines import (
    A100,
    H100,
    MI100,
    MI250X,
    MI300X,
    PORT_CAN,
    PORT_HAS,
    PORT_OPEN,
    PORT_WANTED,
    bits,
    machine,
    with_controls,
)

from vhpc_slurm.hardware import PciBar, PciFunction
from vhpc_slurm.node.devices import assignment, direct
from vhpc_slurm.node.devices.device_class import HostState
from vhpc_slurm.node.devices.preflight import NotIsolatedError, SharedGroupError
from vhpc_slurm.node.host import pcie, sysfs
from vhpc_slurm.node.host.pcie import Controls

rig = device_rig
HIDDEN = Controls(ats=False)


# --- the registers ---------------------------------------------------------------------


def test_controls_are_read_from_the_configuration_space(tmp_path: Path) -> None:
    file = tmp_path / "config"
    assert pcie.controls(str(tmp_path)) is None
    for space, expected in (
        (bytes(64), None),  # what other users than root can read
        (with_controls(bytes(64)), Controls()),
        (with_controls(bytes(64), acs=(PORT_CAN, PORT_HAS)), Controls(0x5F, 0x1D)),
        (with_controls(bytes(64), acs=(PORT_CAN, PORT_WANTED)), Controls(0x5F, 0x5D)),
        (with_controls(bytes(64), ats=False), Controls(ats=False)),
        (with_controls(bytes(64), acs=(PORT_CAN, PORT_OPEN), ats=True), Controls(0x5F, 0, ats=True)),
        (bytes(0x100) + b"\xff" * 0xF00, Controls()),  # a function that does not answer
        (bytes(0x100) + b"\x01\x00\x01\x10" + bytes(0xEFC), Controls()),  # a list that points to itself
        # the first capability of an H100 in a guest, as captured: VFIO hides what it was
        (bytes(0x100) + b"\x00\x00\xc0\x12" + bytes(0x28) + b"\x0f\x00\x01\x00" + bytes(8), HIDDEN),
    ):
        file.write_bytes(space)
        assert pcie.controls(str(tmp_path)) == expected


# --- GPUDirect -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (MI300X, "0c:07 15:10 1e:19 69:64 9f:9a af:aa bf:ba df:da"),
        (
            MI250X,
            "4e:4b 51:4b 56:5a 59:5a 0e:0b 11:0b 16:1a 19:1a cf:cc d2:cc d7:db da:db 8f:8c 92:8c 97:9b 9a:9b",
        ),
        (MI100, "4a:45 50:45"),
        (A100, "9b:9a 9c:9a 9d:9a 9e:9a"),
        (H100, "d9:da"),
    ],
    ids=["MI300X", "MI250X", "MI100", "A100", "H100"],
)
def test_each_gpu_is_paired_with_the_adapter_of_its_switch(tmp_path: Path, lines: str, expected: str) -> None:
    """Of an MI250X node's two adapters below each outer switch the one at the inner one is nearer."""
    host = read(machine(tmp_path, lines).root)
    gpus = [one for one in host.pci if one.vendor in (0x1002, 0x10DE)]
    adapters = [one for one in host.pci if one.vendor == 0x15B3 and not one.physfn]
    found = {f"{pair.gpu[5:7]}:{pair.adapter[5:7]}" for pair in direct.pairs(gpus, adapters)}
    assert found == set(expected.split())


# lspci -PP of an MI300X node in AMD's guide to Instinct systems ("Mapping NIC to GPU NUMA Node"), with the
# adapters that its table calls adjacent: root port, bridges, device
CHAINS = """
00:01.1/01:00.0/02:00.0/03:00.0/04:00.0/05:00.0 00:01.1/01:00.0/02:01.0/09:00.0
18:01.1/19:00.0/1a:04.0/29:00.0/2a:00.0/2b:00.0 18:01.1/19:00.0/1a:03.0/23:00.0
48:01.1/49:00.0/4a:04.0/59:00.0/5a:00.0/5b:00.0 48:01.1/49:00.0/4a:03.0/53:00.0
60:01.1/61:00.0/62:00.0/63:00.0/64:00.0/65:00.0 60:01.1/61:00.0/62:01.0/69:00.0
78:01.1/79:00.0/7a:00.0/7b:00.0/7c:00.0/7d:00.0 78:01.1/79:00.0/7a:05.0/8f:00.0
98:01.1/99:00.0/9a:03.0/a3:00.0/a4:00.0/a5:00.0 98:01.1/99:00.0/9a:01.0/9c:00.0
c8:01.1/c9:00.0/ca:03.0/d3:00.0/d4:00.0/d5:00.0 c8:01.1/c9:00.0/ca:02.0/cd:00.0
e0:01.1/e1:00.0/e2:02.0/e5:00.0/e6:00.0/e7:00.0 e0:01.1/e1:00.0/e2:04.0/f1:00.0
"""


def of_chain(chain: str) -> PciFunction:
    *bridges, address = (f"0000:{part}" for part in chain.split("/"))
    home = f"pci0000:{chain[:2]}"
    return PciFunction(address, 0x120000, 0x1002, 0x74A1, "", 0, (), home, bridges=tuple(bridges))


def test_adjacent_adapters_are_those_of_amds_table() -> None:
    rows = [[of_chain(chain) for chain in line.split()] for line in CHAINS.split("\n") if line]
    found = direct.pairs([gpu for gpu, _ in rows], [adapter for _, adapter in rows])
    assert [(pair.gpu, pair.adapter) for pair in found] == [(gpu.address, nic.address) for gpu, nic in rows]
    assert found[0].ports == ("0000:02:00.0", "0000:04:00.0", "0000:02:01.0")


def test_all_ports_between_gpu_and_adapter_count(tmp_path: Path) -> None:
    """The GPU's own switch is one of them."""
    host = read(machine(tmp_path, MI100).root)
    functions = {one.address: one for one in host.pci}
    (pair,) = direct.pairs([functions["0000:50:00.0"]], [functions["0000:45:00.0"]])
    assert pair.ports == ("0000:44:02.0", "0000:4d:00.0", "0000:4f:00.0", "0000:44:00.0")


READY = Controls(bits(PORT_CAN), bits(PORT_WANTED))
ADAPTER = Controls(ats=True)
PAIR = direct.Pair("gpu", "nic", ("port",))


@pytest.mark.parametrize(
    ("port", "adapter", "why", "hint"),
    [
        (READY, ADAPTER, "", ""),
        (Controls(bits(PORT_CAN), 0), ADAPTER, "", ""),  # nothing is redirected: another check refuses it
        (None, None, "", ""),
        (READY, Controls(), "adapter nic has no ATS", "mlxconfig -d nic set ATS_ENABLED=true, then reboot"),
        (READY, Controls(ats=False), "adapter nic has ATS, which is off", "mlxconfig"),
        (
            Controls(bits(PORT_CAN), bits(PORT_HAS)),
            ADAPTER,
            "port port does not forward translated requests",
            "setpci -s port ECAP_ACS+6.w=005d",
        ),
        (
            Controls(bits(PORT_CAN), bits(PORT_HAS) | pcie.BLOCKING),
            ADAPTER,
            "port port blocks translated requests",
            "ECAP_ACS+6.w=005d",
        ),
        (
            Controls(bits(PORT_HAS), bits(PORT_HAS)),
            ADAPTER,
            "port port cannot forward translated requests",
            "lacks direct translated P2P",
        ),
    ],
)
def test_what_sends_data_through_the_cpu_is_named(
    port: Controls | None, adapter: Controls | None, why: str, hint: str
) -> None:
    found = [*direct.detours(PAIR, {"port": port, "nic": adapter}.get)]
    assert [one.why for one in found] == ([why] if why else [])
    assert all(hint in one.hint for one in found)


@pytest.mark.parametrize(
    ("size", "qemu", "slow"),
    [(128 << 30, 10_000_002, True), (128 << 30, 10_001_000, False), (16 << 20, 10_000_002, False),
     (128 << 30, 0, False)],
)  # fmt: skip
def test_large_bars_are_slow_before_qemu_10_1(size: int, qemu: int, *, slow: bool) -> None:
    bar = PciBar(1, size, memory=True, wide=True, prefetchable=True)
    gpu = PciFunction("0000:0b:00.0", 0x030200, 0x10DE, 0x2330, "", 0, (), "pci0000:08", bars=(bar,))
    assert direct.slow_bars([gpu], qemu) == ([gpu.address] if slow else [])


# --- isolation -------------------------------------------------------------------------


def port_above(rig: Rig, device: Device) -> Device:
    """The downstream port of the switch above."""
    return rig.pci.devices[device.path.split("/")[-2]]


def open_port(device: Device, rig: Rig) -> Device:
    """The port above a device, after setpci as guides for bare metal say."""
    port = port_above(rig, device)
    port.config[:] = with_controls(bytes(port.config), acs=(PORT_CAN, PORT_OPEN))
    return port


@pytest.mark.promise("devices.acs")
@pytest.mark.parametrize("whose", ["gpu", "adapter"])
def test_a_device_that_reaches_one_of_the_host_goes_to_no_guest(rig: Rig, whose: str) -> None:
    """One open port of the two is enough; each device has its own IOMMU group all the same."""
    gpu, adapter = rig.gpus[0], rig.pfs[0]
    for device in (*rig.gpus, adapter):
        port = port_above(rig, device)
        port.config[:] = with_controls(bytes(port.config), acs=(PORT_CAN, PORT_HAS))
    take(rig, gpu).close()
    clear(rig)
    port = open_port(gpu if whose == "gpu" else adapter, rig)
    with pytest.raises(NotIsolatedError) as caught:
        take(rig, gpu)
    assert caught.value.line().startswith(
        f"device {gpu.address} is not isolated from {adapter.address}: ACS of port {port.address} is off or "
        f"missing: mlx5_core of the host has {adapter.address}"
    )


@pytest.mark.promise("devices.acs")
def test_devices_that_reach_each_other_go_to_one_job(rig: Rig) -> None:
    one, two = rig.gpus
    rig.give_to_host(rig.pfs[0], "")
    open_port(one, rig)
    take(rig, one, two).close()
    clear(rig)
    take(rig, one).close()  # the other one is idle
    clear(rig)
    held = HostState({two.address: "8.0.0123abcd"}, rig.host.proc, rig.host.dev)
    with pytest.raises(SharedGroupError, match=f"a guest of 8.0.0123abcd has {two.address}"):
        assignment.check(rig.layout, passthrough(one), held)


@pytest.mark.promise("devices.acs")
def test_groups_of_linux_6_12_do_not_show_missing_acs(tmp_path: Path) -> None:
    """A switch whose ports have no ACS: the devices below have different groups, as captured."""
    root = str(unpack("qemu-switch-without-acs", tmp_path) / "sys")
    one, two = "0000:03:00.0", "0000:04:00.0"
    groups = [sysfs.link(f"{root}/bus/pci/devices/{address}/iommu_group") for address in (one, two)]
    assert len({*groups}) == 2
    switches = pcie.Switches(root)
    assert switches.unguarded(one) == {two: "0000:02:01.0"}
    for name in ("0000:02:00.0", "0000:02:01.0"):
        (Path(root) / "bus/pci/devices" / name / "config").unlink()  # each port is read once
    assert switches.unguarded(two) == {one: "0000:02:00.0"}
    # the root port has ACS, which the kernel has turned on
    port = pcie.controls(f"{root}/bus/pci/devices/0000:00:01.0")
    assert port == Controls(bits(PORT_CAN), bits(PORT_HAS))
