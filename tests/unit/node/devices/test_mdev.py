# SPDX-License-Identifier: Apache-2.0
"""Mediated devices: created for a job as the GPU map says, removed after it, never shared."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from attribute_fs import fixed
from device_rig import GENERATION, Rig, clear, machine, quarantined
from fake_mdev import BUS, LARGE, TYPE, FakeMdev
from job_devices import another, gpus, kills_of, lease, prepare

from vhpc_slurm.device import mdev_key
from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.node.devices import mdev
from vhpc_slurm.node.devices.device_class import DeviceClass
from vhpc_slurm.node.devices.mdev import MdevExistsError, NoInstanceError, NoMdevTypeError
from vhpc_slurm.node.devices.preflight import CheckInput, DeviceAbsentError, DeviceError
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.journal import Entry, read_entries


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A node with a GPU for two mdevs, which the map lists, and a third one too much."""
    with machine(tmp_path, gpu_bar=1 << 36, cores=6) as found:
        gpu = found.gpus[0]
        found.give_to_host(gpu)
        (tmp_path / "gpu.map").write_text(
            "".join(f"{index} {gpu.address} mdev={TYPE}\n" for index in range(3))
        )
        yield found


@pytest.fixture
def kernel(rig: Rig) -> FakeMdev:
    return FakeMdev(rig, rig.gpus[0])


def key(rig: Rig, number: int = 0) -> str:
    return mdev_key(rig.gpus[0].address, number)


@pytest.mark.promise("devices.mdev")
def test_jobs_have_an_mdev_each(rig: Rig, kernel: FakeMdev) -> None:
    _, journal = prepare(rig, lease(gpus(0)))
    _, others = prepare(rig, another(lease(gpus(1)), 1))
    assert kernel.made == {key(rig): TYPE, key(rig, 1): TYPE}
    with pytest.raises(FabricError, match=f"device {key(rig)} of n1 is held by a guest of {GENERATION}"):
        prepare(rig, another(lease(gpus(0)), 2))
    clear(rig, journal)
    assert kernel.made == {key(rig, 1): TYPE}
    assert registry.release_all(rig.layout, others) == []
    assert kernel.made == {}
    assert quarantined(rig) == []


def test_the_journal_has_the_uuid_before_the_kernel(
    rig: Rig, kernel: FakeMdev, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = attribute.write_attribute, []

    def write(path: str, text: str, timeout_s: float | attribute.Until) -> None:
        if path.endswith("/create"):
            seen.append((text, [one.data["device"] for one in entries(rig)]))
        real(path, text, timeout_s)

    monkeypatch.setattr(attribute, "write_attribute", write)
    prepare(rig, lease(gpus(0, 1)))
    one, two = key(rig), key(rig, 1)
    assert seen == [(one, [one]), (two, [one, two])]


def entries(rig: Rig) -> list[Entry]:
    return [one for one in read_entries(rig.layout.journals, GENERATION) if one.kind == "device"]


def no_driver(rig: Rig, kernel: FakeMdev) -> None:
    rig.pci.tree.drop(f"class/mdev_bus/{rig.gpus[0].address}")


def other_types(rig: Rig, kernel: FakeMdev) -> None:
    rig.pci.tree.drop(f"{rig.gpus[0].path}/mdev_supported_types/{TYPE}")


def other_api(rig: Rig, kernel: FakeMdev) -> None:
    rig.pci.tree.put(f"{rig.gpus[0].path}/mdev_supported_types/{TYPE}/device_api", fixed("vfio-ccw\n"))


def in_use(rig: Rig, kernel: FakeMdev) -> None:
    kernel.create("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001")  # of another program


def left_over(rig: Rig, kernel: FakeMdev) -> None:
    kernel.create(key(rig))


@pytest.mark.promise("devices.checks")
@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (no_driver, NoMdevTypeError, "offers no mediated devices: .*/class/mdev_bus/.* does not exist"),
        (other_types, NoMdevTypeError, f"no mediated devices of type {TYPE}: its types are {LARGE} "),
        (other_api, NoMdevTypeError, "have the API vfio-ccw, not vfio-pci"),
        (in_use, NoInstanceError, f"2 mediated devices of type {TYPE} .*: available_instances is 1"),
        (left_over, MdevExistsError, "exists already: no job has created it"),
    ],
)
def test_what_the_node_does_not_offer_is_found_before_any_change(
    rig: Rig, kernel: FakeMdev, change: object, kind: type[DeviceError], says: str
) -> None:
    assert callable(change)
    change(rig, kernel)
    made = dict(kernel.made)
    with pytest.raises(kind, match=says):
        prepare(rig, lease(gpus(0, 1)))
    assert kernel.made == made


