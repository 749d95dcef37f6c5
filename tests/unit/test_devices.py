# SPDX-License-Identifier: Apache-2.0
"""Devices are taken and given back, whatever happens between; what is in doubt goes to nobody."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from attribute_fs import Stuck, fixed
from device_rig import GENERATION, Rig, machine, passthrough
from fake_pci import BUS_MASTER, COMMAND, Device, fail

from vhpc_slurm.errors import NodeError, TeardownError, UserError
from vhpc_slurm.node import resources, teardown
from vhpc_slurm.node.devices import aer, assignment, preflight, quarantine, vfio
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.devices.vf import PARKED_GUID
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Journal, read_entries
from vhpc_slurm.node.store.timeline import Recorder


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found


def take(rig: Rig, *found: Device, role: str = "gpu") -> Journal:
    journal = rig.journal()
    assignment.acquire(rig.layout, journal, passthrough(*found, role=role), rig.host)
    return journal


def clear(rig: Rig, journal: Journal | None = None) -> None:
    """What the Epilog does."""
    if journal is not None:
        journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")


def state(device: Device) -> tuple[str, str, tuple[str, ...]]:
    return device.driver, device.override, device.methods


def quarantined(rig: Rig) -> list[str]:
    return [record.address for record in quarantine.read_records(rig.layout)]


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


def _opened(rig: Rig, gpu: Device) -> None:
    fds = rig.root / "proc/4711/fd"
    fds.mkdir(parents=True)
    (rig.root / "proc/4711/comm").write_text("qemu-system-x86\n")
    (fds / "9").symlink_to(f"{rig.host.dev}/vfio/{gpu.group}")


def _pinned(rig: Rig, gpu: Device) -> None:
    gpu.override = "pci-stub"


def _no_vfio(rig: Rig, gpu: Device) -> None:
    rig.pci.unload("vfio-pci")


def _not_allowed(rig: Rig, gpu: Device) -> None:
    rig.with_devices(allow=("10de:2331",))


def _in_quarantine(rig: Rig, gpu: Device) -> None:
    quarantine.put(rig.layout, quarantine.record(gpu.address, "gpu", "it smells"))


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
        (_opened, preflight.InUseError, r"process 4711 \(qemu-system-x86\) has .*/vfio/\d+ open"),
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
        assignment.acquire(rig.layout, journal, passthrough(gpu), rig.host)
    assert quarantined(rig) == [gpu.address]
    clear(rig, journal)  # does not touch what would never answer
    with pytest.raises(TeardownError, match="stays in quarantine"):
        assignment.clear(rig.layout, gpu.address, {}, rig.host)
    assert quarantined(rig) == [gpu.address]


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


# --- doubts -----------------------------------------------------------------------------


def _reset_fails(rig: Rig, gpu: Device) -> None:
    def refuse(device: Device) -> None:
        raise fail(errno.ENOTTY)

    gpu.on_reset = refuse


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


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (_reset_fails, "cannot be reset: Inappropriate ioctl"),
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
    assert [record.address for record in caught.value.records] == [gpu.address]
    assert read_entries(rig.layout.journals, GENERATION) == []
    assert not rig.layout.journals.joinpath(f"{GENERATION}.jsonl").exists()
    assert gpu.driver != "nvidia"  # no driver of the host touches it
    (record,) = quarantine.read_records(rig.layout)
    assert (record.address, record.role, record.generation) == (gpu.address, "gpu", str(GENERATION))
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
    _opened(rig, gpu)
    entry = journal.entry(f"device:{gpu.address}")
    with pytest.raises(TeardownError, match=r"process 4711 .* has .* open"):
        assignment.release(rig.layout, str(GENERATION), entry, rig.host)
    assert gpu.was_reset == 0
    assert quarantined(rig) == []  # the entry stays: it is tried again


# --- errors on PCI Express ---------------------------------------------------------------


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


def test_errors_have_names_and_a_returned_function_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "aer_dev_fatal").write_text("Undefined 0\nData Link Protocol 7\nTOTAL_ERR_FATAL 7\n")
    before = aer.counts(str(tmp_path))
    assert before == {"fatal": {"Undefined": 0, "Data Link Protocol": 7}}
    assert aer.risen(before, before) == ""
    assert aer.risen(before, {"fatal": {"Undefined": 0, "Data Link Protocol": 0}}) == ""
    assert aer.risen(before, {"fatal": {"Data Link Protocol": 2}}) == "2 fatal (Data Link Protocol 2)"
    assert aer.risen({}, {}) == ""
    assert aer.counts(str(tmp_path / "none")) == {}


# --- out of quarantine ------------------------------------------------------------------


def test_a_quarantine_ends_only_with_a_passed_check(rig: Rig) -> None:
    gpu = rig.gpus[0]
    rig.give_to_host(gpu)
    journal = take(rig, gpu)
    _reset_fails(rig, gpu)
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


# --- side by side -----------------------------------------------------------------------


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
    gpus = [journal.Entry(address, "device", {"address": address, "role": "gpu"}) for address in found]
    vfs = [
        journal.Entry(address, "device", {"address": address, "role": "vf"})
        for address in ("0000:0d:00.1", "0000:0d:00.2")
    ]
    together = [[entry.key for entry in lane] for lane in assignment.lanes([*gpus, *vfs])]
    assert together == [
        ["0000:0b:00.0", "0000:0b:01.0"],
        ["0000:0c:00.0"],
        ["0001:0b:00.0"],
        ["0000:0d:00.1"],
        ["0000:0d:00.2"],
    ]


def test_one_gpu_that_hangs_keeps_no_other_from_being_cleared(rig: Rig) -> None:
    one, other = rig.gpus
    rig.with_devices(timeout_s=2)
    journal = take(rig, one, other)
    one.locked = True
    with pytest.raises(QuarantinedError, match="does not answer an access"):
        clear(rig, journal)
    assert quarantined(rig) == [one.address]
    assert other.was_reset == 1


def test_questions_to_one_device_share_their_deadline(rig: Rig) -> None:
    path = f"{preflight.device_path(f'{rig.root}/sys', rig.gpus[0].address)}/driver_override"
    with pytest.raises(attribute.StuckError):
        attribute.read_attribute(path, attribute.Until(0))
    assert attribute.read_attribute(path, attribute.Until(20)) == "(null)"


# --- kill -9 ----------------------------------------------------------------------------


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
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    raise AssertionError("the child does not end")


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
        journal.os = _Killing(at)  # type: ignore[assignment, attr-defined]
        ours = rig.journal()
        vf = rig.vfs[0]
        taken = [*passthrough(*rig.gpus), *passthrough(vf, role="vf")]
        assignment.acquire(rig.layout, ours, taken, rig.host)
        resources.release_all(rig.layout, ours)

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
        assignment.acquire(rig.layout, journal, passthrough(gpu), rig.host)
        resources.release_all(rig.layout, journal)

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
    entry = journal.entry(f"device:{gpu.address}")
    for _ in range(3):
        assignment.release(rig.layout, str(GENERATION), entry)
        assert state(gpu) == before
    assert gpu.was_reset == 1


def test_teardown_takes_the_time_of_a_stage(rig: Rig) -> None:
    clear(rig, take(rig, rig.gpus[0]))
    stages = Recorder(rig.layout.timeline(GENERATION), GENERATION, "n1").timeline().stages
    assert "release" in [stage.name for stage in stages]
