# SPDX-License-Identifier: Apache-2.0
"""libvirt's capabilities XML: what a real libvirt prints is read, what differs from the kernel is said."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostCell, HostCpu, HostInventory
from vhpc_slurm.node.guest.capabilities import differences, parse

# In the format of https://libvirt.org/formatcaps.html
XML = """<capabilities><host>
  <cpu><arch>x86_64</arch><vendor>AMD</vendor><maxphysaddr mode='emulate' bits='48'/></cpu>
  <iommu support='yes'/>
  <topology><cells num='2'>
    <cell id='0'><memory unit='KiB'>8388608</memory>
      <pages unit='KiB' size='4'>2097152</pages><pages unit='KiB' size='2048'>512</pages>
      <distances><sibling id='0' value='10'/><sibling id='2' value='21'/></distances>
      <cpus num='2'>
        <cpu id='4' socket_id='0' die_id='0' core_id='0' siblings='0,4'/>
        <cpu id='0' socket_id='0' die_id='0' core_id='0' siblings='0,4'/>
      </cpus></cell>
    <cell id='2'><memory unit='KiB'>8388608</memory>
      <pages unit='KiB' size='2048'>0</pages>
      <distances><sibling id='0' value='21'/><sibling id='2' value='10'/></distances>
      <cpus num='2'>
        <cpu id='1' socket_id='1' die_id='0' core_id='0' siblings='1,5'/>
        <cpu id='5' socket_id='1' die_id='0' core_id='0' siblings='1,5'/>
      </cpus></cell>
  </cells></topology></host></capabilities>"""

HOST = HostInventory(
    node="n1",
    cpu_vendor="AuthenticAMD",
    cpus=(HostCpu(0, 0, 0, 0), HostCpu(1, 1, 1, 2), HostCpu(4, 0, 0, 0), HostCpu(5, 1, 1, 2)),
    cells=(
        HostCell(0, 8192, (0, 4), ((0, 10), (2, 21)), ((2048, 512, 12),)),
        HostCell(2, 8192, (1, 5), ((0, 21), (2, 10)), ((2048, 0, 0),)),
    ),
    abstract=(0, 4, 1, 5),
    kvm=True,
    kvm_reason="",
)


def test_the_host_part_is_read() -> None:
    found = parse(XML)
    assert (found.arch, found.vendor, found.address_bits, found.iommu) == ("x86_64", "AMD", 48, True)
    assert [(cell.cell, cell.memory_mib, cell.cpus) for cell in found.cells] == [
        (0, 8192, (0, 4)),
        (2, 8192, (1, 5)),
    ]
    assert found.cells[0].pages == ((4, 2097152), (2048, 512))


def test_equal_values_are_not_reported() -> None:
    assert differences(HOST, parse(XML)) == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("siblings='1,5'", "siblings='5'", "other thread siblings than the kernel for CPUs 1"),
        ("id='5' socket", "id='7' socket", "CPUs 1,7 in cell 2, the kernel 1,5"),
        ("<cell id='2'>", "<cell id='3'>", "NUMA cells 0,3, the kernel 0,2"),
        ("value='21'", "value='32'", "other distances than the kernel for cell 0"),
        (">512</pages>", ">256</pages>", "256 pages of 2048 KiB in cell 0, the kernel 512"),
    ],
)
def test_differences_are_reported(old: str, new: str, says: str) -> None:
    lines = differences(HOST, parse(XML.replace(old, new)))
    assert any(says in line for line in lines), lines


def test_a_cpu_offline_since_the_start_of_libvirt_is_reported() -> None:
    cells = (replace(HOST.cells[0], cpus=(0,)), HOST.cells[1])
    cpus = tuple(replace(cpu, online=cpu.os_cpu != 4) for cpu in HOST.cpus)
    lines = differences(replace(HOST, cells=cells, cpus=cpus), parse(XML))
    assert any("CPUs 0,4 in cell 0, the kernel 0" in line for line in lines)


@pytest.mark.skipif(shutil.which("virsh") is None, reason="libvirt-clients is not installed: make deps")
def test_output_of_a_real_libvirt_is_read() -> None:
    """libvirt's test driver has two cells of eight CPUs (src/test/test_driver.c)."""
    virsh = ["virsh", "-c", "test:///default", "capabilities"]
    done = subprocess.run(virsh, capture_output=True, text=True, check=True, timeout=60)
    found = parse(done.stdout)
    assert found.iommu is False
    assert [cell.cpus for cell in found.cells] == [tuple(range(8)), tuple(range(8, 16))]
    assert [cell.memory_mib for cell in found.cells] == [2048, 4096]
    assert (2048, 0) in found.cells[0].pages


@pytest.mark.parametrize(
    "text", ["", "<capabilities/>", "<a", "<capabilities><host><topology><cells><cell/>"]
)
def test_an_invalid_document_is_the_nodes_fault(text: str) -> None:
    with pytest.raises(NodeError, match="capabilities"):
        parse(text)
