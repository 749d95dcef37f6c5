# SPDX-License-Identifier: Apache-2.0
"""vGPUs without mdev: a virtual function gets a type for a job, and loses it after the job."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_rig import GENERATION, Rig, clear, machine, opened, passthrough, quarantined
from fake_mdev import MIG, WHOLE, FakeVgpus
from job_devices import another, gpus, kills_of, lease, prepare

from vhpc_slurm.device import HostdevSource
from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.devices.preflight import DeviceError, InUseError, NotAllowedError, NotViableError
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.devices.vgpu import NoVgpuDriverError, NoVgpuTypeError, VgpuExistsError
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.journal import read_entries


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path, gpu_bar=1 << 36, cores=4, vfs=0) as found:
        yield found


@pytest.fixture
def kernel(rig: Rig) -> FakeVgpus:
    """The second GPU has two virtual functions; the map names a type by its name and by its number."""
    found = FakeVgpus(rig, rig.gpus[1])
    one, two = found.vfs
    (rig.root / "gpu.map").write_text(
        f"0 {rig.gpus[0].address}\n1 {one.address} vgpu=H200X-1-18C\n2 {two.address} vgpu={MIG[0]}\n"
    )
    return found


@pytest.mark.promise("devices.vgpu")
def test_a_job_gets_a_vgpu_that_stays_with_its_driver(rig: Rig, kernel: FakeVgpus) -> None:
    one, two = kernel.vfs
    plan, journal = prepare(rig, lease(gpus(0, 1)))
    found = {device.key: device for device in plan.guests[0].devices}
    assert found[one.address].device_class == "vgpu"
    assert found[rig.gpus[0].address].device_class == "gpu"
    assert found[one.address].traits.source(one.address) == HostdevSource(
        "pci",
        (("managed", "no"),),
        tuple(zip(("domain", "bus", "slot", "function"), hexadecimal(one.address), strict=True)),
    )
    assert kernel.now == {one.address: MIG[0], two.address: "0"}
    assert (one.driver, one.override, one.was_reset) == ("nvidia", "", 0)
    _, others = prepare(rig, another(lease(gpus(2)), 1))
    assert [*kernel.now.values()] == [MIG[0], MIG[0]]
    clear(rig, journal)
    assert kernel.now == {one.address: "0", two.address: MIG[0]}
    assert registry.release_all(rig.layout, others) == []
    assert {*kernel.now.values()} == {"0"}
    assert one.driver == "nvidia"
    assert quarantined(rig) == []


def hexadecimal(address: str) -> list[str]:
    """As libvirt's PCI addresses are written: 0xDDDD, 0xBB, 0xSS, 0xF."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return [f"0x{part}" for part in (domain, bus, slot, function)]


def no_vgpu_driver(rig: Rig, kernel: FakeVgpus) -> None:
    rig.pci.tree.drop(f"{kernel.vfs[0].path}/nvidia")
    rig.give_to_host(kernel.vfs[0], "nouveau")


def no_instance(rig: Rig, kernel: FakeVgpus) -> None:
    kernel.instances = 0


def unknown_type(rig: Rig, kernel: FakeVgpus) -> None:
    path = rig.root / "gpu.map"
    path.write_text(path.read_text().replace("H200X-1-18C", "H200X-1-35C"))


def no_type(rig: Rig, kernel: FakeVgpus) -> None:
    path = rig.root / "gpu.map"
    path.write_text(path.read_text().replace(" vgpu=H200X-1-18C", ""))


def of_another(rig: Rig, kernel: FakeVgpus) -> None:
    kernel.set(kernel.vfs[0].address, MIG[0])


def in_use(rig: Rig, kernel: FakeVgpus) -> None:
    opened(rig, kernel.vfs[0])


def shared_group(rig: Rig, kernel: FakeVgpus) -> None:
    rig.pci.regroup(kernel.vfs[0].address, rig.gpus[1].group)


def not_allowed(rig: Rig, kernel: FakeVgpus) -> None:
    rig.with_devices(allow=("15b3:101e",))


