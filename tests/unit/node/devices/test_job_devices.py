# SPDX-License-Identifier: Apache-2.0
"""From an allocation with generic resources to bound devices: what Prolog does with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attribute_fs import fixed
from device_rig import GENERATION, Rig, machine
from fake_hca import ETHERNET, network
from job_devices import IB, gpus, host, lease, prepare, vfs

from vhpc_slurm.controller.api.status_messages import FabricState
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.hooks import slurmctld
from vhpc_slurm.hooks.common import HookEnv
from vhpc_slurm.model import Allocation, GresAllocation, LeaseRecord, NetworkIdentity, NodeAllocation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import identities, quarantine
from vhpc_slurm.node.devices.preflight import NoVfioError, SilentError
from vhpc_slurm.node.devices.vf import PARKED_GUID
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store.journal import read_entries
from vhpc_slurm.reconcile import fabric_isolation
from vhpc_slurm.slurm.port import SlurmJob


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found


@pytest.mark.promise("devices.allocation")
def test_a_job_gets_its_gpu_and_vfs_in_its_partition(rig: Rig) -> None:
    for gpu in rig.gpus:
        rig.give_to_host(gpu)
    plan, journal = prepare(rig, lease(gpus(1), vfs(2)))
    got = {device.key: device.device_class for device in plan.guests[0].devices}
    assert got == {rig.gpus[1].address: "gpu", rig.vfs[0].address: "vf", rig.vfs[1].address: "vf"}
    assert [gpu.driver for gpu in rig.gpus] == ["nvidia", "vfio-pci"]
    ports = rig.kernel.interfaces[1].ports
    # 02cc PPPP SS RRRR VV: partition 1234, rail 0, the second node's rank is 3 + 1
    assert [f"{ports[n].port_guid:016x}" for n in (0, 1)] == ["02cc123400000400", "02cc123400000401"]
    assert [f"{ports[n].node_guid:016x}" for n in (0, 1)] == ["02cd123400000400", "02cd123400000401"]
    assert ports[2].port_guid == 0
    journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert [gpu.driver for gpu in rig.gpus] == ["nvidia", "nvidia"]
    assert [ports[n].port_guid for n in (0, 1)] == [PARKED_GUID, PARKED_GUID]
    assert [ports[n].state for n in (0, 1)] == [2, 2]


@pytest.mark.promise("fabric.open")
def test_on_an_open_fabric_vfs_are_off_before_their_guest_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = lease(vfs(2))
    _, journal = prepare(rig, what)
    journal.close()
    ports = rig.kernel.interfaces[1].ports
    off = [(PARKED_GUID, 2)] * 2
    assert [(ports[n].port_guid, ports[n].state) for n in (0, 1)] != off
    release = teardown.release_guests

    def looking(*arguments: Any) -> None:
        assert [(ports[n].port_guid, ports[n].state) for n in (0, 1)] == off
        release(*arguments)

    monkeypatch.setattr(teardown, "release_guests", looking)
    record = LeaseRecord(what, 1.0, 1.0, ())
    fabric = FabricState(safe=False, open_since=1.0, what="port 0x1 has the keys 0xffff")
    (finding,) = fabric_isolation.findings(rig.layout, "n1", [record], fabric)
    finding.repair()
    assert read_entries(rig.layout.journals, GENERATION) == []
    teardown.clear(rig.layout, GENERATION, "n1")


def test_a_quarantined_vf_is_replaced_and_a_gpu_is_not(rig: Rig) -> None:
    quarantine.put(rig.layout, quarantine.record(rig.vfs[0].address, "vf", "still has a GUID"))
    quarantine.put(rig.layout, quarantine.record(rig.gpus[0].address, "gpu", "hot"))
    plan, journal = prepare(rig, lease(vfs(1)))
    assert [device.key for device in plan.guests[0].devices] == [rig.vfs[1].address]
    journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")
    with pytest.raises(NodeError, match=f"device {rig.gpus[0].address} of n1 is quarantined"):
        prepare(rig, lease(gpus(0)))


@pytest.mark.promise("vf.replaced")
def test_an_unfit_vf_is_parked_and_the_next_nearest_is_used(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    silent, pinned, good = rig.vfs[:3]
    silent.config[:] = b"\xff" * 64
    pinned.override = "pci-stub"
    plan, journal = prepare(rig, lease(gpus(0), vfs(1)))
    assert [device.key for device in plan.guests[0].devices] == [rig.gpus[0].address, good.address]
    assert [path for path, _ in rig.pci.log if silent.address in path or pinned.address in path] == []
    found = {record.key: record.reason for record in quarantine.read_records(rig.layout)}
    assert found.keys() == {silent.address, pinned.address}
    assert "does not answer" in found[silent.address]
    assert "is pinned to driver pci-stub" in found[pinned.address]
    assert all(f"quarantined: {address}" in caplog.text for address in found)
    # what the job holds is what it got, and all of that comes back
    (reservation,) = reservations.live(rig.layout)
    assert set(reservation.devices) == {rig.gpus[0].address, good.address}
    journal.close()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert good.was_reset == 1
    assert reservations.live(rig.layout) == ()


def test_a_vf_in_a_group_of_another_job_is_skipped_not_parked(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Their adapter sits behind a bridge that isolates nothing; when the other job ends all is well again."""
    other, beside, good = rig.vfs[:3]
    rig.pci.regroup(beside.address, other.group)
    rig.give_to_host(beside, "")
    first, second = (
        replace(
            lease(vfs(1)),
            generation=replace(GENERATION, job_id=job),
            allocation=Allocation(
                tuple(NodeAllocation(node, (cpu,), 2048, (vfs(1),)) for node in ("n0", "n1"))
            ),
        )
        for job, cpu in ((6, 0), (GENERATION.job_id, 1))
    )
    prepare(rig, first)
    plan, _ = prepare(rig, second)
    assert [device.key for device in plan.guests[0].devices] == [good.address]
    assert f"in use: {beside.address}" in caplog.text
    assert quarantine.read_records(rig.layout) == ()
    reserved = {reservation.generation: reservation.devices for reservation in reservations.live(rig.layout)}
    assert reserved == {str(first.generation): (other.address,), str(GENERATION): (good.address,)}


