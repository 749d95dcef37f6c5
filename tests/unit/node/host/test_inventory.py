# SPDX-License-Identifier: Apache-2.0
"""The inventory of captured machines agrees with what hwloc's own tools read from the same trees."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from captured import NAMES, TREES, Trees, one_worker, read, unpack
from captured import cpus as bitmap

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.host import inventory

pytestmark = [pytest.mark.long, one_worker]  # unpacks captured machines


class Hwloc:
    """lstopo's text output: logical order of objects, with the CPUs of each."""

    def __init__(self, name: str) -> None:
        text = (TREES / f"{name}.hwloc").read_text()
        self.cpus: dict[str, list[set[int]]] = defaultdict(list)
        self.cells: dict[int, set[int]] = {}
        self.memory: dict[int, str] = {}
        self.order: list[int] = []
        for kind, attributes, mask in re.findall(
            r"^(\w+) L#\d+(?: \((.*)\))? cpuset=(\S+)$", text, re.MULTILINE
        ):
            cpus = bitmap(mask)
            self.cpus[kind].append(cpus)
            if kind == "PU":
                self.order.append(int(attributes.removeprefix("P#")))
            if kind == "NUMANode":
                number, size = attributes.removeprefix("P#").split()
                self.cells[int(number)], self.memory[int(number)] = cpus, size
        rows = re.findall(r"^ +(\d+)((?: +\d+)+)$", text, re.MULTILINE)
        index = re.search(r"^ index((?: +\d+)+)$", text, re.MULTILINE)
        columns = [int(cell) for cell in index[1].split()] if index else []
        self.distances = {
            int(cell): dict(zip(columns, map(int, row.split()), strict=True)) for cell, row in rows if columns
        }


@pytest.fixture(scope="module", params=NAMES)
def machine(request: pytest.FixtureRequest, trees: Trees) -> tuple[HostInventory, Hwloc]:
    name: str = request.param
    return read(trees(name)), Hwloc(name)


def test_abstract_order_is_hwlocs_logical_order_of_pus(machine: tuple[HostInventory, Hwloc]) -> None:
    host, truth = machine
    assert host.abstract == tuple(truth.order)


@pytest.mark.parametrize(("kind", "attribute"), [("Core", "core"), ("Package", "socket")])
def test_cores_and_sockets_hold_the_same_cpus_as_hwlocs(
    machine: tuple[HostInventory, Hwloc], kind: str, attribute: str
) -> None:
    host, truth = machine
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu in host.cpus:
        if cpu.online:
            groups[getattr(cpu, attribute)].add(cpu.os_cpu)
    # hwloc has no package for CPUs whose first one contradicts it; they still belong together
    in_none = set(truth.order) - set().union(*truth.cpus[kind])
    found = [groups[number] for number in sorted(groups)]
    assert [group for group in found if not group <= in_none] == truth.cpus[kind]
    assert len([group for group in found if group <= in_none]) == bool(in_none)


def test_cells_have_the_cpus_and_the_memory_that_hwloc_sees(machine: tuple[HostInventory, Hwloc]) -> None:
    host, truth = machine
    # hwloc leaves out the memory of NVIDIA's GPUs, which POWER9 and Grace have as cells
    assert {cell.cell: set(cell.cpus) for cell in host.memory_cells} == truth.cells
    for cell in host.memory_cells:
        size, unit = re.fullmatch(r"(\d+)(MB|GB)", truth.memory[cell.cell]).groups()  # type: ignore[union-attr]
        step = {"MB": 1, "GB": 1024}[unit]
        assert abs(cell.memory_mib - int(size) * step) <= step


def test_distances_match_hwlocs_latency_matrix(
    machine: tuple[HostInventory, Hwloc],
) -> None:
    host, truth = machine
    if truth.distances:
        own = truth.distances.keys()
        ours = {cell.cell: dict(cell.distances) for cell in host.memory_cells}
        assert {
            cell: {to: far for to, far in row.items() if to in own} for cell, row in ours.items()
        } == truth.distances
    else:
        assert [cell.distances for cell in host.cells] == [((host.cells[0].cell, 10),)]


