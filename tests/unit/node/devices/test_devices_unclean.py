# SPDX-License-Identifier: Apache-2.0
"""Devices whose state after a job is in doubt."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from device_rig import GENERATION, Rig, clear, device_rig, opened, quarantined, reset_fails, take
from fake_pci import BUS_MASTER, COMMAND
from fake_pci_device import Device, fail

from vhpc_slurm.errors import TeardownError
from vhpc_slurm.node.devices import assignment, quarantine, vfio
from vhpc_slurm.node.devices.assignment import HeldDevice
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.store.journal import read_entries

rig = device_rig


def _drives_the_bus(rig: Rig, gpu: Device) -> None:
    def master(device: Device) -> None:
        device.config[COMMAND] |= BUS_MASTER

    gpu.on_reset = master


def _falls_off_the_bus(rig: Rig, gpu: Device) -> None:
    def fall(device: Device) -> None:
        device.config[:] = b"\xff" * 64

    gpu.on_reset = fall


def _comes_back_late(rig: Rig, gpu: Device) -> None:
    log = rig.root / "kmsg"
    line = f"4,1,1,-;vfio-pci {gpu.address}: not ready 65535ms after FLR; giving up\n"
    log.write_text(line)  # of an earlier job

    def late(device: Device) -> None:
        with log.open("a") as out:
            out.write(line.replace("4,1,1", "4,2,2"))

    gpu.on_reset = late


def _scrub_fails(rig: Rig, gpu: Device) -> None:
    rig.with_devices(gpu_scrub=("/bin/sh", "-c", "echo cannot clear $0; exit 3", "{address}"))


def _scrub_hangs(rig: Rig, gpu: Device) -> None:
    rig.with_devices(gpu_scrub=("/bin/sleep", "60"), scrub_timeout_s=1)


def _driver_refuses(rig: Rig, gpu: Device) -> None:
    def refuse(device: Device) -> None:
        raise fail(errno.EIO)

    rig.pci.drivers["nvidia"].probe = refuse


@pytest.mark.promise("devices.quarantine")
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (reset_fails, "cannot be reset: Inappropriate ioctl"),
        (_drives_the_bus, "is a bus master after its reset"),
        (_falls_off_the_bus, "does not answer after its reset"),
        (_comes_back_late, "did not come back from its reset in time: .*giving up"),
        (_scrub_fails, r"was not cleared: /bin/sh: status 3: cannot clear 0000:"),
        (_scrub_hangs, "was not cleared within 1 s"),
        (_driver_refuses, "is bound to no driver: before the job it was bound to nvidia"),
    ],
)
def test_an_unclean_device_is_quarantined_and_nothing_remains(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Rig, Device], None], words: str
) -> None:
    gpu, other = rig.gpus
    monkeypatch.setattr(vfio, "KMSG", rig.root / "kmsg")
    for device in (gpu, other):
        rig.give_to_host(device)
    journal = take(rig, gpu)
    break_it(rig, gpu)
    with pytest.raises(QuarantinedError, match=words) as caught:
        clear(rig, journal)
    assert [record.key for record in caught.value.records] == [gpu.address]
    assert read_entries(rig.layout.journals, GENERATION) == []
    assert not rig.layout.journals.joinpath(f"{GENERATION}.jsonl").exists()
    assert gpu.driver != "nvidia"  # no driver of the host touches it
    (record,) = quarantine.read_records(rig.layout)
    assert (record.key, record.device_class, record.generation) == (gpu.address, "gpu", str(GENERATION))
    assert assignment.handed_out(rig.layout).quarantined == (gpu.address,)


def test_a_device_gone_after_the_job_is_quarantined(rig: Rig) -> None:
    gpu = rig.gpus[0]
    journal = take(rig, gpu)
    rig.pci.tree.drop(f"bus/pci/devices/{gpu.address}")
    with pytest.raises(QuarantinedError, match="no longer exists"):
        clear(rig, journal)
    assert quarantined(rig) == [gpu.address]


def test_a_device_that_a_process_still_has_is_not_reset_under_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = rig.gpus[0]
    journal = take(rig, gpu)
    opened(rig, gpu)
    held = journal.entry(f"device:{gpu.address}").read(HeldDevice)
    with pytest.raises(TeardownError, match=r"process 4711 .* has .* open"):
        assignment.release(rig.layout, str(GENERATION), held, rig.host)
    assert gpu.was_reset == 0
    assert quarantined(rig) == []  # the entry stays: it is tried again
