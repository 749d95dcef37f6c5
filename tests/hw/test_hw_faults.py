# SPDX-License-Identifier: Apache-2.0
"""Faults of devices on a real kernel: the promised line or quarantine, and all as before."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from machine import BRIDGE, GPU, NEIGHBOUR, OLD_GPU, PROLOG, QEMU, Job, Machine, kill_when

pytestmark = [pytest.mark.hw, pytest.mark.timeout(600)]

SYSFS = "/sys/bus/pci"
# the bridge of the two is in their group as well, and its hot-plug driver would be the first reason
OLD_MAP = f"echo 0 {OLD_GPU} > /etc/vhpc/gpu.map; echo {BRIDGE} > {SYSFS}/drivers/shpchp/unbind"
TO_VFIO = (
    f"echo {NEIGHBOUR} > {SYSFS}/drivers/e1000/unbind; "
    f"echo vfio-pci > {SYSFS}/devices/{NEIGHBOUR}/driver_override; echo {NEIGHBOUR} > {SYSFS}/drivers_probe"
)
TO_NOBODY = f"echo {NEIGHBOUR} > {SYSFS}/drivers/e1000/unbind"
BACK = (
    f"echo 0 {GPU} > /etc/vhpc/gpu.map; echo default > {SYSFS}/devices/{GPU}/reset_method; "
    f"echo {NEIGHBOUR} > {SYSFS}/devices/{NEIGHBOUR}/driver/unbind; "
    f"echo > {SYSFS}/devices/{NEIGHBOUR}/driver_override; echo {NEIGHBOUR} > {SYSFS}/drivers_probe; "
    f"echo {BRIDGE} > {SYSFS}/drivers_probe; true"
)


@pytest.fixture
def changed(quiet: Machine) -> Iterator[Machine]:
    """The machine, whose devices are as they were after a test that changed them by hand."""
    yield quiet
    quiet.shell(BACK)


@pytest.mark.promise("hw.refuse")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (OLD_MAP, rf"{OLD_GPU} shares IOMMU group \d+ with {NEIGHBOUR}, which e1000 has"),
        (f"{OLD_MAP}; {TO_VFIO}", rf"{OLD_GPU} shares IOMMU group \d+ with {NEIGHBOUR}, which vfio-pci has"),
        (f"{OLD_MAP}; {TO_NOBODY}", rf"{OLD_GPU} can only be reset by bus: .* others are on the same bus"),
        (f"echo > {SYSFS}/devices/{GPU}/reset_method", rf"{GPU} cannot be reset"),
    ],
    ids=["group-not-viable", "group-shared", "others-on-its-bus", "no-reset"],
)
def test_a_gpu_that_must_not_go_drains_the_node(changed: Machine, change: str, says: str) -> None:
    changed.shell(change)
    before = changed.probe("node")
    with changed.stage(f"refused: {says}"):
        job = changed.submit()
        changed.until(lambda: changed.node()[0].startswith("drain"), "a drained node")
    assert re.search(says, changed.node()[1])
    job.wait("PENDING")
    changed.until(lambda: changed.probe("node") == before, "nothing changed")


def noted(job: Job, kind: str) -> str:
    return f'grep -qs \'"kind":"{kind}"\' /var/lib/vhpc/journal/{job.id}.*'


def booting(job: Job) -> str:
    return f"virsh -q list --state-running --name | grep -q '^vhpc-{job.id}-'"


LIBVIRTD = "^/usr/sbin/libvirtd"


@pytest.mark.promise("hw.killed")
def test_a_killed_qemu_ends_its_job_and_frees_its_devices(quiet: Machine) -> None:
    with quiet.stage("kill -9 of QEMU under a running job"):
        job = quiet.submit()
        job.runs()
        kill_when(quiet, job, "true", QEMU)
        assert job.wait() == "FAILED"
    (line,) = (line for line in job.output().splitlines() if line.startswith("vhpc"))
    assert "is gone" in line
    assert not quiet.quarantined()


@pytest.mark.promise("hw.restart")
def test_a_job_survives_killed_libvirtd_and_restarted_slurmd(quiet: Machine) -> None:
    with quiet.stage("kill -9 of libvirtd, restart of slurmd under a running job"):
        job = quiet.submit()
        job.runs()
        kill_when(quiet, job, "true", LIBVIRTD)
        # in whose unit are the daemons of shared folders
        quiet.run("systemctl", "restart", "slurmd")
        job.let_go()
        assert job.wait() == "COMPLETED"
    assert "down\n" in job.output()


@pytest.mark.promise("hw.killed")
def test_a_qemu_killed_in_its_boot_drains_nothing(quiet: Machine) -> None:
    with quiet.stage("kill -9 of QEMU in a guest's boot"):
        job = quiet.submit()
        kill_when(quiet, job, booting(job), QEMU)
        assert job.wait() == "FAILED"
    (line,) = (line for line in job.output().splitlines() if line.startswith("vhpc"))
    assert "QEMU crashed or was killed" in line
    assert "drain" not in quiet.node()[0]
    assert not quiet.quarantined()


@pytest.mark.promise("hw.killed")
@pytest.mark.parametrize(
    ("victim", "stage"),
    [
        (PROLOG, "devices"),
        (PROLOG, "start"),
        (PROLOG, "agent"),
        (LIBVIRTD, "start"),
    ],
    ids=["prolog-devices", "prolog-start", "prolog-agent", "libvirtd-start"],
)
def test_a_kill_while_a_guest_starts_returns_its_devices(quiet: Machine, victim: str, stage: str) -> None:
    with quiet.stage(f"kill -9 in a guest's start, stage {stage}: {victim}"):
        job = quiet.submit()
        moment = {"devices": noted(job, "device"), "start": noted(job, "domain"), "agent": booting(job)}
        kill_when(quiet, job, moment[stage], victim)
        quiet.until(lambda: quiet.node()[0].startswith("drain"), "a drained node")
        job.wait("PENDING")
    assert not quiet.quarantined()


@pytest.mark.promise("hw.unplug")
def test_a_gpu_that_is_pulled_from_under_a_guest_is_quarantined(quiet: Machine) -> None:
    with quiet.stage("GPU pulled from under a running guest"):
        job = quiet.submit()
        job.runs()
        quiet.monitor("device_del", id="gpu0")
        quiet.until(lambda: quiet.shell(f"test ! -e {SYSFS}/devices/{GPU}", check=False).code == 0, "no GPU")
        job.let_go()
        job.wait()
        quiet.until(lambda: quiet.node()[0].startswith("drain"), "a drained node")
    assert quiet.quarantined() == [GPU]
    quiet.monitor("device_add", driver="pci-testdev", id="gpu0", bus="gpu_port", membar=256 << 20)
    quiet.until(lambda: quiet.shell(f"test -e {SYSFS}/devices/{GPU}", check=False).code == 0, "the GPU")
    quiet.run("vhpc", "devices", "clear", GPU)
    assert not quiet.quarantined()
