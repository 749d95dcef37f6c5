# SPDX-License-Identifier: Apache-2.0
"""PCI functions in trees written as the kernel writes them: what no captured tree has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from captured import unpack
from machine_tree import BRIDGE, GPU, INFINIBAND, NVME, Function, MachineTree, gpu_node

from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import PciBar, PciFunction, PciLink, address_key
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.host import inventory

IDS = ("class", "vendor", "device")


def read(tree: Path) -> HostInventory:
    config = Config(host=Host(sysfs_root=str(tree / "sys")), guests=Guests(accelerator="tcg"))
    return inventory.read_inventory("n1", config, proc_root=tree / "proc", kvm_device=tree / "no-kvm")


def functions(tree: Path) -> dict[str, PciFunction]:
    return {function.address: function for function in read(tree).pci}


def test_a_gpu_below_a_switch(tmp_path: Path) -> None:
    found = functions(gpu_node(tmp_path, cores=2).root)
    assert found["0000:0b:00.0"] == PciFunction(
        address="0000:0b:00.0",
        class_code=0x030200,
        vendor=0x10DE,
        device=0x2330,
        driver="vfio-pci",
        cell=0,
        cpus=(0, 1, 4, 5),
        root_complex="pci0000:08",
        bridges=("0000:08:01.0", "0000:09:00.0", "0000:0a:00.0"),
        iommu_group=4,
        reset_methods=("flr", "bus"),
        bars=(
            PciBar(0, 1 << 24, memory=True, wide=True, prefetchable=True),
            PciBar(2, 1 << 37, memory=True, wide=True, prefetchable=True),
            PciBar(4, 1 << 25, memory=True, wide=True, prefetchable=True),
        ),
        link=PciLink(32.0, 16, 32.0, 16),
    )
    assert found["0000:0b:00.0"].switches == ("0000:09:00.0",)


def test_the_gpu_of_the_written_trees_is_as_a_real_one(tmp_path: Path) -> None:
    real = functions(unpack("16intel64-h100", tmp_path / "real"))["0000:00:06.0"]
    written = functions(gpu_node(tmp_path / "written", cores=2).root)["0000:0b:00.0"]
    for name in ("class_code", "vendor", "device", "bars", "link"):
        assert getattr(written, name) == getattr(real, name), name
    assert (real.driver, real.iommu_group, real.reset_methods) == ("nvidia", None, ("flr",))


def test_vfs_and_their_physical_function_name_each_other(tmp_path: Path) -> None:
    found = functions(gpu_node(tmp_path, cores=2, vfs=12, gpus=1).root)
    pf = found["0000:0c:00.0"]
    assert pf.vfs_max == 12
    assert pf.names == ("ib0", "mlx5_0")
    assert pf.virtfns == tuple(f"0000:0c:{vf >> 3:02x}.{vf & 7}" for vf in range(1, 13))
    assert {found[vf].physfn for vf in pf.virtfns} == {"0000:0c:00.0"}
    assert all(found[vf].switches == ("0000:09:00.0",) and not found[vf].bridge for vf in pf.virtfns)


def test_wide_pci_domains_and_buses_below_a_vmd_are_read(tmp_path: Path) -> None:
    """Intel's VMD is a host bridge itself: domains from 0x10000 on (drivers/pci/controller/vmd.c)."""
    tree = MachineTree(tmp_path)
    vmd = Function("0000:5d:05.5", 0x010400)
    tree.pci("pci0000:5d", 0, [], vmd)
    tree.pci("pci0000:5d", 0, ["0000:5d:05.5", "pci10000:00"], Function("10000:00:02.0", BRIDGE))
    ssd = Function("10000:01:00.0", NVME, driver="nvme", children=("nvme/nvme0",))
    tree.pci("pci0000:5d", 0, ["0000:5d:05.5", "pci10000:00", "10000:00:02.0"], ssd)
    found = functions(tmp_path)
    assert list(found) == ["0000:5d:05.5", "10000:00:02.0", "10000:01:00.0"]
    assert found["10000:01:00.0"].root_complex == "pci10000:00"
    assert found["10000:01:00.0"].bridges == ("10000:00:02.0",)
    assert found["10000:01:00.0"].names == ("nvme0",)


