# SPDX-License-Identifier: Apache-2.0
"""The topology for NCCL: the host's truth as lstopo has it, in the form that NCCL reads."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from captured import Trees, lstopo, needs_lstopo, one_worker, read
from domain_cases import DEVICES
from gpu_plans import ALL, GPUS, SOCKET_0, gpu_host, gres, planned
from hwloc_truth import Function, functions
from machine_tree import gpu_node

from vhpc_slurm.device import HostDevice
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.hardware import UNKNOWN_CELL, PciFunction
from vhpc_slurm.model import GuestCell, GuestPlan, GuestTopology, HostInventory
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.placement import nccl, pci

if TYPE_CHECKING:
    from guest_rig import Guest

host = gpu_host
pytest_plugins = ["guest_rig"]
pytestmark = one_worker
WAIT_S = 30


def guest_of(host: HostInventory, found: list[PciFunction], cell: int) -> GuestPlan:
    """A guest of one cell that has all of these; the first one is to be its GPU."""
    devices = [HostDevice(f.address, "gpu" if f is found[0] else "vf", f) for f in found]
    errors: list[VhpcError] = []
    layout = pci.lay_out(devices, lambda _: 0, errors)
    assert layout is not None, errors
    return GuestPlan(
        0, "n1", (), GuestTopology(1, 1, 2, 1), (GuestCell(0, (0, 1), 512, cell),), 512, (), "",
        devices=layout.devices, controllers=layout.controllers,
    )  # fmt: skip


def places(xml: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """NUMA node and switches of each device, by its address in the guest."""

    def below(
        element: ET.Element, cpu: str, switches: tuple[str, ...]
    ) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        for child in element.findall("pci"):
            if child.get("class") == "0x060400":
                yield from below(child, cpu, (*switches, child.attrib["busid"]))
            else:
                yield child.attrib["busid"], cpu, switches

    system = ET.fromstring(xml)
    assert (system.tag, system.attrib) == ("system", {"version": "1"})
    found = [one for cpu in system.findall("cpu") for one in below(cpu, cpu.attrib["numaid"], ())]
    assert len({address for address, _, _ in found}) == len(found)
    return {address: (cpu, switches) for address, cpu, switches in found}


def common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.mark.promise("devices.nccl")
@needs_lstopo
@pytest.mark.parametrize(
    ("name", "cell"),
    [("fakepcilocalities", 0), ("fakepcilocalities", 2), ("32intel64-2p8co2t+8ve", 1), ("gpu-node", 0)],
)
def test_topologies_are_those_of_lstopo(trees: Trees, tmp_path: Path, name: str, cell: int) -> None:
    """The last one is made up; lstopo reads it as it reads the captured ones."""
    tree = gpu_node(tmp_path, cells_per_socket=2, cores=4).root if name == "gpu-node" else trees(name)
    host = read(tree, name)
    truth: dict[str, Function] = {f.element.attrib["pci_busid"]: f for f in functions(lstopo(tree))}
    found = [f for f in host.pci if not f.bridge and len(truth[f.address].cells) == 1]
    assert len(found) > 10
    guest = guest_of(host, found, cell)
    told = places(nccl.topology(guest, host))
    where = {device.key: told[nccl.guest_address(guest, device)] for device in guest.devices}
    assert len(where) == len(found)
    shared = 0
    for one, other in combinations(found, 2):
        (cpu, switches), (other_cpu, other_switches) = where[one.address], where[other.address]
        a, b = truth[one.address], truth[other.address]
        assert (cpu == other_cpu) == (a.cells == b.cells), (one.address, other.address)
        # a root port, then the upstream and a downstream port of each switch
        assert common(switches, other_switches) == common(a.bridges, b.bridges) // 2, (one, other)
        shared += switches == other_switches != ()
    assert (shared > 0) == (name != "fakepcilocalities")


def test_a_guest_that_has_the_cells_of_its_devices_needs_no_file(host: HostInventory) -> None:
    (guest,) = planned(host, ALL, gres((0, 7), 2)).guests
    assert nccl.topology(guest, host) == ""
    (guest,) = planned(host, SOCKET_0, gres((0, 1), 1)).guests
    assert nccl.topology(guest, host) == ""


def test_a_gpu_of_another_socket_is_at_a_node_of_its_own(host: HostInventory) -> None:
    plan = planned(host, SOCKET_0, gres((0, 4), 1))
    (guest,) = plan.guests
    told = places(nccl.topology(guest, host))
    where = {device.key: told[nccl.guest_address(guest, device)] for device in guest.devices}
    first, far, vf = (where[address] for address in (GPUS[0], GPUS[4], "0000:0d:00.1"))
    assert first == vf  # below one switch, at the guest's own cell
    assert first[0] == "0"
    assert far[0] == "1"
    assert len(first[1]) == len(far[1]) == 1
    assert first[1] != far[1]
    assert any("a file tells NCCL" in note for note in plan.notes)


def test_the_file_is_as_nccl_reads_it(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((0, 4))).guests
    assert nccl.topology(guest, host).splitlines() == [
        '<system version="1">',
        '  <cpu numaid="0" affinity="0000ffff" arch="x86_64">',
        '    <pci busid="ffff:00:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">',
        '      <pci busid="0000:fd:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16" />',
        "    </pci>",
        "  </cpu>",
        '  <cpu numaid="1" affinity="0000ffff" arch="x86_64">',
        '    <pci busid="ffff:00:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">',
        '      <pci busid="0000:ff:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16" />',
        "    </pci>",
        "  </cpu>",
        "</system>",
    ]


def test_the_guests_addresses_are_those_that_its_firmware_gives() -> None:
    """Those of ``lab/test_guest_buses.py``, where a kernel says them."""
    got = [nccl.guest_address(DEVICES, device) for device in DEVICES.devices]
    assert got == ["0000:fc:00.0", "0000:fd:00.0", "0000:ff:00.0"]


def test_a_single_device_without_a_gpu_needs_no_file(host: HostInventory) -> None:
    (guest,) = planned(host, SOCKET_0, gres((4,))).guests
    assert nccl.topology(guest, host) == ""
    (guest,) = planned(host, SOCKET_0, gres((0, 4))).guests
    no_gpu = replace(guest, devices=tuple(replace(device, device_class="vf") for device in guest.devices))
    assert nccl.topology(no_gpu, host) == ""


def test_on_a_host_of_one_cell_a_device_without_one_is_at_that(host: HostInventory) -> None:
    one = replace(host, cells=host.cells[:1], pci=tuple(replace(f, cell=UNKNOWN_CELL) for f in host.pci))
    (guest,) = planned(host, SOCKET_0, gres((0, 1))).guests
    assert nccl.topology(guest, one) == ""
    two = replace(host, pci=one.pci)
    assert len(ET.fromstring(nccl.topology(guest, two)).findall("cpu")) == 1


# --- in the guest -------------------------------------------------------------------------

SHOW = ("sh", "-c", 'echo "${NCCL_TOPO_FILE-unset}"')


@pytest.mark.promise("devices.nccl")
@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_programs_find_the_file_and_the_users_own_stays(guest: Guest) -> None:
    assert guest.run(*SHOW).stdout == b"unset\n"
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.topology("<system/>\n")
        assert guest.topology.read_text() == "<system/>\n"
        assert guest.topology.stat().st_mode & 0o777 == 0o644
        channel.topology("<system version='1'/>\n")
        assert guest.topology.read_text() == "<system version='1'/>\n"
    assert guest.run(*SHOW).stdout.decode() == f"{guest.topology}\n"
    assert guest.run(*SHOW, NCCL_TOPO_FILE="/home/alice/mine.xml").stdout == b"/home/alice/mine.xml\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may send control operations: run as root")
def test_a_name_of_another_guest_is_removed(guest: Guest) -> None:
    assert guest.run(*SHOW, NCCL_TOPO_FILE=str(guest.topology)).stdout == b"unset\n"
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError, match="topology file of"):
            channel.topology("")
        with pytest.raises(ChannelRefusedError, match="topology file of"):
            channel.topology("x" * 131073)
        channel.topology("x" * 131072)
