# SPDX-License-Identifier: Apache-2.0
"""A device class needs no code outside of itself: mdevs go from the plan to the release."""

from __future__ import annotations

import ast
import errno
import json
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from device_rig import GENERATION, Rig, clear, machine
from domain_cases import spec
from fake_mdev import TYPE, FakeMdev
from job_devices import gpus, host, lease, prepare, vfs

from vhpc_slurm import device
from vhpc_slurm.cli import context
from vhpc_slurm.cli.main import main
from vhpc_slurm.controller.api.status_messages import DeviceWire
from vhpc_slurm.device import MdevTraits, NodeDevices, VirtualFunctionTraits, key_order
from vhpc_slurm.domain.render import render
from vhpc_slurm.errors import NodeError
from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.hooks import statefields
from vhpc_slurm.hooks.told import Told
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.finding import NodeFinding
from vhpc_slurm.node.resource import registry, reservations
from vhpc_slurm.node.store.journal import read_entries
from vhpc_slurm.placement.devices import pool
from vhpc_slurm.reconcile import drain_policy
from vhpc_slurm.slurm.port import Slurm

PACKAGE = Path(__file__).parents[4] / "python" / "vhpc_slurm"
UUID = "76687063-0000-8000-8000-000000000c00"  # "vhpc", mdev 0 of 0000:0c:00.0


@pytest.fixture
def registered() -> Iterator[None]:
    """The registrations of a test are removed after it."""
    traits = list(device.TRAITS)
    yield
    device.TRAITS[:] = traits


@pytest.fixture
def rig(tmp_path: Path, registered: None) -> Iterator[Rig]:
    """A node whose second GPU has mediated devices; the GPU of index 1 is one of these."""
    with machine(tmp_path, gpu_bar=1 << 36) as found:
        one, other = found.gpus
        found.give_to_host(other)
        (tmp_path / "gpu.map").write_text(f"0 {one.address}\n1 {other.address} mdev={TYPE}\n")
        yield found


@pytest.fixture
def kernel(rig: Rig) -> FakeMdev:
    return FakeMdev(rig, rig.gpus[1])


def test_a_job_gets_a_device_of_a_registered_class(rig: Rig, kernel: FakeMdev) -> None:
    plan, journal = prepare(rig, lease(gpus(0, 1), vfs(1)))
    (guest,) = plan.guests
    found = {one.device_class: one for one in guest.devices}
    assert found["mdev"].key == UUID
    assert found["mdev"].function == rig.gpus[1].address
    assert found["mdev"].root_complex == found["gpu"].root_complex
    assert kernel.made == {UUID: TYPE}
    assert statefields.gpu_indexes(rig.layout, plan) == [[0, 1]]
    # only the whole GPU has BARs that take a guest long to set up
    assert guest.boot_timeout_s == rig.layout.config.guests.boot_timeout_s + 60
    (entry,) = (one for one in read_entries(rig.layout.journals, GENERATION) if UUID in one.key)
    assert entry.data == {
        "device": UUID,
        "device_class": "mdev",
        "state": {"type": TYPE},
    }
    assert UUID in reservations.live(rig.layout)[0].devices
    told = Told(GENERATION, "n1")
    told.place(host(rig), plan)
    report = told.report()
    assert (UUID, "mdev") in report.guests[0].devices
    assert report.host is not None
    assert rig.gpus[1].address in {function.address for function in report.host.pci}
    clear(rig, journal)
    assert kernel.made == {}
    assert read_entries(rig.layout.journals, GENERATION) == []


def test_its_class_says_how_it_is_in_the_domain(rig: Rig, kernel: FakeMdev, tmp_path: Path) -> None:
    plan, _ = prepare(rig, lease(gpus(1)))
    text = render(spec(plan.guests[0]))
    (hostdev,) = ET.fromstring(text).findall("devices/hostdev")
    (port,) = (one.port for one in plan.guests[0].devices)
    assert hostdev.attrib == {"mode": "subsystem", "type": "mdev", "model": "vfio-pci"}
    assert [(one.tag, one.attrib) for one in hostdev.findall("source/*")] == [("address", {"uuid": UUID})]
    assert [one.tag for one in hostdev] == ["source", "address"]
    address = hostdev.find("address")
    assert address is not None
    assert int(address.attrib["bus"], 16) == port
    if shutil.which("virt-xml-validate"):
        (tmp_path / "domain.xml").write_text(text)
        subprocess.run(["virt-xml-validate", tmp_path / "domain.xml", "domain"], check=True)


def test_a_kernel_refusal_leaves_nothing_behind(rig: Rig, kernel: FakeMdev) -> None:
    kernel.left = 0
    with pytest.raises(NodeError, match=f"1 mediated devices of type {TYPE} cannot be created at"):
        prepare(rig, lease(gpus(1)))
    kernel.left, kernel.refuse = 1, errno.EBUSY
    with pytest.raises(NodeError, match=f"device {UUID} of type {TYPE} cannot be created: .*resource busy"):
        prepare(rig, lease(gpus(1)))
    assert [one.kind for one in read_entries(rig.layout.journals, GENERATION)] == ["claim", "device"]
    clear(rig)
    assert kernel.made == {}
    assert quarantine.read_records(rig.layout) == ()
    assert read_entries(rig.layout.journals, GENERATION) == []


