# SPDX-License-Identifier: Apache-2.0
"""Mediated devices of the kernel's own mdev core: mtty, its sample driver, offers them at a simulated GPU."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest
from machine import HWLAB, OLD_GPU, PROLOG, QEMU, Machine, MachineDiedError, kill_when

from pace import limit

pytestmark = [pytest.mark.hw, pytest.mark.timeout(1200)]

TYPES = f"/sys/bus/pci/devices/{OLD_GPU}/mdev_supported_types"
# mtty.c: types with one and two ports, 24 ports in all; a type's folder begins with the name of the parent's
# driver, or of its bus if there is none (mdev_type_add in mdev_sysfs.c)
ONE, TWO = "pci-1", "pci-2"
PORTS = 24
SERIAL = "0x4348:0x3253"  # mtty.c, mtty_create_config_space
PARTS = ("--gres=gpu:part:2",)
CONFIGURE = f"""set -e
mkdir -p /run/before
cp /etc/vhpc/gpu.map /etc/slurm/gres.conf /etc/slurm/slurm.conf /run/before
printf '1 {OLD_GPU} mdev={ONE}\\n2 {OLD_GPU} mdev={TWO}\\n' >> /etc/vhpc/gpu.map
sed -i 's/^Name=gpu /&Type=whole /' /etc/slurm/gres.conf
echo 'Name=gpu Type=part File=/dev/vhpc/gpu[1-2] Flags=no_gpu_env Cores=0' >> /etc/slurm/gres.conf
sed -i 's/Gres=gpu:1,/Gres=gpu:whole:1,gpu:part:2,/' /etc/slurm/slurm.conf
vhpc node-setup
systemctl restart slurmctld slurmd
"""
BACK = """cp /run/before/gpu.map /etc/vhpc
cp /run/before/gres.conf /run/before/slurm.conf /etc/slurm
for device in /sys/bus/mdev/devices/*; do [ ! -e $device ] || echo 1 > $device/remove; done
rmmod mtty
rm -f /dev/vhpc/gpu1 /dev/vhpc/gpu2
systemctl restart slurmctld slurmd
"""


@pytest.fixture
def offered(machine: Machine) -> Iterator[None]:
    """The node has two parts of a GPU, of two types."""
    machine.revive()
    subprocess.run([HWLAB, "mtty"], check=True, timeout=limit(600))
    machine.run("sh", stdin=CONFIGURE, timeout=120)
    machine.until(lambda: machine.node()[0] == "idle", "an idle node")
    yield
    with suppress(MachineDiedError):  # the next one begins as this one did
        machine.run("sh", stdin=BACK, check=False, timeout=120)
        machine.until(lambda: machine.node()[0] == "idle", "an idle node")


@pytest.fixture
def parts(offered: None, quiet: Machine) -> Machine:
    """The machine with parts of a GPU; a test leaves none of them.  ``quiet`` compares such a node."""
    return quiet


def left(machine: Machine) -> list[int]:
    """How many more devices of both types can be created."""
    said = machine.run("cat", f"{TYPES}/{ONE}/available_instances", f"{TYPES}/{TWO}/available_instances").out
    return [int(word) for word in said.split()]


@pytest.mark.promise("devices.mdev")
def test_a_job_has_parts_of_a_gpu_that_end_with_it(parts: Machine) -> None:
    assert left(parts) == [PORTS, PORTS // 2]
    with parts.stage("job with two mediated devices"):
        job = parts.submit(*PARTS)
        job.runs()
        during = parts.probe("guest", job.domain())
        ports = PORTS - 1 - 2
        assert left(parts) == [ports, ports // 2]
        job.let_go()
        assert job.wait() == "COMPLETED"
    assert sorted(during["mdevs"].values()) == [ONE, TWO]
    # the parent is in cell 0 of the host, so the parts are in the guest's
    seen = re.findall(r"^pci (\S+) cell (-?\d+)$", job.output(), re.MULTILINE)
    assert [cell for kind, cell in seen if kind == SERIAL] == ["0", "0"]
    assert "env SLURM_JOB_GPUS=0,1" in job.output()
    parts.until(lambda: left(parts) == [PORTS, PORTS // 2], "all ports to be free")


@pytest.mark.promise("devices.killed")
def test_a_killed_qemu_leaves_no_part(parts: Machine) -> None:
    with parts.stage("kill -9 of QEMU with mediated devices"):
        job = parts.submit(*PARTS)
        job.runs()
        kill_when(parts, job, "true", QEMU)
        assert job.wait() == "FAILED"
    parts.until(lambda: left(parts) == [PORTS, PORTS // 2], "all ports to be free")
    assert not parts.quarantined()


@pytest.mark.promise("devices.killed")
def test_a_killed_prolog_leaves_no_mediated_device(parts: Machine) -> None:
    with parts.stage("kill -9 of a Prolog that has made a mediated device"):
        job = parts.submit(*PARTS)
        kill_when(parts, job, "ls /sys/bus/mdev/devices | grep -q .", PROLOG)
        parts.until(lambda: parts.node()[0].startswith("drain"), "a drained node")
        job.wait("PENDING")
    parts.until(lambda: left(parts) == [PORTS, PORTS // 2], "all ports to be free")
    assert not parts.quarantined()


@pytest.mark.promise("devices.checks")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("rmmod mtty", f"{OLD_GPU} offers no mediated devices"),
        (f"sed -i s/{ONE}/pci-7/ /etc/vhpc/gpu.map", f"no mediated devices of type pci-7.*{ONE}, {TWO}"),
    ],
    ids=["no-driver", "no-type"],
)
def test_a_part_that_cannot_be_made_drains_the_node(parts: Machine, change: str, says: str) -> None:
    parts.shell(change)
    with parts.stage(f"refused: {says}"):
        job = parts.submit(*PARTS)
        parts.until(lambda: parts.node()[0].startswith("drain"), "a drained node")
    assert re.search(says, parts.node()[1])
    job.wait("PENDING")


@pytest.mark.promise("devices.mdev")
def test_only_parts_of_others_stay_and_their_use_is_told(parts: Machine) -> None:
    others = [str(uuid.uuid4()) for _ in range(PORTS // 2)]
    made = "".join(f"echo {one} > {TYPES}/{TWO}/create\n" for one in others)
    parts.run("sh", stdin=made)
    job = parts.submit(*PARTS)
    parts.until(lambda: parts.node()[0].startswith("drain"), "a drained node")
    assert "available_instances is 0" in parts.node()[1]
    job.wait("PENDING")
    parts.run("scancel", str(job.id))
    # one of our own that no journal has
    parts.shell(f"echo 1 > /sys/bus/mdev/devices/{others[0]}/remove")
    parts.shell(f"echo 76687063-0000-8000-8000-000000002308 > {TYPES}/{ONE}/create")
    parts.run("vhpc", "reconcile", timeout=120)
    assert sorted(parts.probe("node")["mdevs"]) == sorted(others[1:])
    parts.run("sh", stdin="".join(f"echo 1 > /sys/bus/mdev/devices/{one}/remove\n" for one in others[1:]))
