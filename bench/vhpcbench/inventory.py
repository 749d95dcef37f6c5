# SPDX-License-Identifier: Apache-2.0
"""How long reading a node's PCI functions takes, against reading the bare files.

A generated node of some 500 functions on tmpfs; a kernel's own sysfs is read with
the same calls. Needs no lab. The reference opens and reads every regular file of
every function once, and makes nothing of it. The target: under 150 ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from machine_tree import gpu_node

from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.node.host import cells, inventory, pci, topology
from vhpcbench.common import Report, main, milliseconds
from vhpcbench.targets import under

TARGETS = (under(150, "reading the PCI functions", "ms"),)


def run() -> int:
    """Entry point."""
    return main("inventory", __doc__ or "", 9, bench)


def bench(args: argparse.Namespace) -> Report:
    """Rounds of all three."""
    report = Report("inventory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tree = gpu_node(Path(folder), sockets=2, cores=64, gpus=1, vfs=121)
        root, proc = str(tree.sys), tree.root / "proc"
        config = Config(host=Host(sysfs_root=root), guests=Guests(accelerator="tcg"))
        online, _ = topology.cpu_numbers(root)
        cell_cpus = cells.cell_cpus(root, online)
        functions = len(pci.read_functions(root, cell_cpus, online))
        bare, scan, whole = [], [], []
        for _ in range(args.rounds):
            bare.append(milliseconds(lambda: _read_all(tree.sys / "bus/pci/devices")))
            scan.append(milliseconds(lambda: pci.read_functions(root, cell_cpus, online)))
            whole.append(milliseconds(lambda: inventory.read_inventory("n1", config, proc_root=proc)))
    report.add("the bare files", "ms", bare)
    found = report.add(f"{functions} PCI functions", "ms", scan)
    report.add("the whole inventory", "ms", whole)
    report.ratios["PCI functions to bare files"] = statistics.median(
        a / b for a, b in zip(scan, bare, strict=True)
    )
    report.judge(TARGETS[0], found.median)
    return report


def _read_all(devices: Path) -> None:
    for function in devices.iterdir():
        for attribute in function.iterdir():
            if attribute.is_file():
                attribute.read_bytes()


if __name__ == "__main__":
    raise SystemExit(run())
