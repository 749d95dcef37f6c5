# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of vhpc web: a vhpcd with jobs as a site has them, and `vhpc web` as a process."""

from __future__ import annotations

import os
import pwd
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller_lab import allocation, request, stop, wait_for
from vhpcd_process import SOURCES, Vhpcd

from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.model import (
    GuestPlacement,
    HostCell,
    HostCpu,
    HostInventory,
    Lease,
    NodeReport,
    Stage,
    Timeline,
)

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>&quot;\"'\u202e"
GPU_AT, VF_AT = "0000:3b:00.0", "0000:5e:00.2"
STAGES = (
    ("lease", 0.05),
    ("image", 0.62),
    ("devices", 1.31),
    ("network", 0.22),
    ("shares", 0.18),
    ("start g0", 1.04),
    ("setup g0", 2.51),
)


def host(node: str) -> HostInventory:
    """A node with two sockets of 16 CPUs, a GPU and a VF."""
    return HostInventory(
        node=node,
        cpu_vendor="GenuineIntel",
        cpus=tuple(HostCpu(cpu, cpu, cpu // 16, cpu // 16) for cpu in range(32)),
        cells=tuple(
            HostCell(cell, 131072, tuple(range(16 * cell, 16 * cell + 16)), ((0, 10), (1, 21)))
            for cell in range(2)
        ),
        abstract=tuple(range(32)),
        kvm=True,
        kvm_reason="",
        pci=(
            PciFunction(GPU_AT, 0x030200, 0x10DE, 0x2330, "vfio-pci", 0, (), "pci0000:3a"),
            PciFunction("0000:5e:00.0", 0x020700, 0x15B3, 0x101B, "mlx5_core", 1, (), "pci0000:5d"),
            PciFunction(
                VF_AT, 0x020700, 0x15B3, 0x101C, "vfio-pci", 1, (), "pci0000:5d", physfn="0000:5e:00.0"
            ),
        ),
    )


def start_job(vhpcd: Vhpcd, job_id: int, user: str, name: str, *nodes: str, said: str = "") -> Lease:
    """A job that runs: its nodes have taken the lease and have reported."""
    owner = pwd.getpwnam(user)
    job = request(job_id, uid=owner.pw_uid, gid=owner.pw_gid, user=user, account="physics", job_name=name)
    lease = vhpcd.client.open_generation(job, allocation(*nodes, memory_mib=65536, cpu_ids=tuple(range(16))))
    for place, node in enumerate(nodes):
        vhpcd.client.lease(job_id, 0, node, 5.0)
        guest = GuestPlacement(
            0, node, tuple(range(16)), ((0, 61440),), 2048, devices=((GPU_AT, "gpu"), (VF_AT, "vf"))
        )
        lines = (said,) if said else ()
        vhpcd.client.report_timeline(
            timeline(lease, node, 0.1 * place),
            NodeReport(lease.generation, node, host(node), (guest,), lines),
        )
    return lease


def timeline(lease: Lease, node: str, late_s: float) -> Timeline:
    stages, at = [], time.time() - 600 + late_s
    for name, took in STAGES:
        stages.append(Stage(name, at, at + took + late_s))
        at += took + late_s
    return Timeline(lease.generation, node, tuple(stages))


def fill(vhpcd: Vhpcd) -> None:
    """Jobs in every state."""
    start_job(
        vhpcd, 4201, "games", "train-resnet", "n1", "n2", said="warning: image debian-hpc has a newer tag"
    )
    start_job(vhpcd, 4202, "nobody", "md_equilibrate_long_name_of_a_chain", "n3", "n4")
    start_job(vhpcd, 4203, "games", HOSTILE, "n1", said=f"warning: {HOSTILE}")
    lease = start_job(vhpcd, 4204, "games", "ended", "n2")
    end(vhpcd, lease, "n2", "")
    lease = start_job(vhpcd, 4205, "games", "stuck", "n5")
    end(vhpcd, lease, "n5", "VF 0000:5e:00.2 does not come back from vfio-pci: Device or resource busy")
    job = request(4206, uid=pwd.getpwnam("games").pw_uid, user="games", image=bad_image(), job_name="typo")
    vhpcd.client.open_generation(job, allocation("n6"))
    job = request(4207, uid=pwd.getpwnam("games").pw_uid, user="games", job_name="boots")
    booting = vhpcd.client.open_generation(job, allocation("n7", "n8"))
    for node in booting.allocation.node_names:
        vhpcd.client.lease(4207, 0, node, 5.0)
        vhpcd.client.look(4207, 0, node, ("setup g0", 3.0))


def end(vhpcd: Vhpcd, lease: Lease, node: str, note: str) -> None:
    """The end of a job, clean if there is no note."""
    vhpcd.client.ending(lease.generation.job_id, None)
    vhpcd.client.acknowledge(_Ack(lease, node, note))


class _Ack:
    timeline = None

    def __init__(self, lease: Lease, node: str, note: str) -> None:
        self.generation, self.node, self.note, self.clean = lease.generation, node, note, not note


def bad_image() -> Any:
    from vhpc_slurm.model import ImageRef

    return ImageRef("debain-minimal")


class Web:
    """A `vhpc web` process; ``said`` are its first lines."""

    def __init__(self, vhpcd: Vhpcd, *options: str, uid: int | None = None, lines: int = 3) -> None:
        environment = {
            "PYTHONPATH": SOURCES,
            "PATH": os.environ["PATH"],
            "VHPC_CONFIG": str(vhpcd.folder / "vhpc.toml"),
        }
        # Python may be in a folder that other users cannot read
        reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        user = [] if uid is None else ["setpriv", f"--reuid={uid}", "--clear-groups", *reading]
        self.process = subprocess.Popen(
            [*user, sys.executable, "-m", "vhpc_slurm.cli.main", "web", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd="/",
        )
        assert self.process.stdout is not None
        self.said = "".join(self.process.stdout.readline() for _ in range(lines))

    @property
    def address(self) -> str:
        """With the token."""
        found = re.search(r"http://\S+", self.said)
        assert found is not None, self.said
        return found[0]

    def rest(self) -> str:
        """Its later output, as far as it is there now."""
        assert self.process.stdout is not None
        return self.process.stdout.read() if select.select([self.process.stdout], [], [], 0)[0] else ""

    def end(self) -> int:
        return stop(self.process) if self.process.poll() is None else self.process.returncode


@contextmanager
def behind_a_proxy(vhpcd: Vhpcd) -> Iterator[Any]:
    """A client in the place of the site's web server."""
    import httpx  # not every machine has it

    folder = Path(f"/run/vhpc-web-pages-{os.getpid()}")
    folder.mkdir(mode=0o755)
    options = ("--socket", str(folder / "socket"), "--user-header", "X-Remote-User", "--host", "hpc.example")
    web = Web(vhpcd, *options, lines=0)
    try:
        wait_for((folder / "socket").exists, "vhpc web made no socket")
        transport = httpx.HTTPTransport(uds=str(folder / "socket"), retries=5)
        with httpx.Client(transport=transport, base_url="http://hpc.example", timeout=30) as client:
            yield client
        assert web.end() == 0
        assert not (folder / "socket").exists()
    finally:
        web.end()
        shutil.rmtree(folder)
