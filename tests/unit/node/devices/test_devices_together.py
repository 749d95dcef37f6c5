# SPDX-License-Identifier: Apache-2.0
"""Devices that are released side by side."""

from __future__ import annotations

import pytest
from device_rig import Rig, clear, device_rig, quarantined, take

from vhpc_slurm.node.devices import preflight
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.resource import device
from vhpc_slurm.node.store import journal

rig = device_rig


@pytest.mark.promise("devices.parallel")
def test_gpus_are_cleared_side_by_side(rig: Rig) -> None:
    """Each waits until all others have begun: one after another none would end."""
    begun = rig.root / "begun"
    begun.mkdir()
    wait = f'touch {begun}/$0; until [ "$(ls {begun} | wc -l)" = {len(rig.gpus)} ]; do sleep 0.02; done'
    rig.with_devices(gpu_scrub=("/bin/sh", "-c", wait, "{address}"), scrub_timeout_s=20)
    journal = take(rig, *rig.gpus)
    clear(rig, journal)
    assert sorted(path.name for path in begun.iterdir()) == [gpu.address for gpu in rig.gpus]
    assert quarantined(rig) == []
    assert len(rig.gpus) > 1


def test_gpus_of_one_bus_are_cleared_one_after_another() -> None:
    found = ["0000:0b:00.0", "0000:0b:01.0", "0000:0c:00.0", "0001:0b:00.0"]

    def entry(key: str, name: str) -> journal.Entry:
        return journal.Entry(key, "device", {"device": key, "device_class": name, "state": {}})

    gpus = [entry(key, "gpu") for key in found]
    vfs = [entry(key, "vf") for key in ("0000:0d:00.1", "0000:0d:00.2")]
    together = [[entry.key for entry in lane] for lane in device.lanes([*gpus, *vfs])]
    assert together == [
        ["0000:0b:00.0", "0000:0b:01.0"],
        ["0000:0c:00.0"],
        ["0001:0b:00.0"],
        ["0000:0d:00.1"],
        ["0000:0d:00.2"],
    ]


@pytest.mark.promise("devices.parallel")
def test_one_gpu_that_hangs_keeps_no_other_from_being_cleared(rig: Rig) -> None:
    one, other = rig.gpus
    rig.with_devices(timeout_s=2)
    journal = take(rig, one, other)
    one.locked = True
    with pytest.raises(QuarantinedError, match="does not answer an access"):
        clear(rig, journal)
    assert quarantined(rig) == [one.address]
    assert other.was_reset == 1


@pytest.mark.promise("devices.parallel")
def test_questions_to_one_device_share_their_deadline(rig: Rig) -> None:
    gpu = rig.gpus[0]
    path = f"{preflight.device_path(f'{rig.root}/sys', gpu.address)}/driver_override"
    gpu.locked = True
    with pytest.raises(attribute.StuckError):
        attribute.read_attribute(path, attribute.Until(0))
    gpu.locked = False
    assert attribute.read_attribute(path, attribute.Until(20)) == "(null)"