@pytest.mark.promise("vf.replaced")
def test_only_when_no_vf_fits_is_it_the_nodes_fault(rig: Rig) -> None:
    for vf in rig.vfs[1:]:
        vf.methods = ()
    with pytest.raises(NodeError, match="the job needs 2 virtual functions on n1, 1 are free"):
        prepare(rig, lease(vfs(2)))
    # of those that were tried and found bad
    assert {record.key for record in quarantine.read_records(rig.layout)} == {
        vf.address for vf in rig.vfs[1:]
    }
    assert not any(path.endswith("driver_override") for path, _ in rig.pci.log)


@pytest.mark.promise("vf.replaced")
def test_a_bad_gpu_is_replaced_by_no_other_and_quarantines_no_vf(rig: Rig) -> None:
    rig.gpus[0].config[:] = b"\xff" * 64
    with pytest.raises(SilentError, match=f"device {rig.gpus[0].address} does not answer"):
        prepare(rig, lease(gpus(0), vfs(1)))
    assert quarantine.read_records(rig.layout) == ()


def test_a_fault_of_all_vfs_puts_no_vf_into_quarantine(rig: Rig) -> None:
    rig.pci.unload("vfio-pci")
    with pytest.raises(NoVfioError, match="the kernel has no such driver"):
        prepare(rig, lease(vfs(1)))
    assert quarantine.read_records(rig.layout) == ()