def test_the_memory_of_gpus_is_not_the_hosts(trees: Trees) -> None:
    """A POWER9 with six GPUs: the driver's numa_status in the tree names cells 250 to 255."""
    host = read(trees("nvidiagpunumanodes"))
    gpus = {cell.cell: cell.gpu for cell in host.cells if cell.gpu}
    assert set(gpus) == set(range(250, 256))
    assert gpus[255] == "0004:05:00.0"
    assert all(cell.memory_mib > 15000 and not cell.cpus for cell in host.cells if cell.gpu)
    assert [cell.cell for cell in host.memory_cells] == [0, 8]
    assert round(host.memory_mib / 1024) == 252  # the tree's console file: total=252GiB


def test_an_arm_machine_has_clusters_but_no_smt(trees: Trees) -> None:
    host = read(trees("128arm-2pa2n8cluster4co"))
    assert len({cpu.core for cpu in host.cpus}) == len(host.cpus) == 128
    assert len({cpu.socket for cpu in host.cpus}) == 2
    clusters = [cpu.cluster for cpu in sorted(host.cpus)]
    assert clusters == [cluster for cluster in range(32) for _ in range(4)]  # as in the capture's name
    assert host.cpu_vendor == "0x48"  # HiSilicon, in Arm's list of implementers
    assert not host.invariant_tsc


def test_offline_cpus_are_listed_but_not_counted(trees: Trees) -> None:
    host = read(trees("16em64t-4s2c2t-offlines"))
    assert [cpu.os_cpu for cpu in host.cpus if not cpu.online] == [2, 5, 13, 14]
    assert len(host.abstract) == 12


def test_a_cell_that_is_offline_is_absent(trees: Trees) -> None:
    host = read(trees("offline-cpu0-node0"))
    assert [cell.cell for cell in host.cells] == [1]


def test_vendor_and_hugepages_come_from_the_tree(trees: Trees) -> None:
    host = read(trees("32intel64-2p8co2t+8ve"))
    assert host.cpu_vendor == "GenuineIntel"
    assert [size for size, _, _ in host.cells[0].hugepages] == [2048, 1048576]


def test_an_invariant_tsc_is_the_kernels_nonstop_tsc(trees: Trees) -> None:
    # a Xeon Silver 4108, whose flags have nonstop_tsc, and one twelve years older, whose flags have not
    assert read(trees("32intel64-2p8co2t+8ve")).invariant_tsc
    assert not read(trees("16em64t-4s2c2t-offlines")).invariant_tsc


def test_free_and_total_hugepages_are_read(tmp_path: Path) -> None:
    tree = unpack("32intel64-2p8co2t+8ve", tmp_path)
    pool = tree / "sys/devices/system/node/node1/hugepages/hugepages-2048kB"
    for name, pages in (("nr_hugepages", 512), ("free_hugepages", 500)):
        (pool / name).chmod(0o644)
        (pool / name).write_text(f"{pages}\n")
    assert (2048, 512, 500) in read(tree).cells[1].hugepages


def test_cores_numbered_across_numa_cells_follow_the_cells(tmp_path: Path) -> None:
    """Sub-NUMA clustering: firmware that alternates CPU numbers between the cells of one package."""
    tree = make_tree(tmp_path, package=[range(8)], cells=[[0, 1, 4, 5], [2, 3, 6, 7]])
    assert read(tree).abstract == (0, 1, 4, 5, 2, 3, 6, 7)


def test_l3_caches_order_cores_within_a_package(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, package=[range(4)], cells=[range(4)], l3=[[0, 2], [1, 3]])
    assert read(tree).abstract == (0, 2, 1, 3)


def test_a_cell_that_cuts_across_packages_does_not_reorder_them(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, package=[[0, 1], [2, 3]], cells=[[0, 2], [1, 3]])
    assert read(tree).abstract == (0, 1, 2, 3)


def test_efficiency_cores_are_not_counted_as_in_slurmd(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, package=[range(4)], cells=[range(4)])
    for kind, cpus in (("core", "0-1"), ("atom", "2-3")):
        folder = tree / f"sys/devices/cpu_{kind}"
        folder.mkdir()
        (folder / "cpus").write_text(cpus + "\n")
    host = read(tree)
    assert host.abstract == (0, 1)
    assert len(host.cpus) == 4


def test_a_kernel_without_numa_has_one_cell_with_all_memory(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, package=[range(2)], cells=[])
    (tree / "proc/meminfo").write_text("MemTotal:        2097152 kB\n")
    (cell,) = read(tree).cells
    assert (cell.cell, cell.memory_mib, cell.cpus) == (0, 2048, (0, 1))


