# SPDX-License-Identifier: Apache-2.0
"""How long a plan of a full node takes, and how that grows with the node.

The whole of a node goes to one job: all CPUs and memory, all GPUs, all virtual
functions, on generated nodes of 1 to 8 sockets. Needs no lab. The target: under
20 ms for 8 sockets, 16 cells, 1024 threads, 16 GPUs and 64 virtual functions.
The ratio says how much more than in proportion to one socket the largest takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from machine_tree import gpu_node

from vhpc_slurm.config import Config, Guests, Host
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.model import (
    Blob,
    Generation,
    GresAllocation,
    ImageIdentity,
    ImageManifest,
    ImageRef,
    JobRequest,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.node.host import inventory
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.plan import fit
from vhpcbench.common import BenchError, Report, main, milliseconds
from vhpcbench.targets import under

SOCKETS = (1, 2, 4, 8)
TARGETS = (under(20, f"plan of {SOCKETS[-1]} sockets", "ms"),)
BLOB = Blob("x", "0" * 64, 1)
MANIFEST = ImageManifest(
    1, "image", "latest", "x86_64", BLOB, BLOB, BLOB, "erofs", "agent", "", 384, "", (), "1"
)  # fmt: skip
REQUEST = JobRequest(1, 0, 1000, 1000, "user", "/", ImageRef("image"))


def run() -> int:
    """Entry point."""
    return main("plan", __doc__ or "", 15, bench)


def bench(args: argparse.Namespace) -> Report:
    """Rounds of all sizes."""
    report = Report("plan")
    sizes = [_planner(sockets) for sockets in SOCKETS]
    rounds = [[milliseconds(plan) for _, plan in sizes] for _ in range(args.rounds)]
    series = [report.add(name, "ms", [times[i] for times in rounds]) for i, (name, _) in enumerate(sizes)]
    report.ratios["8 sockets to 8 times one"] = statistics.median(
        times[-1] / (SOCKETS[-1] * times[0]) for times in rounds
    )
    report.judge(TARGETS[0], series[-1].median)
    return report


def _planner(sockets: int) -> tuple[str, Callable[[], object]]:
    """A node in words, and what plans it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tree = gpu_node(Path(folder), sockets=sockets, cells_per_socket=2, cores=32, threads=2, gpus=1, vfs=4)
        config = Config(host=Host(sysfs_root=str(tree.sys)), guests=Guests(accelerator="tcg"))
        found = inventory.read_inventory("n1", config, proc_root=tree.root / "proc")
    host = replace(found, kvm=True, arch="x86_64", address_bits=52)
    gpus = tuple(function.address for function in host.pci if function.class_code >> 8 == 0x0302)
    vfs = sum(bool(function.physfn) for function in host.pci)
    gres = (GresAllocation("gpu", "", len(gpus), tuple(range(len(gpus)))), GresAllocation("ibvf", "", vfs))
    memory = sum(cell.memory_mib for cell in host.cells)
    allocation = NodeAllocation("n1", tuple(range(len(host.abstract))), memory, gres)
    image = ImageIdentity(REQUEST.image, "sha256:" + "0" * 64, MANIFEST)
    job = Generation(1, 0, "00000000")
    case = PlanInput(job, allocation, host, REQUEST, image, devices=NodeDevices(gpus))

    def plan() -> None:
        made = fit(case, Config())
        if not isinstance(made, NodePlan):
            raise BenchError(f"no plan for {sockets} sockets: {made.error()}")

    return f"{sockets} sockets, {len(host.abstract)} CPUs, {len(gpus)} GPUs, {vfs} VFs", plan


if __name__ == "__main__":
    raise SystemExit(run())