def test_an_absent_parent_is_named(rig: Rig, kernel: FakeMdev) -> None:
    case = CheckInput(str(rig.root / "sys"), rig.layout.config.devices, frozenset(), {})
    found: DeviceClass = mdev.Mdev()
    with pytest.raises(DeviceAbsentError, match=r"0000:77:00.0, the parent of mediated device"):
        found.check(case, mdev_key("0000:77:00.0", 0))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EUSERS, errno.EINVAL, errno.EBUSY])
def test_a_refusal_of_the_second_mdev_leaves_nothing(
    rig: Rig, kernel: FakeMdev, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kernel._create
    path = f"{rig.gpus[0].path}/mdev_supported_types/{TYPE}"

    def once(text: str) -> None:
        real(TYPE, 1, text)
        kernel.refuse = number

    create = rig.pci.tree.folder(path).entries["create"]
    monkeypatch.setattr(create, "store", once)
    with pytest.raises(NodeError, match=f"{key(rig, 1)} of type {TYPE} cannot be created: .*/create: "):
        prepare(rig, lease(gpus(0, 1)))
    assert [*kernel.made] == [key(rig)]
    kernel.refuse = 0
    clear(rig)
    assert kernel.made == {}
    assert quarantined(rig) == []


def test_an_mdev_that_a_process_has_open_is_not_removed(rig: Rig, kernel: FakeMdev) -> None:
    """The kernel would wait for the process."""
    _, journal = prepare(rig, lease(gpus(0)))
    fds = rig.root / "proc/4711/fd"
    fds.mkdir(parents=True)
    (rig.root / "proc/4711/comm").write_text("qemu-system-x86\n")
    (fds / "9").symlink_to(f"{rig.host.dev}/vfio/{kernel.group(key(rig))}")
    held = entries(rig)[0].data
    with pytest.raises(TeardownError, match=r"cannot be released: .* process 4711 \(qemu-system-x86\)"):
        mdev.Mdev().release(rig.layout, key(rig), held["state"], rig.host)
    assert [*kernel.made] == [key(rig)]
    (fds / "9").unlink()
    clear(rig, journal)
    assert kernel.made == {}


@pytest.mark.promise("devices.hang")
def test_a_removal_that_hangs_is_a_quarantine(rig: Rig, kernel: FakeMdev) -> None:
    rig.with_devices(timeout_s=1)
    _, journal = prepare(rig, lease(gpus(0)))
    kernel.opened.add(key(rig))
    with pytest.raises(QuarantinedError, match="the kernel does not answer"):
        clear(rig, journal)
    assert quarantined(rig) == [key(rig)]


@pytest.mark.promise("devices.killed")
def test_a_kill_at_any_step_of_a_job_leaves_no_mdev(
    rig: Rig, kernel: FakeMdev, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for step in kills_of(rig, lease(gpus(0, 1)), monkeypatch):
        seen.append(len(kernel.made))
        clear(rig)
        assert kernel.made == {}, f"killed at step {step}"
        assert quarantined(rig) == []
    assert {*seen} == {0, 1, 2}


@pytest.mark.promise("devices.mdev")
def test_an_mdev_without_a_journal_is_an_orphan(rig: Rig, kernel: FakeMdev) -> None:
    """Also one that the map no longer has; an mdev of another program is not vhpc's."""
    foreign = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    kernel.create(foreign)
    kernel.create(key(rig, 1))
    (rig.root / "gpu.map").write_text("")
    found = [one for one in registry.orphans(rig.layout) if "mediated" in one.what]
    assert [one.what for one in found] == [
        f"mediated device {key(rig, 1)} belongs to no job but is not parked: it exists"
    ]
    found[0].repair()
    assert [*kernel.made] == [foreign]
    assert [one for one in registry.orphans(rig.layout) if "mediated" in one.what] == []


def test_a_job_after_a_reboot_finds_nothing_to_remove(rig: Rig, kernel: FakeMdev) -> None:
    """mdevs do not survive a reboot, and the driver may not be loaded yet."""
    _, journal = prepare(rig, lease(gpus(0)))
    gpu = rig.gpus[0]
    for path in (
        f"{BUS}/{key(rig)}",
        f"{gpu.path}/{key(rig)}",
        f"{gpu.path}/mdev_supported_types",
        "class/mdev_bus",
    ):
        rig.pci.tree.drop(path)
    clear(rig, journal)
    assert quarantined(rig) == []