def test_a_lone_cell_has_all_memory_of_the_machine(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, package=[range(2)], cells=[range(2)])
    (tree / "proc/meminfo").write_text("MemTotal:       25165824 kB\n")
    assert read(tree).cells[0].memory_mib == 24576


@pytest.mark.parametrize("name", ["40intel64-2g2n4c+pcilocality", "64amd64-4s2n4ca2co"])
def test_each_cell_has_its_own_memory_without_possible_cells(tmp_path: Path, name: str) -> None:
    tree, truth = unpack(name, tmp_path), Hwloc(name)
    folder = tree / "sys/devices/system/node"
    folder.chmod(0o755)
    (folder / "possible").unlink()
    cells = read(tree).cells
    assert len(cells) == len(truth.memory) > 1
    for cell in cells:
        size, unit = re.fullmatch(r"(\d+)(MB|GB)", truth.memory[cell.cell]).groups()  # type: ignore[union-attr]
        step = {"MB": 1, "GB": 1024}[unit]
        assert abs(cell.memory_mib - int(size) * step) <= step


def test_an_invalid_tree_is_the_nodes_fault(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\n")
    with pytest.raises(NodeError, match="no online CPU"):
        read(tmp_path)


CPUINFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu vme {}\n"


@pytest.mark.parametrize(
    ("accelerator", "flag", "device", "kvm", "reason"),
    [
        ("auto", "svm", True, True, "has svm"),
        ("auto", "vmx", True, True, "has vmx"),
        ("auto", "", True, False, "neither svm nor vmx"),
        ("auto", "svmx", True, False, "neither svm nor vmx"),
        ("auto", "svm", False, False, "there is no"),
        ("tcg", "svm", True, False, "accelerator = tcg"),
        ("kvm", "", True, True, "accelerator = kvm"),
    ],
)
def test_kvm_needs_a_device_a_capable_cpu_and_the_sites_leave(
    tmp_path: Path, accelerator: str, flag: str, device: bool, kvm: bool, reason: str
) -> None:
    path = Path(os.devnull) if device else tmp_path / "kvm"
    usable, why = inventory.decide_kvm(accelerator, CPUINFO.format(flag), path)
    assert usable is kvm
    assert reason in why


def test_an_arm_kernel_with_a_kvm_device_has_kvm(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
    assert inventory.decide_kvm("auto", cpuinfo, Path(os.devnull), "aarch64")[0]
    assert not inventory.decide_kvm("auto", cpuinfo, tmp_path / "kvm", "aarch64")[0]


def test_cpus_of_arm_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n"
    )
    assert inventory.cpu_model(tmp_path) == "0xd4f 0x0 0"


def test_a_site_that_requires_kvm_gets_an_error_without_it(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="there is no"):
        inventory.decide_kvm("kvm", CPUINFO.format("svm"), tmp_path / "kvm")


def make_tree(
    root: Path,
    *,
    package: Sequence[Sequence[int]],
    cells: Sequence[Sequence[int]],
    l3: Sequence[Sequence[int]] = (),
) -> Path:
    """A sysfs tree of single-threaded cores, as Documentation/admin-guide/cputopology.rst describes it."""

    def mask(cpus: Sequence[int]) -> str:
        return f"{sum(1 << cpu for cpu in cpus):08x}\n"

    count = sum(len(cpus) for cpus in package)
    cpu_root = root / "sys/devices/system/cpu"
    for cpu in range(count):
        topology = cpu_root / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus").write_text(mask([cpu]))
        (topology / "package_cpus").write_text(next(mask(p) for p in package if cpu in p))
        for cache in [c for c in l3 if cpu in c]:
            index = cpu_root / f"cpu{cpu}/cache/index3"
            index.mkdir(parents=True)
            (index / "level").write_text("3\n")
            (index / "shared_cpu_map").write_text(mask(cache))
    (cpu_root / "online").write_text(f"0-{count - 1}\n")
    (cpu_root / "present").write_text(f"0-{count - 1}\n")
    for number, cpus in enumerate(cells):
        node = root / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpumap").write_text(mask(cpus))
        (node / "distance").write_text(
            " ".join("10" if number == n else "20" for n in range(len(cells))) + "\n"
        )
        (node / "meminfo").write_text(f"Node {number} MemTotal:       8388608 kB\n")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(CPUINFO.format(""))
    return root
