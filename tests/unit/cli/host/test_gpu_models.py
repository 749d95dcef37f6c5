# SPDX-License-Identifier: Apache-2.0
"""GPUs of AMD and Intel: their names, their virtual functions in the GPU map, and what needs care."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import read
from machine_tree import MachineTree
from real_machines import MI100, MI250X, MI300X, machine

from vhpc_slurm.cli.host import inventory
from vhpc_slurm.cli.host.checks import Level, devices, gpumodels
from vhpc_slurm.config import Config
from vhpc_slurm.device import classify
from vhpc_slurm.hardware import PciFunction


def function(
    kind: int, vendor: int, device: int, address: str = "0000:0c:00.0", physfn: str = ""
) -> PciFunction:
    return PciFunction(address, kind << 8, vendor, device, "", 0, (), "pci0000:08", physfn=physfn)


@pytest.mark.parametrize(
    ("kind", "ids", "line"),
    [
        # names and classes as lspci prints them: Display controller (0380), Processing accelerators (1200)
        (0x0380, (0x1002, 0x738C), "GPU, AMD MI100 1002:738c"),
        (0x0380, (0x1002, 0x740C), "GPU, AMD MI250X 1002:740c"),
        (0x1200, (0x1002, 0x74A1), "GPU, AMD MI300X 1002:74a1"),
        (0x1200, (0x1002, 0x74B5), "GPU, AMD MI300X 1002:74b5"),
        (0x0380, (0x8086, 0x0BD5), "GPU, Intel Max 1550 8086:0bd5"),
        (0x0380, (0x8086, 0x56C0), "GPU, Intel Flex 170 8086:56c0"),
        (0x0302, (0x10DE, 0x2330), "GPU, NVIDIA 10de:2330"),
        (0x1200, (0x1DA3, 0x1020), "accelerator, 1da3:1020"),
        (0x0300, (0x8086, 0x46A6), "VGA, Intel 8086:46a6"),
    ],
)
def test_gpus_are_named(kind: int, ids: tuple[int, int], line: str) -> None:
    assert inventory.function_line(function(kind, *ids), None) == f"0c:00.0 {line}"


def test_a_virtual_function_of_amd_is_a_gpu_of_the_map() -> None:
    """Made by AMD's driver GIM, which keeps the physical function."""
    pf = function(0x1200, 0x1002, 0x74A1)
    vf = function(0x1200, 0x1002, 0x74B5, "0000:0c:02.0", pf.address)
    places = {one.address: one for one in (pf, vf)}
    (found,) = devices.gpu_map(Path("gpu.map"), [vf.address], places, 1, Config(), {})
    assert (found.level, found.what) == (Level.OK, "gpu.map lists 1 GPUs")
    given = classify(vf.address, vf, indexed=True)
    assert given is not None
    assert (given.device_class, given.traits.slow_boot) == ("gpu", True)


@pytest.mark.parametrize(
    ("lines", "named"),
    [(MI300X, "0000:0c:00.0, 0000:15:00.0, 0000:1e:00.0"), (MI250X, ""), (MI100, "")],
    ids=["MI300X", "MI250X", "MI100"],
)
def test_gpus_that_no_reset_brings_back_are_named(tmp_path: Path, lines: str, named: str) -> None:
    tree = machine(tmp_path, lines)
    found = [*gpumodels.check(str(tree.sys), gpus(tree))]
    assert [one.check for one in found] == (["devices.reset"] if named else [])
    assert all(named in one.what and "GIM" in one.hint for one in found)


def test_gpus_of_one_xgmi_hive_are_named(tmp_path: Path) -> None:
    """The host's driver says so; vfio-pci does not."""
    tree = machine(tmp_path, MI250X)
    for address, hive in (("4e", "1"), ("51", "1"), ("0e", "2")):
        where = tree.sys / "bus/pci/devices" / f"0000:{address}:00.0" / "xgmi_hive_info"
        where.mkdir()
        (where / "xgmi_hive_id").write_text(f"{hive}\n")
    (found,) = gpumodels.check(str(tree.sys), gpus(tree))
    assert (found.check, found.level) == ("devices.xgmi", Level.WARN)
    assert found.what.startswith("joined by XGMI: 0000:4e:00.0, 0000:51:00.0: the reset")


def test_gpus_that_nothing_clears_are_named_for_each_vendor() -> None:
    found = devices.clearing(Config(), 0x1002, {"0000:4e:00.0": 0x740F})
    assert (found.level, found.hint) == (Level.WARN, "set devices.gpu_scrub")
    assert found.what.endswith("which need not clear their memory: 0000:4e:00.0")


def gpus(tree: MachineTree) -> list[PciFunction]:
    return [one for one in read(tree.root).pci if one.vendor == 0x1002]