@pytest.mark.parametrize(
    ("gres", "net", "words"),
    [
        (vfs(1), NetworkIdentity(), "this site gives jobs no partition of the fabric"),
        (vfs(1), replace(IB, port_guids=(("0x1",), ("0x2",))), "ports with fixed GUIDs"),
        (vfs(3), IB, "its guests have 2 on each of 1 rails in the fabric"),
        (
            vfs(1),
            replace(IB, port_guids=(("0x0002c90300000101",),) * 2),
            "have ports with fixed GUIDs",
        ),
    ],
)
def test_missing_fabric_ports_are_a_user_error(
    rig: Rig, gres: GresAllocation, net: NetworkIdentity, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        prepare(rig, lease(gres, net=net))
    assert rig.pci.log == []


def test_gpu_map_gaps_are_node_errors(rig: Rig) -> None:
    with pytest.raises(NodeError, match=r"Slurm allocated GPU 2 on n1: the GPU map has 2 entries"):
        prepare(rig, lease(gpus(2)))
    (rig.root / "gpu.map").write_text(f"0 {rig.pfs[0].address}\n1 0000:ff:00.0\n")
    with pytest.raises(NodeError, match=r"names .* of class 020700, not a GPU") as caught:
        prepare(rig, lease(gpus(0, 1)))
    assert "not a PCI function" in caught.value.line()
    with pytest.raises(NodeError, match="the job needs 5 virtual functions on n1, 4 are free"):
        prepare(rig, lease(vfs(5)))


def test_each_rail_counts_its_own_functions(tmp_path: Path) -> None:
    with machine(tmp_path, complexes=2, gpus=1, vfs=2) as rig:
        what = lease(vfs(4), net=replace(IB, rails=2))
        plan, _ = prepare(rig, what)
        found = identities.of_plan(what, plan, host(rig))
        got = {address: f"{one.port_guid:016x}" for address, one in found.items()}
        assert [got[vf.address] for vf in rig.vfs] == [
            "02cc123400000400",
            "02cc123400000401",
            "02cc123401000400",
            "02cc123401000401",
        ]
        # and this is what the guest has to show
        assert [f"{guid:016x}" for guid in plan.guests[0].port_guids] == sorted(got.values())
        # the second adapter is the second rail, also for who has none on the first
        second = replace(plan.guests[0], devices=plan.guests[0].devices[2:])
        assert {device.key for device in second.devices} == set(rig.pfs[1].virtfns)
        alone = identities.of_plan(what, replace(plan, guests=(second,)), host(rig))
        assert sorted(f"{one.port_guid:016x}" for one in alone.values()) == [
            "02cc123401000400",
            "02cc123401000401",
        ]


@pytest.mark.promise("devices.allocation")
def test_an_ethernet_vf_is_in_the_jobs_vlan(rig: Rig) -> None:
    interface = network(rig.pci, rig.kernel, rig.pfs[0], ETHERNET, 1)
    for vf in rig.vfs:
        vf.folder.entries["class"] = fixed("0x020000\n")
    net = NetworkIdentity("ethernet", vlan=77, first_rank=3, rails=1, vfs=2)
    with pytest.raises(UserError, match="1 Ethernet functions on n1: this site gives jobs no VLAN"):
        prepare(rig, lease(vfs(1)))
    teardown.clear(rig.layout, GENERATION, "n1")
    prepare(rig, lease(vfs(1), net=net))
    port = interface.ports[0]
    # 02, VLAN 77 in 12 bits, rail 0, rank 3 + 1, VF 0
    assert (port.vlan, port.mac.hex(":"), port.spoofchk) == (77, "02:04:d0:00:04:00", 1)
    assert interface.ports[1].vlan == 0


def test_the_number_of_functions_is_checked_by_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = cast(
        SlurmJob,
        SimpleNamespace(
            uid=1, gid=1, user="a", work_dir="/", name="", partition="", het=None, account="", qos=""
        ),
    )
    env = HookEnv(7, 0, "")
    monkeypatch.setenv("SPANK_VHPC_IMAGE", "tiny:1")
    assert slurmctld._request(env, job).vfs is None
    for text, number in (("0", 0), ("256", 256)):
        monkeypatch.setenv("SPANK_VHPC_VFS", text)
        assert slurmctld._request(env, job).vfs == number
    for text in ("257", "-1", "2;reboot", "٣"):
        monkeypatch.setenv("SPANK_VHPC_VFS", text)
        with pytest.raises(UserError, match=r"--vhpc-vfs=.*whole number"):
            slurmctld._request(env, job)
