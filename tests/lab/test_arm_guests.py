# SPDX-License-Identifier: Apache-2.0
"""Guests of an arm64 image on x86 nodes, in software emulation, which vhpc.toml must permit.

The image, built once, takes six minutes of a CPU, on a host that runs arm64 programs: packages arch-test,
gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static, with its entry in binfmt_misc.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from cluster import ROOT, Lab
from injection import one_line

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(5400)]

IMAGE = "arm-openmpi"
BUILD = (ROOT / "scripts/publish-image", "debian-openmpi", "--arch=aarch64", f"--name={IMAGE}")
LIBVIRT = (9, 1)
NO_PROGRAMS = "this host cannot run programs for aarch64"
COMPILER = "aarch64-linux-gnu-gcc"
TOML, SETTINGS = "/etc/vhpc/vhpc.toml", r'accelerator = "tcg"\nemulated = ["aarch64"]'
OPTIONS = ("--mem=900",)
TIMEOUT_S = 900
SUM = (
    "import platform; from mpi4py import MPI; world = MPI.COMM_WORLD; "
    "print(world.rank, MPI.Get_processor_name(), platform.machine(), world.allreduce(world.rank + 1))"
)


@pytest.fixture(scope="module")
def image(lab: Lab) -> Iterator[None]:
    if platform.machine() != "x86_64":
        pytest.skip("the nodes of this lab need no emulation for arm64: run it on x86-64")
    if shutil.which(COMPILER) is None:
        pytest.skip("needs a compiler for arm64: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross")
    libvirt = lab.run("n1", "virsh", "--version").out.strip()
    if tuple(map(int, libvirt.split("."))) < LIBVIRT:
        pytest.skip(f"libvirt {libvirt} starts no guests of aarch64: run it on a lab of Debian 13")
    done = subprocess.run(BUILD, stderr=subprocess.PIPE, text=True, timeout=5000, check=False)
    if NO_PROGRAMS in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    yield
    lab.run("ctl", "vhpc", "image", "rm", IMAGE, check=False)


@pytest.fixture
def emulated(lab: Lab) -> Iterator[None]:
    """All hosts permit guests of aarch64."""
    hosts = ("ctl", "login", *lab.nodes)
    try:
        for host in hosts:
            lab.run(host, "cp", "-p", TOML, f"{TOML}.before")
            lab.run(host, "sed", "-i", f"s/^\\[guests\\]$/&\\n{SETTINGS}/", TOML)
        lab.service("ctl", "restart", "vhpcd")
        yield
    finally:
        for host in hosts:
            lab.run(host, "mv", "-f", f"{TOML}.before", TOML, check=False)
        lab.service("ctl", "restart", "vhpcd")


@pytest.mark.usefixtures("image")
def test_an_arm_image_is_refused_without_the_setting(lab: Lab) -> None:
    job = lab.finish("uname -m", *OPTIONS, image=IMAGE)
    assert job.accounted("State") == ["FAILED"]
    one_line(job, f"^vhpc: .*image {IMAGE}:latest is for aarch64, not for x86_64")


@pytest.mark.usefixtures("image", "emulated")
def test_an_emulated_arm_guest_runs_a_job(lab: Lab) -> None:
    job = lab.submit("uname -m; srun uname -m; srun hostname", "-N1", *OPTIONS, image=IMAGE)
    assert job.wait(timeout=TIMEOUT_S) == "COMPLETED", job.output()
    (node,) = (name for name in lab.nodes if name in job.show()["NodeList"])
    assert job.output().splitlines() == ["aarch64", "aarch64", node]


@pytest.mark.usefixtures("image", "emulated")
def test_ranks_in_emulated_arm_guests_of_two_nodes(lab: Lab) -> None:
    script = f'srun --mpi=pmix -n2 python3 -c "{SUM}" 2>/dev/null | sort'
    job = lab.submit(script, "-N2", "--ntasks-per-node=1", "--vhpc-network=job", *OPTIONS, image=IMAGE)
    assert job.wait(timeout=TIMEOUT_S) == "COMPLETED", job.output()
    assert job.output().splitlines() == ["0 n1 aarch64 3", "1 n2 aarch64 3"]
