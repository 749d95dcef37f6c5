# SPDX-License-Identifier: Apache-2.0
"""Captured trees of real machines (tests/data/sysfs), and what hwloc's own tools say of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.host import inventory

TREES = Path(__file__).parents[2] / "data" / "sysfs"
NAMES = sorted(path.name.removesuffix(".hwloc") for path in TREES.glob("*.hwloc"))

SKIPPED = re.compile(
    r"/node\d+/memory\d+|/sys/devices/virtual/(net|tty|block)|/power/"
    r"|/cpu\d*/(cpufreq|cpuidle|regs|microcode|acpi_cppc|thermal_throttle|power)/"
)

Trees = Callable[[str], Path]
"""Name of a captured tree -> folder with its ``sys`` and ``proc``, shared by all tests: not to be written."""

one_worker = pytest.mark.xdist_group("captured machines")
"""For files whose tests read many captured trees: a worker unpacks each once."""

needs_lstopo = pytest.mark.skipif(
    shutil.which("lstopo-no-graphics") is None, reason="hwloc-nox is not installed: make deps"
)


def unpack(name: str, where: Path) -> Path:
    """A copy of a captured tree, with the files that vhpc or hwloc read."""
    with tarfile.open(TREES / f"{name}.tar.bz2") as archive:
        wanted = [
            member
            for member in archive
            if re.search(r"/(proc|sys/(bus/(pci|node|cpu)|class|devices|kernel))/", member.name)
            and not SKIPPED.search(member.name)
        ]
        # files of this repository; and Debian 12's tarfile knows no filters yet
        for member in wanted:
            archive.extract(member, where)
    (tree,) = where.iterdir()
    return tree


def lstopo(tree: Path) -> ET.Element:
    """The whole of hwloc's own reading of a tree, as XML."""
    options = ["--input", str(tree), "--if", "fsroot", "--of", "xml", "--whole-io", "--disallowed"]
    done = subprocess.run(
        ["lstopo-no-graphics", *options], capture_output=True, text=True, check=True, timeout=60
    )
    return ET.fromstring(done.stdout)


def cpus(mask: str) -> set[int]:
    """The numbers in one of hwloc's bitmaps; words of it that are zero may be empty."""
    value = 0
    for word in mask.split(","):
        value = value << 32 | int(word or "0", 16)
    return {cpu for cpu in range(value.bit_length()) if value >> cpu & 1}


def read(tree: Path, name: str = "n1") -> HostInventory:
    """vhpc's inventory of a machine's tree."""
    config = Config(host=Host(sysfs_root=str(tree / "sys")), guests=Guests(accelerator="tcg"))
    return inventory.read_inventory(name, config, proc_root=tree / "proc", kvm_device=tree / "no-kvm")