@pytest.mark.promise("devices.checks")
@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (no_vgpu_driver, NoVgpuDriverError, "nouveau is bound to it, and it has no current_vgpu_type"),
        (no_instance, NoVgpuTypeError, "of type H200X-1-18C: no type is creatable now"),
        (unknown_type, NoVgpuTypeError, "of type H200X-1-35C: creatable now: H200X-1-18C, H200X-141C"),
        (no_type, NoVgpuTypeError, "has no vGPU type: the GPU map names none"),
        (of_another, VgpuExistsError, "has vGPU type 1414 already"),
        (in_use, InUseError, r"process 4711 \(qemu-system-x86\) has"),
        (shared_group, NotViableError, "shares IOMMU group .* which nvidia has"),
        (not_allowed, NotAllowedError, "devices.allow does not list it"),
    ],
)
def test_each_reason_against_a_vgpu_is_found_before_any_change(
    rig: Rig, kernel: FakeVgpus, change: object, kind: type[DeviceError], says: str
) -> None:
    assert callable(change)
    change(rig, kernel)
    now = dict(kernel.now)
    with pytest.raises(kind, match=says):
        assignment.check(rig.layout, passthrough(kernel.vfs[0], role="vgpu"), rig.host)
    assert kernel.now == now


def test_a_whole_gpu_is_not_given_where_the_map_names_a_type(rig: Rig, kernel: FakeVgpus) -> None:
    (rig.root / "gpu.map").write_text(f"0 {rig.gpus[0].address} vgpu=H200X-1-18C\n")
    with pytest.raises(NotAllowedError, match="is not a virtual function of an NVIDIA GPU"):
        prepare(rig, lease(gpus(0)))
    assert rig.gpus[0].override == ""


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC, errno.EBUSY])
def test_a_refusal_of_the_driver_leaves_nothing(rig: Rig, kernel: FakeVgpus, number: int) -> None:
    kernel.refuse = number
    with pytest.raises(NodeError, match=r"cannot become a vGPU of type 1414: .*/current_vgpu_type: "):
        prepare(rig, lease(gpus(1)))
    clear(rig)
    assert quarantined(rig) == []
    assert read_entries(rig.layout.journals, GENERATION) == []


@pytest.mark.promise("devices.vgpu")
def test_a_type_that_is_not_read_back_starts_no_guest(rig: Rig, kernel: FakeVgpus) -> None:
    kernel.deaf = True
    with pytest.raises(NodeError, match="has vGPU type 0: 1414 was written"):
        prepare(rig, lease(gpus(1)))
    kernel.deaf = False
    clear(rig)
    assert quarantined(rig) == []


@pytest.mark.promise("devices.quarantine")
def test_a_vgpu_that_does_not_end_is_quarantined(rig: Rig, kernel: FakeVgpus) -> None:
    vf = kernel.vfs[0]
    _, journal = prepare(rig, lease(gpus(1)))
    kernel.deaf = True
    with pytest.raises(QuarantinedError, match="still has vGPU type 1414: 0 was written"):
        clear(rig, journal)
    assert quarantined(rig) == [vf.address]
    with pytest.raises(TeardownError, match="stays in quarantine"):
        assignment.clear(rig.layout, vf.address, {}, rig.host)
    kernel.deaf = False
    assignment.clear(rig.layout, vf.address, {}, rig.host)
    assert kernel.now[vf.address] == "0"
    assert quarantined(rig) == []


@pytest.mark.promise("devices.aer")
def test_errors_of_a_vgpu_during_the_job_are_a_quarantine(rig: Rig, kernel: FakeVgpus) -> None:
    _, journal = prepare(rig, lease(gpus(1)))
    kernel.vfs[0].errors["fatal"]["TLP"] = 1
    with pytest.raises(QuarantinedError, match="has reported PCI Express errors during the job"):
        clear(rig, journal)


@pytest.mark.promise("devices.killed")
def test_a_kill_at_any_step_of_a_job_leaves_no_vgpu(
    rig: Rig, kernel: FakeVgpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for step in kills_of(rig, lease(gpus(1, 2)), monkeypatch):
        seen.append(sum(kind != "0" for kind in kernel.now.values()))
        clear(rig)
        assert {*kernel.now.values()} == {"0"}, f"killed at step {step}"
        assert quarantined(rig) == []
    assert {*seen} == {0, 1, 2}


def test_a_vgpu_without_a_journal_is_an_orphan(rig: Rig, kernel: FakeVgpus) -> None:
    kernel.set(kernel.vfs[1].address, WHOLE[0])
    found = [one for one in registry.orphans(rig.layout) if "vGPU" in one.what]
    assert [one.what for one in found] == [
        f"vGPU {kernel.vfs[1].address} belongs to no job but is not parked: it has vGPU type 1428"
    ]
    found[0].repair()
    assert {*kernel.now.values()} == {"0"}
