# SPDX-License-Identifier: Apache-2.0
"""Devices are taken and released, whatever happens between; a doubtful device is not assigned."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from attribute_fs import Stuck, fixed
from device_rig import (
    GENERATION,
    Rig,
    clear,
    device_rig,
    opened,
    passthrough,
    quarantined,
    reset_fails,
    state,
    take,
)
from fake_pci_device import Device, fail

from vhpc_slurm.errors import NodeError, TeardownError, UserError
from vhpc_slurm.node.devices import aer, assignment, preflight, quarantine
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.devices.vf import PARKED_GUID
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.store.journal import read_entries

rig = device_rig


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", ""])
def test_a_gpu_comes_back_to_the_driver_it_had(rig: Rig, driver: str) -> None:
    gpu = rig.gpus[0]
    rig.give_to_host(gpu, "nvidia")
    rig.give_to_host(gpu, "")
    if driver == "vfio-pci":
        gpu.override = "vfio-pci"  # as driverctl leaves it
    if driver:
        rig.pci._attach(rig.pci.drivers[driver], gpu)
    before = state(gpu)
    journal = take(rig, gpu)
    assert state(gpu)[:2] == ("vfio-pci", "vfio-pci")
    assert not gpu.d3cold
    clear(rig, journal)
    assert state(gpu) == before
    assert gpu.was_reset == 1
    assert not rig.layout.journals.joinpath(f"{GENERATION}.jsonl").exists()


def test_the_override_is_set_and_cleared_around_the_driver(
    rig: Rig,
) -> None:
    rig.give_to_host(gpu := rig.gpus[0])
    clear(rig, take(rig, gpu))
    steps = [(path.rpartition("/")[2], text) for path, text in rig.pci.log if "power" not in path]
    assert steps == [
        ("driver_override", "vfio-pci"),
        ("d3cold_allowed", "0"),
        ("unbind", gpu.address),
        ("bind", gpu.address),
        ("reset", "1"),
        ("unbind", gpu.address),
        ("driver_override", ""),
        ("drivers_probe", gpu.address),
    ]


def test_only_trusted_reset_methods_are_enabled_in_a_job(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.with_devices(reset_methods=("bus",))
    journal = take(rig, gpu)
    assert state(gpu)[2] == ("bus",)
    clear(rig, journal)
    assert state(gpu)[2] == ("flr", "bus")


# --- before anything is changed ---------------------------------------------------------


def _iommu_off(rig: Rig, gpu: Device) -> None:
    rig.pci.regroup(gpu.address, None)


def _sibling_of_the_host(rig: Rig, gpu: Device) -> None:
    other = rig.gpus[1]
    rig.give_to_host(other)
    rig.pci.regroup(other.address, gpu.group)


def _sibling_of_another(rig: Rig, gpu: Device) -> None:
    rig.pci.regroup(rig.gpus[1].address, gpu.group)


def _no_reset(rig: Rig, gpu: Device) -> None:
    gpu.methods = ()


def _reset_not_trusted(rig: Rig, gpu: Device) -> None:
    rig.with_devices(reset_methods=("device_specific",))


def _asleep(rig: Rig, gpu: Device) -> None:
    gpu.power, gpu.locked = "D3cold", True


def _silent(rig: Rig, gpu: Device) -> None:
    gpu.config[:] = b"\xff" * 64


def _pinned(rig: Rig, gpu: Device) -> None:
    gpu.override = "pci-stub"


def _no_vfio(rig: Rig, gpu: Device) -> None:
    rig.pci.unload("vfio-pci")


def _not_allowed(rig: Rig, gpu: Device) -> None:
    rig.with_devices(allow=("10de:2331",))


def _in_quarantine(rig: Rig, gpu: Device) -> None:
    quarantine.put(rig.layout, quarantine.record(gpu.address, "gpu", "it smells"))


@pytest.mark.promise("devices.checks")
@pytest.mark.parametrize(
    ("break_it", "kind", "words"),
    [
        (_iommu_off, preflight.IommuOffError, "has no IOMMU group: the IOMMU is off"),
        (_sibling_of_the_host, preflight.NotViableError, "shares IOMMU group .* which nvidia has"),
        (_sibling_of_another, preflight.SharedGroupError, "shares IOMMU group .* which vfio-pci has"),
        (_no_reset, preflight.NoResetError, "cannot be reset"),
        (_reset_not_trusted, preflight.NoResetError, "can only be reset by flr bus"),
        (_asleep, preflight.AsleepError, "is in D3cold"),
        (_silent, preflight.SilentError, "does not answer"),
        (opened, preflight.InUseError, r"process 4711 \(qemu-system-x86\) has .*/vfio/\d+ open"),
        (_pinned, preflight.PinnedError, "is pinned to driver pci-stub"),
        (_no_vfio, preflight.NoVfioError, "the kernel has no such driver"),
        (_not_allowed, preflight.NotAllowedError, "10de:2330: devices.allow does not list it"),
        (_in_quarantine, preflight.QuarantinedDeviceError, "is quarantined"),
    ],
)
def test_each_check_has_its_error_and_changes_nothing(
    rig: Rig, break_it: Callable[[Rig, Device], None], kind: type[NodeError], words: str
) -> None:
    gpu = rig.gpus[0]
    rig.with_devices(timeout_s=1)
    break_it(rig, gpu)
    before = state(gpu)
    with pytest.raises(kind, match=words) as caught:
        take(rig, gpu)
    assert type(caught.value) is kind
    assert state(gpu) == before
    assert [path for path, _ in rig.pci.log if not path.endswith("power/control")] == []
    assert read_entries(rig.layout.journals, GENERATION) == []


def test_a_missing_function_and_a_physical_one_are_refused(rig: Rig) -> None:
    pf = rig.pfs[0]
    with pytest.raises(preflight.NotAllowedError, match="is not a virtual function"):
        take(rig, pf, role="vf")
    with pytest.raises(preflight.VfsInUseError, match="has virtual functions"):
        take(rig, pf)
    vf = rig.vfs[0]
    rig.pci._numvfs(pf, "0")
    with pytest.raises(assignment.UnfitError, match="is not there"):
        take(rig, vf, role="vf")
    rig.pci.tree.put(f"{pf.path}/net/ib0/flags", fixed("0x1003\n"))
    with pytest.raises(preflight.HostNetworkError, match="network interface ib0, which is up"):
        take(rig, pf)


def test_devices_of_one_job_may_share_a_group(rig: Rig) -> None:
    one, other = rig.gpus
    rig.pci.regroup(other.address, one.group)
    clear(rig, take(rig, one, other))
    assert one.was_reset == other.was_reset == 1


def test_a_kernel_refusal_is_quoted_and_undone(rig: Rig) -> None:
    rig.give_to_host(gpu := rig.gpus[0])

    def refuse(device: Device) -> None:
        raise fail(errno.EBUSY)

    rig.pci.drivers["vfio-pci"].probe = refuse
    with pytest.raises(NodeError, match=r"cannot be bound to vfio-pci: .*/bind: Device or resource busy"):
        take(rig, gpu)
    clear(rig)
    assert gpu.driver == "nvidia"
    assert quarantined(rig) == []


# --- a driver that hangs ----------------------------------------------------------------


@pytest.mark.promise("devices.hang")
def test_a_driver_that_keeps_its_device_quarantines_it(rig: Rig) -> None:
    rig.give_to_host(gpu := rig.gpus[0])
    rig.with_devices(timeout_s=1)

    def hang(device: Device) -> None:
        raise Stuck

    rig.pci.drivers["nvidia"].remove = hang
    journal = rig.journal()
    with pytest.raises(
        QuarantinedError, match=f"quarantined: {gpu.address}.*the kernel does not answer an access"
    ):
        AssignedDevice().take(rig.layout, journal, passthrough(gpu), rig.host)
    assert quarantined(rig) == [gpu.address]
    clear(rig, journal)  # does not touch what would never answer
    with pytest.raises(TeardownError, match="stays in quarantine"):
        assignment.clear(rig.layout, gpu.address, {}, rig.host)
    assert quarantined(rig) == [gpu.address]


@pytest.mark.promise("devices.hang")
def test_a_locked_device_cannot_hang_the_epilog(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.with_devices(timeout_s=1)
    journal = take(rig, gpu)
    gpu.locked = True
    with pytest.raises(QuarantinedError, match="does not answer an access"):
        clear(rig, journal)
    assert quarantined(rig) == [gpu.address]


def test_a_write_refused_by_the_kernel_has_its_own_number(rig: Rig) -> None:
    path = f"{preflight.device_path(f'{rig.root}/sys', rig.gpus[0].address)}/reset"
    with pytest.raises(OSError, match="Invalid argument") as caught:
        attribute.write_attribute(path, "2", 5)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, path)


# --- errors on PCI Express ---------------------------------------------------------------


@pytest.mark.promise("devices.aer")
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("fatal", "DLP", r"has reported PCI Express errors during the job: 1 fatal \(DLP 1\)"),
        ("nonfatal", "CmpltTO", r"1 nonfatal \(CmpltTO 1\)"),
    ],
)
def test_a_device_with_errors_is_held_back_until_cleared(rig: Rig, kind: str, name: str, words: str) -> None:
    gpu, other = rig.gpus
    gpu.errors[kind][name] = other.errors[kind][name] = 4  # of earlier days
    journal = take(rig, gpu, other)
    gpu.errors[kind][name] += 1
    with pytest.raises(QuarantinedError, match=words):
        clear(rig, journal)
    assert quarantined(rig) == [gpu.address]
    assert other.was_reset == 1
    assignment.clear(rig.layout, gpu.address, {}, rig.host)
    clear(rig, take(rig, gpu))  # what was counted before is no sign any more
    assert quarantined(rig) == []


def test_a_vf_that_had_errors_is_off_its_network_all_the_same(rig: Rig) -> None:
    vf = rig.vfs[0]
    journal = take(rig, vf, role="vf")
    vf.errors["fatal"]["TLP"] = 2
    with pytest.raises(QuarantinedError, match=r"2 fatal \(TLP 2\)"):
        clear(rig, journal)
    assert rig.kernel.interfaces[1].ports[0].port_guid == PARKED_GUID


def test_new_errors_are_named_also_after_a_reset(tmp_path: Path) -> None:
    (tmp_path / "aer_dev_fatal").write_text("Undefined 0\nData Link Protocol 7\nTOTAL_ERR_FATAL 7\n")
    before = aer.counts(str(tmp_path))
    assert before == {"fatal": {"Undefined": 0, "Data Link Protocol": 7}}
    assert aer.risen(before, before) == ""
    assert aer.risen(before, {"fatal": {"Undefined": 0, "Data Link Protocol": 0}}) == ""
    assert aer.risen(before, {"fatal": {"Data Link Protocol": 2}}) == "2 fatal (Data Link Protocol 2)"
    assert aer.risen({}, {}) == ""
    assert aer.counts(str(tmp_path / "none")) == {}


# --- out of quarantine ------------------------------------------------------------------


@pytest.mark.promise("devices.quarantine")
def test_a_quarantine_ends_only_with_a_passed_check(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.give_to_host(gpu)
    journal = take(rig, gpu)
    reset_fails(rig, gpu)
    with pytest.raises(QuarantinedError):
        clear(rig, journal)
    with pytest.raises(preflight.QuarantinedDeviceError):
        take(rig, gpu)
    with pytest.raises(TeardownError, match=r"stays in quarantine: .*cannot be reset"):
        assignment.clear(rig.layout, gpu.address, {}, rig.host)
    with pytest.raises(TeardownError, match=r"held by a guest of 9\.0\.00000000"):
        assignment.clear(rig.layout, gpu.address, {gpu.address: "9.0.00000000"}, rig.host)
    assert quarantined(rig) == [gpu.address]
    gpu.on_reset = lambda device: None
    assignment.clear(rig.layout, gpu.address, {}, rig.host)
    assert quarantined(rig) == []
    assert (gpu.driver, gpu.override) == ("nvidia", "")
    with pytest.raises(UserError, match="is not in quarantine"):
        assignment.clear(rig.layout, gpu.address, {}, rig.host)


def test_the_scrub_command_runs_after_the_reset(rig: Rig) -> None:
    gpu = rig.gpus[0]
    seen = rig.root / "seen"
    rig.with_devices(gpu_scrub=("/bin/sh", "-c", f'echo "$0" > {seen}', "{address}"))
    clear(rig, take(rig, gpu))
    assert seen.read_text() == f"{gpu.address}\n"
