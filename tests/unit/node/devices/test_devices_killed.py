# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any point of taking and releasing devices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
from device_rig import GENERATION, Rig, clear, device_rig, passthrough, quarantined, state, take

from pace import limit
from vhpc_slurm import files
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.devices.assignment import HeldDevice
from vhpc_slurm.node.devices.vf import PARKED_GUID
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.store.timeline import Recorder

rig = device_rig


class _Killing:
    """An ``os`` whose N-th write does not come to be: the process is gone instead."""

    def __init__(self, at: int) -> None:
        self.left = at

    def write(self, fd: int, data: bytes) -> int:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(fd, data)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def _in_child(action: Callable[[], object]) -> int:
    """Run something in a process of its own; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    until = time.monotonic() + limit(60)
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    raise AssertionError("the child does not end")


@pytest.mark.promise("devices.killed")
@pytest.mark.long
@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci"])
def test_killed_at_any_journal_write_all_devices_come_back(rig: Rig, driver: str) -> None:
    found = [*rig.gpus, rig.vfs[0]]
    for gpu in rig.gpus:
        rig.give_to_host(gpu, "nvidia")
        if driver == "vfio-pci":
            rig.give_to_host(gpu, "")
            gpu.override = driver
            rig.pci._attach(rig.pci.drivers[driver], gpu)
    before = [state(device) for device in found]

    def whole_job(at: int) -> None:
        files.os = _Killing(at)  # type: ignore[assignment, attr-defined]
        ours = rig.journal()
        vf = rig.vfs[0]
        taken = [*passthrough(*rig.gpus), *passthrough(vf, role="vf")]
        AssignedDevice().take(rig.layout, ours, taken, rig.host)
        registry.release_all(rig.layout, ours)

    killed, at = True, 0
    while killed:
        at += 1
        status = _in_child(partial(whole_job, at))
        killed = os.WIFSIGNALED(status)
        clear(rig)
        assert [state(device) for device in found] == before, f"killed at write {at}"
        assert rig.kernel.interfaces[1].ports[0].port_guid in (0, PARKED_GUID)
        assert quarantined(rig) == []
    assert rig.kernel.interfaces[1].ports[0].port_guid == PARKED_GUID
    assert at == 2 * len(found) + 1


@pytest.mark.promise("devices.killed")
@pytest.mark.long
def test_killed_at_any_write_to_sysfs_all_devices_come_back(rig: Rig) -> None:
    rig.give_to_host(gpu := rig.gpus[0])
    rig.with_devices(reset_methods=("bus",))
    before = state(gpu)
    real = attribute.write_attribute

    def whole_job(at: int, *, after: bool) -> None:
        left = at

        def write(path: str, text: str, timeout_s: float | attribute.Until) -> None:
            nonlocal left
            left -= 1
            if left or after:
                real(path, text, timeout_s)
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        attribute.write_attribute = write
        journal = rig.journal()
        AssignedDevice().take(rig.layout, journal, passthrough(gpu), rig.host)
        registry.release_all(rig.layout, journal)

    for after in (False, True):
        killed, at = True, 0
        while killed:
            at += 1
            status = _in_child(partial(whole_job, at, after=after))
            killed = os.WIFSIGNALED(status)
            clear(rig)
            assert state(gpu) == before, f"killed at write {at}"
            assert quarantined(rig) == []
        assert at == 12


def test_release_may_be_repeated_at_any_time(rig: Rig) -> None:
    rig.give_to_host(gpu := rig.gpus[0])
    before = state(gpu)
    journal = take(rig, gpu)
    held = journal.entry(f"device:{gpu.address}").read(HeldDevice)
    for _ in range(3):
        assignment.release(rig.layout, str(GENERATION), held)
        assert state(gpu) == before
    assert gpu.was_reset == 1


def test_teardown_takes_the_time_of_a_stage(rig: Rig) -> None:
    clear(rig, take(rig, rig.gpus[0]))
    stages = Recorder(rig.layout.timeline(GENERATION), GENERATION, "n1").timeline().stages
    assert "release" in [stage.name for stage in stages]