@pytest.mark.promise("devices.quarantine")
def test_a_device_that_cannot_be_removed_is_quarantined(
    rig: Rig, kernel: FakeMdev, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, journal = prepare(rig, lease(gpus(1)))
    kernel.refuse = errno.EBUSY
    with pytest.raises(QuarantinedError, match=f"quarantined: {UUID}: .*/remove: Device or resource busy"):
        clear(rig, journal)
    (record,) = quarantine.read_records(rig.layout)
    assert (record.key, record.device_class, record.generation) == (UUID, "mdev", str(GENERATION))
    assert rig.layout.quarantine.joinpath(f"{UUID}.json").exists()
    assert drain_policy.must_drain(rig.layout, cast(Slurm, None), "n1", [record])
    with pytest.raises(NodeError, match=f"device {UUID} of n1 is quarantined"):
        prepare(rig, lease(gpus(1)))
    clear(rig)
    # the operator's commands
    (rig.root / "vhpc.toml").write_text(
        f'[paths]\nstate = "{rig.root}/state"\nrun = "{rig.root}/run"\n'
        f'[host]\nsysfs_root = "{rig.root}/sys"\n[placement]\ngpu_map = "{rig.root}/gpu.map"\n'
    )
    monkeypatch.setenv("VHPC_CONFIG", str(rig.root / "vhpc.toml"))
    monkeypatch.setattr(context, "is_root", lambda: True)
    assert main(["devices", "clear", UUID]) == 3
    assert "stays in quarantine" in capsys.readouterr().err
    kernel.refuse = 0
    assert main(["devices", "clear", UUID]) == 0
    capsys.readouterr()
    assert main(["devices", "--json", "--node", "n1"]) == 0
    rows = {row["address"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows[UUID]["role"], rows[UUID]["index"], rows[UUID]["state"]) == ("mdev", 1, "free")
    assert rows[UUID]["what"].endswith(f" {TYPE}")
    assert kernel.made == {}
    _, journal = prepare(rig, lease(gpus(1)))
    clear(rig, journal)


def unparked(rig: Rig) -> list[NodeFinding]:
    return [one for one in registry.orphans(rig.layout) if UUID in one.what]


def test_a_device_without_a_generation_is_found_and_removed(rig: Rig, kernel: FakeMdev) -> None:
    _, journal = prepare(rig, lease(gpus(1)))
    assert unparked(rig) == []
    clear(rig, journal)
    kernel.create(UUID)
    (found,) = unparked(rig)
    assert found.what == f"mediated device {UUID} belongs to no job but is not parked: it exists"
    found.repair()
    assert kernel.made == {}
    assert unparked(rig) == []


class VendorVfTraits(VirtualFunctionTraits):
    """Virtual functions with a VFIO driver of their vendor."""

    name = "mlx5-vf"

    def owns(self, key: str, place: PciFunction, *, allowed: bool) -> bool:
        return place.driver == "mlx5_vfio_pci" and super().owns(key, place, allowed=allowed)


def test_a_later_class_takes_the_functions_that_it_owns(rig: Rig) -> None:
    first, *others = rig.vfs
    rig.give_to_host(first, "mlx5_vfio_pci")
    device.TRAITS.insert(0, VendorVfTraits())
    found = {one.key: one.device_class for one in pool(host(rig), NodeDevices())}
    assert found == {first.address: "mlx5-vf"} | {one.address: "vf" for one in others}


def test_keys_sort_by_address() -> None:
    assert sorted([UUID, "10000:00:00.0", "0001:00:00.0", "0000:1b:00.1", "0000:1b:00.0"], key=key_order) == [
        "0000:1b:00.0", "0000:1b:00.1", "0001:00:00.0", "10000:00:00.0", UUID,
    ]  # fmt: skip


def test_a_device_in_quarantine_can_be_reported_to_vhpcd() -> None:
    device_wire = DeviceWire(address=UUID, role=MdevTraits.name, reason="busy", since=1.0)
    assert msgspec.json.decode(msgspec.json.encode(device_wire), type=DeviceWire) == device_wire


def test_the_journal_of_another_version_is_no_crash(rig: Rig) -> None:
    journal = rig.journal()
    journal.acquire("device", "device:x", device="x", device_class="later", state={})
    journal.close()
    failures = registry.release_all(rig.layout, rig.journal())
    assert [str(one) for one in failures] == [
        "this version has no device class 'later': a newer vhpc has written it "
        "(install the version that wrote it again, then run: vhpc reconcile)"
    ]


def test_an_entry_that_lacks_a_field_is_one_failure(rig: Rig) -> None:
    journal = rig.journal()
    journal.acquire("device", "device:x", device="x")
    journal.acquire("disk", "disk:g0", index="first")
    failures = registry.release_all(rig.layout, journal)
    assert [str(one).partition(" is damaged")[0] for one in failures] == [
        "the entry disk:g0 of a journal",
        "the entry device:x of a journal",
    ]
    assert [entry.key for entry in journal.held()] == ["disk:g0", "device:x"]


def test_no_code_compares_a_class_by_its_name() -> None:
    """Differences between classes are in the classes: other code would have to change with each new one."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if ast.unparse(side).endswith(("device_class", "['device_class']", "Traits.name"))
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["placement", "domain", "reconcile"])
def test_plans_domains_and_reconciliation_know_no_class(folder: str) -> None:
    names = {traits.name for traits in device.TRAITS}
    assert names == {"gpu", "vf", "mdev", "vgpu"}
    for path in (PACKAGE / folder).rglob("*.py"):
        constants = [
            node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
        ]
        assert not names & {value for value in constants if isinstance(value, str)}, path
        imported = {name.name for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.ImportFrom) for name in node.names}  # fmt: skip
        assert not imported & {type(traits).__name__ for traits in device.TRAITS}, path