def test_addresses_sort_as_numbers() -> None:
    addresses = ["10000:00:00.0", "0000:80:00.0", "ffff:00:1f.0", "0000:08:1f.7", "0000:08:02.0"]
    assert sorted(addresses, key=address_key) == [
        "0000:08:02.0",
        "0000:08:1f.7",
        "0000:80:00.0",
        "ffff:00:1f.0",
        "10000:00:00.0",
    ]


def test_a_bridge_to_conventional_pci_is_not_a_switch(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    port, bridge = "0000:00:1c.0", "0000:01:00.0"
    tree.pci("pci0000:00", 0, [], Function(port, BRIDGE))
    tree.pci("pci0000:00", 0, [port], Function(bridge, BRIDGE))
    tree.pci("pci0000:00", 0, [port, bridge], Function("0000:02:03.0", 0x030000))
    assert functions(tmp_path)["0000:02:03.0"].switches == ()


def test_switches_in_a_row_are_listed_from_the_root(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    bridges: list[str] = []
    for bus in range(5):
        tree.pci("pci0000:00", 0, bridges, Function(f"0000:{bus:02x}:00.0", BRIDGE))
        bridges.append(f"0000:{bus:02x}:00.0")
    tree.pci("pci0000:00", 0, bridges, Function("0000:05:00.0", GPU))
    assert functions(tmp_path)["0000:05:00.0"].switches == ("0000:01:00.0", "0000:03:00.0")


def bare(tmp_path: Path, **attributes: str) -> PciFunction:
    tree = MachineTree(tmp_path, sockets=2)
    function = Function("0000:00:01.0", INFINIBAND, attributes=attributes)
    where = tree.pci("pci0000:00", 0, [], function)
    for name in ("numa_node", "local_cpus", "local_cpulist"):
        if name not in attributes:
            (tree.sys / where / name).unlink()
    return functions(tmp_path)["0000:00:01.0"]


REAL = Path("/sys/bus/pci/devices")


@pytest.mark.skipif(not REAL.is_dir(), reason="this machine has no PCI: run on one that has")
def test_headers_of_real_functions_match_the_kernel(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    for path in REAL.iterdir():
        copy = tree.sys / "bus/pci/devices" / path.name
        copy.mkdir(parents=True)
        (copy / "config").write_bytes((path / "config").read_bytes()[:64])
    words = {path.name: [int((path / name).read_text(), 16) for name in IDS] for path in REAL.iterdir()}
    found = functions(tmp_path).values()
    assert {one.address: [one.class_code, one.vendor, one.device] for one in found} == words


@pytest.mark.parametrize("header", [None, b"", b"\xff" * 64])
def test_a_function_without_a_type_is_reported(tmp_path: Path, header: bytes | None) -> None:
    tree = MachineTree(tmp_path)
    tree.pci("pci0000:00", 0, [], Function("0000:00:01.0", GPU))
    where = tree.pci("pci0000:00", 0, [], Function("0000:00:02.0", GPU))
    (tree.sys / where / "vendor").unlink()
    (tree.sys / where / "config").unlink()
    if header is not None:
        (tree.sys / where / "config").write_bytes(header)
    host = read(tmp_path)
    assert [function.address for function in host.pci] == ["0000:00:01.0"]
    assert host.remarks == (
        "PCI function 0000:00:02.0 is omitted: neither its ids nor its header can be read",
    )


def test_a_function_removed_during_the_reading_is_no_remark(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.pci("pci0000:00", 0, [], Function("0000:00:01.0", GPU))
    (tree.sys / "bus/pci/devices/0000:00:02.0").symlink_to("../../../devices/pci0000:00/0000:00:02.0")
    host = read(tmp_path)
    assert ([function.address for function in host.pci], host.remarks) == (["0000:00:01.0"], ())


def test_interfaces_of_virtio_devices_are_named(tmp_path: Path) -> None:
    """A virtio device has an entry of its own below its PCI function's: virtio2/net/eth0."""
    tree = MachineTree(tmp_path)
    network = Function(
        "0000:00:03.0", 0x020000, 0x1AF4, 0x1041, children=("virtio2/net/eth0", "virtio2/power")
    )
    disk = Function("0000:00:04.0", 0x010000, 0x1AF4, 0x1042, children=("virtio3/block/vda",))
    for function in (network, disk):
        tree.pci("pci0000:00", 0, [], function)
    found = functions(tmp_path)
    assert found["0000:00:03.0"].names == ("eth0",)
    assert found["0000:00:04.0"].names == ()


def test_values_missing_in_sysfs_are_unknown_and_no_error(tmp_path: Path) -> None:
    found = bare(tmp_path)
    assert (found.cell, found.cpus, found.driver, found.iommu_group) == (-1, (), "", None)
    assert (found.reset_methods, found.link, found.bars, found.physfn) == (None, None, (), "")


def test_a_failed_reset_differs_from_one_that_may_be_retried(tmp_path: Path) -> None:
    """An empty reset_method is a kernel's word; no such file is an older kernel's silence."""
    assert bare(tmp_path, reset_method="").reset_methods == ()


@pytest.mark.parametrize(
    ("node", "cpus", "cell"),
    [("1", "f", 1), ("-1", "3", 0), ("-1", "c", 1), ("-1", "f", -1), ("-1", "0", -1), ("-1", "junk", -1)],
)
def test_the_cell_is_the_kernels_or_that_of_all_local_cpus(
    tmp_path: Path, node: str, cpus: str, cell: int
) -> None:
    assert bare(tmp_path, numa_node=node, local_cpus=cpus).cell == cell


@pytest.mark.parametrize(
    ("speed", "width", "link"),
    [
        ("16.0 GT/s PCIe", "8", PciLink(16.0, 8, 0.0, 0)),
        ("2.5 GT/s", "1", PciLink(2.5, 1, 0.0, 0)),
        ("Unknown", "63", PciLink(0.0, 0, 0.0, 0)),
        ("Unknown speed", "255", PciLink(0.0, 0, 0.0, 0)),
        ("", "", None),
    ],
)
def test_links_as_kernels_of_all_ages_print_them(
    tmp_path: Path, speed: str, width: str, link: PciLink | None
) -> None:
    found = bare(tmp_path, current_link_speed=speed, current_link_width=width)
    assert found.link == link


def test_io_bars_and_unused_ones(tmp_path: Path) -> None:
    lines = (
        "0x000000000000e000 0x000000000000e0ff 0x0000000000040101",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x00000000fb000000 0x00000000fb003fff 0x0000000000040200",
        "what is this",
    )
    assert bare(tmp_path, resource="\n".join(lines)).bars == (
        PciBar(0, 256, memory=False, wide=False, prefetchable=False),
        PciBar(2, 16384, memory=True, wide=False, prefetchable=False),
    )


def test_a_function_that_disappears_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    tree = gpu_node(tmp_path, sockets=1, cores=2, threads=1)
    (tree.sys / "bus/pci/devices/0000:ff:00.0").symlink_to("../../../devices/pci0000:ff/0000:ff:00.0")
    found = functions(tmp_path)
    assert found
    assert "0000:ff:00.0" not in found


def test_names_without_a_pci_address_are_ignored(tmp_path: Path) -> None:
    tree = gpu_node(tmp_path, sockets=1, cores=2, threads=1)
    before = functions(tmp_path)
    (tree.sys / "bus/pci/devices/0000:08:01.0 (copy)").symlink_to("0000:08:01.0")
    assert functions(tmp_path) == before


def test_a_host_without_pci_has_no_functions(tmp_path: Path) -> None:
    MachineTree(tmp_path)
    assert read(tmp_path).pci == ()


def test_the_width_of_physical_addresses_is_that_of_cpuinfo(tmp_path: Path) -> None:
    MachineTree(tmp_path)
    assert read(tmp_path).address_bits == 46
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\n")
    assert read(tmp_path).address_bits == 0


def test_an_invalid_mask_is_reported_with_its_file(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.write("devices/system/cpu/cpu0/topology/core_cpus", "not a mask")
    with pytest.raises(NodeError, match="core_cpus"):
        read(tmp_path)


def test_functions_of_one_slot(tmp_path: Path) -> None:
    MachineTree(tmp_path).pci("pci0000:00", 0, [], Function("0000:00:01.0", GPU))
    gpu = functions(tmp_path)["0000:00:01.0"]
    assert replace(gpu, address="0000:00:01.1").slot == gpu.slot == "0000:00:01"
