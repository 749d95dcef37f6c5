# SPDX-License-Identifier: Apache-2.0
"""The fake sysfs answers as the kernel does: what the tests of drivers stand on.

Expected errors are those of Linux 6.12's code, see ``fake_pci``; the write is a
real one.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from device_rig import Rig, machine

from vhpc_slurm.node.host import pci


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found


def echo(rig: Rig, text: str, path: str) -> int:
    """Write a line; returns the number of the error, 0 for success."""
    fd = os.open(rig.root / "sys/bus/pci" / path, os.O_WRONLY)
    try:
        os.write(fd, f"{text}\n".encode())
    except OSError as err:
        return err.errno or -1
    finally:
        os.close(fd)
    return 0


def test_the_inventory_reads_the_mounted_tree_as_the_one_on_disk(rig: Rig) -> None:
    live, _ = pci.read_functions(f"{rig.root}/sys", {0: 3}, 3)
    on_disk, _ = pci.read_functions(f"{rig.root}/written/sys", {0: 3}, 3)
    # the rig adds an interface of a partition
    assert [replace(one, names=()) for one in live] == [replace(one, names=()) for one in on_disk]
    assert len(live) == 2 + 3 + 2 + 1 + 4


def test_a_function_goes_to_the_driver_that_its_override_names(rig: Rig) -> None:
    rig.give_to_host(gpu := rig.gpus[0])
    at = f"devices/{gpu.address}"
    assert echo(rig, gpu.address, "drivers/vfio-pci/bind") == errno.ENODEV  # no match without override
    assert echo(rig, "vfio-pci", f"{at}/driver_override") == 0
    assert echo(rig, gpu.address, "drivers/vfio-pci/bind") == errno.EBUSY
    assert echo(rig, gpu.address, "drivers/pcieport/unbind") == errno.ENODEV
    assert echo(rig, gpu.address, "drivers/nvidia/unbind") == 0
    assert echo(rig, gpu.address, "drivers/nvidia/bind") == errno.ENODEV
    assert echo(rig, gpu.address, "drivers_probe") == 0
    assert (rig.root / f"sys/bus/pci/{at}/driver").readlink().name == "vfio-pci"
    assert echo(rig, "0000:ff:00.0", "drivers_probe") == errno.ENODEV
    echo(rig, "", f"{at}/driver_override")
    assert (rig.root / f"sys/bus/pci/{at}/driver_override").read_text() == "(null)\n"


def test_an_id_can_be_added_to_a_driver_once(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.give_to_host(gpu, "")
    assert echo(rig, "10de", "drivers/vfio-pci/new_id") == errno.EINVAL
    assert echo(rig, "10de 2330", "drivers/vfio-pci/new_id") == 0
    assert gpu.driver == "vfio-pci"
    assert echo(rig, "10de 2330", "drivers/vfio-pci/new_id") == errno.EEXIST
    assert echo(rig, "10de 2330", "drivers/vfio-pci/remove_id") == 0
    assert echo(rig, "10de 2330", "drivers/vfio-pci/remove_id") == errno.ENODEV


def test_only_a_device_with_a_group_and_without_vfs_goes_to_vfio(rig: Rig) -> None:
    pf, gpu = rig.pfs[0], rig.gpus[0]
    rig.give_to_host(pf, "")
    echo(rig, "vfio-pci", f"devices/{pf.address}/driver_override")
    assert echo(rig, pf.address, "drivers/vfio-pci/bind") == errno.EBUSY
    rig.give_to_host(gpu, "")
    rig.pci.regroup(gpu.address, None)
    echo(rig, "vfio-pci", f"devices/{gpu.address}/driver_override")
    assert echo(rig, gpu.address, "drivers/vfio-pci/bind") == errno.EINVAL


def test_a_reset_takes_a_one_and_a_method(rig: Rig) -> None:
    gpu = rig.gpus[0]
    at = f"devices/{gpu.address}"
    assert echo(rig, "0", f"{at}/reset") == errno.EINVAL
    assert echo(rig, "1", f"{at}/reset") == 0
    assert echo(rig, "acpi", f"{at}/reset_method") == errno.EINVAL
    assert echo(rig, "bus", f"{at}/reset_method") == 0
    assert (rig.root / f"sys/bus/pci/{at}/reset_method").read_text() == "bus\n"
    assert echo(rig, "", f"{at}/reset_method") == 0
    assert echo(rig, "1", f"{at}/reset") == errno.ENOTTY
    assert echo(rig, "default", f"{at}/reset_method") == 0
    assert (rig.root / f"sys/bus/pci/{at}/reset_method").read_text() == "flr bus\n"


def test_the_number_of_vfs_goes_through_zero(rig: Rig) -> None:
    pf = rig.pfs[0]
    at = f"devices/{pf.address}"
    assert echo(rig, "99", f"{at}/sriov_numvfs") == errno.ERANGE
    assert echo(rig, "many", f"{at}/sriov_numvfs") == errno.EINVAL
    assert echo(rig, "4", f"{at}/sriov_numvfs") == 0  # as it is
    assert echo(rig, "8", f"{at}/sriov_numvfs") == errno.EBUSY
    assert echo(rig, "0", f"{at}/sriov_drivers_autoprobe") == 0
    assert echo(rig, "0", f"{at}/sriov_numvfs") == 0
    assert rig.vfs == []
    assert not (rig.root / f"sys/bus/pci/{at}/virtfn0").exists()
    assert echo(rig, "2", f"{at}/sriov_numvfs") == 0
    assert [vf.driver for vf in rig.vfs] == ["", ""]
    echo(rig, "0", f"{at}/sriov_numvfs")
    rig.give_to_host(pf, "")
    assert echo(rig, "2", f"{at}/sriov_numvfs") == errno.ENOENT


def test_a_group_opens_only_without_host_drivers(rig: Rig) -> None:
    one, other = rig.gpus
    rig.pci.regroup(other.address, one.group)
    rig.give_to_host(other)
    with pytest.raises(OSError, match="busy"):
        rig.pci.open_group(one.group)
    rig.give_to_host(other, "")
    rig.pci.open_group(one.group)


def test_unbinding_a_device_in_use_ignores_sigkill(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.pci.open_group(gpu.group)
    child = subprocess.Popen(
        ["sh", "-c", f"echo {gpu.address} > {rig.root}/sys/bus/pci/drivers/vfio-pci/unbind"],
        stderr=subprocess.DEVNULL,
    )
    while not gpu.locked:
        time.sleep(0.01)
    child.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    rig.fs.let_go()
    child.wait(60)


# Answers of Linux 6.12.107 (Debian 13) to the same writes, on an 82576 of QEMU 10 that had three functions.
SAID = [
    ("devices/{pf}/sriov_numvfs", "5", errno.EBUSY),
    ("devices/{pf}/sriov_drivers_autoprobe", "x", errno.EINVAL),
    ("devices/{vf}/reset", "2", errno.EINVAL),
    ("devices/{vf}/reset_method", "acpi", errno.EINVAL),
    ("devices/{vf}/reset_method", "", 0),
    ("devices/{vf}/reset", "1", errno.ENOTTY),
    ("devices/{vf}/driver_override", "x" * 4094, errno.EINVAL),
    ("drivers/vfio-pci/bind", "{vf}", errno.ENODEV),
    ("drivers/vfio-pci/new_id", "8086", errno.EINVAL),
    ("drivers/vfio-pci/remove_id", "8086 10ca", errno.ENODEV),
    ("drivers_probe", "0000:ff:00.0", errno.ENODEV),
]


@pytest.mark.promise("devices.fake")
def test_the_fake_has_the_messages_of_a_kernel(rig: Rig) -> None:
    names = {"pf": rig.pfs[0].address, "vf": rig.vfs[1].address}
    rig.give_to_host(rig.vfs[1], "")
    said = [(path, text, echo(rig, text.format(**names), path.format(**names))) for path, text, _ in SAID]
    assert said == SAID
