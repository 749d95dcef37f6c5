# SPDX-License-Identifier: Apache-2.0
"""Caches, huge pages and PCI devices as hwloc's lstopo reads them from the same tree."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from captured import NAMES, Trees, cpus, lstopo, needs_lstopo, one_worker, read
from hwloc_truth import Function, functions
from machine_tree import gpu_node

from vhpc_slurm.model import HostInventory

pytestmark = [needs_lstopo, one_worker]
Machine = tuple[HostInventory, ET.Element, Path]
CONTRADICTORY = {"40intel64-4n10c+pci-conflicts": 1}
"""Caches that hwloc drops because the first of their CPUs names another; the rest of them agree."""
KINDS = {"0": "unified", "1": "data", "2": "instruction"}


@pytest.fixture(scope="module", params=[*NAMES, "gpu-node", "gpu-node-8-sockets"])
def machine(
    request: pytest.FixtureRequest, trees: Trees, tmp_path_factory: pytest.TempPathFactory
) -> Machine:
    name: str = request.param
    if name == "gpu-node":
        tree = gpu_node(tmp_path_factory.mktemp("tree"), cells_per_socket=2, cores=4).root
    elif name == "gpu-node-8-sockets":
        tree = gpu_node(tmp_path_factory.mktemp("tree"), sockets=8, cores=4, threads=1, complexes=1).root
    else:
        tree = trees(name)
    return read(tree, name), lstopo(tree), tree


def readable(truth: ET.Element) -> list[Function]:
    """The functions of which a tree has the ids, as those of all machines but one."""
    return [one for one in functions(truth) if one.element.attrib["pci_type"].split(" ")[1] != "[0000:0000]"]


def test_slurms_cpus_are_in_the_order_of_hwloc_calc(machine: Machine) -> None:
    """slurmd numbers CPUs by core, then by thread, in hwloc's logical order (xcpuinfo.c)."""
    host, _, tree = machine
    options = ["--input", str(tree), "--if", "fsroot", "--disallowed", "--li", "--po", "all", "-I", "pu"]
    done = subprocess.run(["hwloc-calc", *options], capture_output=True, text=True, check=True, timeout=60)
    assert host.abstract == tuple(int(number) for number in done.stdout.strip().split(","))


def test_caches_are_those_of_hwloc(machine: Machine) -> None:
    host, truth, _ = machine
    theirs = Counter(
        (
            int(cache.attrib["depth"]),
            KINDS[cache.attrib["cache_type"]],
            int(cache.attrib["cache_size"]) // 1024,
            frozenset(cpus(cache.attrib["cpuset"])),
        )
        for cache in truth.iter("object")
        if "cache_size" in cache.attrib
    )
    ours = Counter((cache.level, cache.kind, cache.size_kib, frozenset(cache.cpus)) for cache in host.caches)
    assert theirs <= ours
    assert (ours - theirs).total() == CONTRADICTORY.get(host.node, 0)


def test_huge_page_pools_match_hwloc(
    machine: Machine,
) -> None:
    host, truth, _ = machine
    theirs = {
        int(cell.attrib["os_index"]): {
            int(page.attrib["size"]) // 1024: int(page.attrib["count"])
            for page in cell.iter("page_type")
            if int(page.attrib["size"]) > 65536  # the ordinary pages, of 64 KiB on some Arm machines
        }
        for cell in truth.iter("object")
        if cell.get("type") == "NUMANode"
    }
    for cell in host.memory_cells:
        assert {size: total for size, total, _ in cell.hugepages if size > 64} == theirs[cell.cell]


def test_gpu_memory_is_distinguished_from_host_memory(tmp_path: Path) -> None:
    """hwloc leaves the cells of NVIDIA's GPUs out; other cells without CPUs are the host's, as of CXL."""
    tree = gpu_node(tmp_path, cores=4, gpus=1)
    for_gpu, for_host = tree.memory_cell(97280), tree.memory_cell(131072)
    gpus = [function.address for function in read(tmp_path, "n1").pci if function.class_code >> 8 == 0x0302]
    tree.gpu_memory(gpus[0], for_gpu)
    tree.gpu_memory(gpus[1], -1)
    host = read(tmp_path, "n1")
    assert {cell.cell: cell.gpu for cell in host.cells if cell.gpu} == {for_gpu: gpus[0]}
    theirs = {
        int(cell.attrib["os_index"]): int(cell.attrib["local_memory"]) >> 20
        for cell in lstopo(tmp_path).iter("object")
        if cell.get("type") == "NUMANode"
    }
    assert {cell.cell: cell.memory_mib for cell in host.memory_cells} == theirs
    assert for_host in theirs
    assert host.memory_mib == sum(theirs.values())
    tree.gpu_memory(gpus[2], 0)  # a cell with CPUs stays the host's, whatever a driver says
    assert read(tmp_path, "n1").cells[0].gpu == ""


def test_every_pci_function_hangs_where_hwloc_sees_it(machine: Machine) -> None:
    host, truth, _ = machine
    theirs = {function.element.attrib["pci_busid"]: function for function in readable(truth)}
    assert {function.address for function in host.pci} == set(theirs)
    for function in host.pci:
        known = theirs[function.address]
        kind, ids = known.element.attrib["pci_type"].split(" ")[:2]
        assert f"{function.class_code >> 8:04x}" == kind
        assert f"[{function.vendor:04x}:{function.device:04x}]" == ids
        # one captured tree lacks a bridge's own entry, but has it in the paths of what is below
        assert tuple(bridge for bridge in function.bridges if bridge in theirs) == known.bridges


def test_pci_functions_are_local_to_hwlocs_cells(
    machine: Machine,
) -> None:
    host, truth, tree = machine
    for function in readable(truth):
        ours = next(f for f in host.pci if f.address == function.element.attrib["pci_busid"])
        near = {cell.cell for cell in host.cells if set(cell.cpus) & set(ours.cpus)}
        assert near == function.cells
        # hwloc climbs to a larger object where the local CPUs are not those of any object
        assert set(ours.cpus) <= function.cpus
        stated = int((tree / "sys/bus/pci/devices" / ours.address / "numa_node").read_text())
        only = min(near) if len(near) == 1 else -1
        assert ours.cell == (only if stated < 0 else stated)


def test_links_have_the_bandwidth_that_hwloc_computes(machine: Machine) -> None:
    host, truth, _ = machine
    theirs = {f.element.attrib["pci_busid"]: f.element.get("pci_link_speed", "0") for f in functions(truth)}
    for function in host.pci:
        if function.link is not None and function.link.speed_gts and function.link.width:
            # 8b/10b coding up to 5 GT/s, 128b/130b from 8 GT/s on (PCI Express Base Specification)
            useful = 0.8 if function.link.speed_gts < 8 else 128 / 130
            expected = function.link.speed_gts * function.link.width * useful / 8
            assert float(theirs[function.address]) == pytest.approx(expected, rel=0.01)
