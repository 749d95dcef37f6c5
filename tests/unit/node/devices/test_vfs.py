# SPDX-License-Identifier: Apache-2.0
"""Virtual functions of every kind of driver: off, set, read back, on; and parked again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from device_rig import GENERATION, Rig, identity, machine, passthrough
from fake_hca import ETHERNET, Interface, Mlx4Port, network, ofed
from fake_pci_device import Device

from vhpc_slurm.device import VfIdentity
from vhpc_slurm.errors import TeardownError
from vhpc_slurm.hardware import Reservation
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import assignment, quarantine, vf, vf_drivers
from vhpc_slurm.node.devices.assignment import HeldDevice
from vhpc_slurm.node.devices.vf import PARKED_GUID, ParkError, VfError
from vhpc_slurm.node.finding import NodeFinding
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.store import journal
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

ONE = VfIdentity(0x02CD101200000100, 0x02CC101200000100, 0x1012, bytes.fromhex("02aabbccdd01"), 100)
MAC, VLAN, SPOOFCHK, STATE, RATE, TRUST, NODE, PORT = 1, 2, 4, 5, 6, 9, 10, 11  # if_link.h


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found


def vf_driver(rig: Rig, number: int) -> vf.VfDriver:
    return vf_drivers.find(f"{rig.root}/sys", rig.pfs[0].virtfns[number], 5)


def ethernet(rig: Rig) -> Interface:
    return network(rig.pci, rig.kernel, rig.pfs[0], ETHERNET, 1)


# --- mlx5 by netlink --------------------------------------------------------------------


def test_an_infiniband_vf_is_set_while_it_is_off(rig: Rig) -> None:
    interface = rig.kernel.interfaces[1]
    vf.configure(vf_driver(rig, 2), "a VF", ONE)
    port = interface.ports[2]
    assert (port.node_guid, port.port_guid, port.state) == (ONE.node_guid, ONE.port_guid, 0)
    assert interface.log == [STATE, NODE, PORT, STATE]
    assert [interface.ports[n].port_guid for n in (0, 1, 3)] == [0, 0, 0]
    vf.park(vf_driver(rig, 2), "a VF")
    assert (port.node_guid, port.port_guid, port.state) == (PARKED_GUID, PARKED_GUID, 2)


@pytest.mark.promise("vf.readback")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (NODE, "its node GUID is 00:00:00:00:00:00:00:00, not 02:cd:10:12:00:00:01:00"),
        (PORT, "its port GUID is 00:00:00:00:00:00:00:00, not 02:cc:10:12:00:00:01:00"),
        (STATE, "its link state is 0, not 2"),
    ],
)
def test_a_forgetful_driver_is_detected_before_the_port_is_up(rig: Rig, what: int, words: str) -> None:
    interface = rig.kernel.interfaces[1]
    interface.deaf.add(what)
    with pytest.raises(VfError, match=words):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)
    assert interface.log == [STATE, NODE, PORT]
    with pytest.raises(ParkError, match="is not parked"):
        vf.park(vf_driver(rig, 0), "a VF")


def test_refusals_of_the_kernel_are_reported(rig: Rig) -> None:
    rig.kernel.interfaces[1].refuse[PORT] = errno.EPERM
    with pytest.raises(VfError, match="cannot be set: Operation not permitted"):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)
    with pytest.raises(ParkError, match="cannot be parked: Operation not permitted"):
        vf.park(vf_driver(rig, 0), "a VF")


def test_an_adapter_without_an_interface_has_no_driver(rig: Rig) -> None:
    del rig.pfs[0].folder.entries["net"]
    with pytest.raises(
        vf.NoVfDriverError, match=r"with driver mlx5_core has no network interface .*ib_ipoib"
    ):
        vf_driver(rig, 0)


# --- mlx5 of MLNX_OFED ------------------------------------------------------------------


def test_files_of_mlnx_ofed_come_before_netlink(rig: Rig) -> None:
    firmware = ofed(rig.pfs[0])
    vf.configure(vf_driver(rig, 1), "a VF", ONE)
    assert firmware[1] == {
        "node": "02:cd:10:12:00:00:01:00",
        "port": "02:cc:10:12:00:00:01:00",
        "policy": "Follow",
    }
    vf.park(vf_driver(rig, 1), "a VF")
    assert firmware[1] == {"node": ":".join(["ff"] * 8), "port": ":".join(["ff"] * 8), "policy": "Down"}
    assert rig.kernel.interfaces[1].log == []


# --- mlx4 -------------------------------------------------------------------------------


def test_a_connectx_3_vf_sees_the_jobs_key_and_the_default_one(rig: Rig) -> None:
    pf = rig.pfs[0]
    port = Mlx4Port(pf)
    port.pkeys[0], port.pkeys[5] = "0x7fff", "0x9012"
    vf.configure(vf_driver(rig, 1), "a VF", ONE)
    assert port.mapped[pf.virtfns[1]] == [5, 0]
    assert port.guids[2] == ONE.port_guid
    vf.park(vf_driver(rig, 1), "a VF")
    assert port.mapped[pf.virtfns[1]] == [port.LENGTH, port.LENGTH]
    assert port.guids[2] == PARKED_GUID
    assert port.mapped[pf.virtfns[0]] == [41, port.LENGTH]  # not ours to touch


def test_a_key_that_never_comes_ends_the_wait_unmapped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    port = Mlx4Port(rig.pfs[0])
    port.pkeys[0] = "0xffff"
    monkeypatch.setattr(vf_drivers.Mlx4, "wait_s", 0.1)
    with pytest.raises(VfError, match=r"has no partition key 0x1012 after 0\.1 s"):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)
    assert port.mapped[rig.pfs[0].virtfns[0]] == [port.LENGTH, port.LENGTH]


# --- Ethernet ---------------------------------------------------------------------------


def test_an_ethernet_vf_may_not_spoof_and_is_not_trusted(rig: Rig) -> None:
    interface = ethernet(rig)
    port = interface.ports[3]
    port.trust, port.rate = 1, (10, 1000)
    vf.configure(vf_driver(rig, 3), "a VF", ONE)
    assert (port.mac, port.vlan, port.spoofchk, port.trust, port.rate) == (ONE.mac, 100, 1, 0, (0, 0))
    vf.park(vf_driver(rig, 3), "a VF")
    assert (port.mac, port.vlan, port.spoofchk, port.trust, port.rate) == (bytes(6), 0, 1, 0, (0, 0))


def test_a_rate_that_is_not_there_is_not_taken_back(rig: Rig) -> None:
    interface = ethernet(rig)
    interface.link_up = False  # igb takes no rate then, not even none: seen on Linux 6.12
    vf.configure(vf_driver(rig, 0), "a VF", ONE)
    interface.ports[0].rate = (10, 1000)
    with pytest.raises(ParkError, match="Invalid argument"):
        vf.park(vf_driver(rig, 0), "a VF")


def test_a_link_that_should_be_down_and_is_not_is_found_out(rig: Rig) -> None:
    interface = ethernet(rig)
    interface.operations |= {STATE}
    vf.configure(vf_driver(rig, 0), "a VF", ONE)
    interface.deaf.add(STATE)
    with pytest.raises(VfError, match="its link state is 0, not 2"):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (MAC, "its MAC address is 00:00:00:00:00:00, not 02:aa:bb:cc:dd:01"),
        (VLAN, "its VLAN is 0, not 100"),
        (SPOOFCHK, "its spoof check is False, not True"),
        (TRUST, "its trust is True, not False"),
        (RATE, r"its rate is \(10, 1000\), not \(0, 0\)"),
    ],
)
def test_each_setting_of_an_ethernet_vf_is_read_back(rig: Rig, what: int, words: str) -> None:
    interface = ethernet(rig)
    interface.ports[0].trust, interface.ports[0].rate = 1, (10, 1000)
    interface.deaf.add(what)
    with pytest.raises(VfError, match=words):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)


def test_a_driver_without_spoof_check_is_refused(rig: Rig) -> None:
    interface = ethernet(rig)
    interface.operations = frozenset((MAC, VLAN))
    with pytest.raises(VfError, match="Operation not supported"):
        vf.configure(vf_driver(rig, 0), "a VF", ONE)


def test_settings_that_a_driver_lacks_need_no_reset(rig: Rig) -> None:
    interface = ethernet(rig)
    interface.operations = frozenset((MAC, VLAN, SPOOFCHK))
    vf.configure(vf_driver(rig, 0), "a VF", ONE)
    vf.park(vf_driver(rig, 0), "a VF")


# --- in a job ---------------------------------------------------------------------------


def take(rig: Rig, *found: Device) -> Journal:
    journal = Journal(rig.layout.journals, GENERATION)
    AssignedDevice().take(rig.layout, journal, passthrough(*found, role="vf"), rig.host)
    return journal


def test_a_vf_has_guids_after_vfio_and_loses_them_before_reset(rig: Rig) -> None:
    function = rig.vfs[1]
    take(rig, function).close()
    port = rig.kernel.interfaces[1].ports[1]
    assert (port.port_guid, port.state, function.driver) == (identity(function).port_guid, 0, "vfio-pci")
    seen: list[int] = []
    function.on_reset = lambda device: seen.append(port.port_guid)
    teardown.clear(rig.layout, GENERATION, "n1")
    assert seen == [PARKED_GUID]
    assert port.state == 2


@pytest.mark.promise("vf.readback")
def test_a_vf_that_keeps_its_guid_is_quarantined(rig: Rig) -> None:
    function = rig.vfs[0]
    take(rig, function).close()
    interface = rig.kernel.interfaces[1]
    interface.deaf.add(PORT)
    for _ in range(2):  # a second try does not forget it either
        with pytest.raises(TeardownError, match="may still be on its network"):
            teardown.clear(rig.layout, GENERATION, "n1")
        assert [entry.kind for entry in journal.read_entries(rig.layout.journals, GENERATION)] == ["device"]
        assert [record.key for record in quarantine.read_records(rig.layout)] == [function.address]
    interface.deaf.clear()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert journal.read_entries(rig.layout.journals, GENERATION) == []
    assert interface.ports[0].port_guid == PARKED_GUID
    assert [record.key for record in quarantine.read_records(rig.layout)] == [function.address]
    assignment.clear(rig.layout, function.address, {}, rig.host)
    assert quarantine.read_records(rig.layout) == ()


def test_a_vf_that_refuses_its_guid_is_given_back(rig: Rig) -> None:
    function = rig.vfs[0]
    rig.kernel.interfaces[1].deaf.add(NODE)
    with pytest.raises(VfError, match="did not accept its settings"):
        take(rig, function)
    rig.kernel.interfaces[1].deaf.clear()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert rig.kernel.interfaces[1].ports[0].port_guid == PARKED_GUID
    assert quarantine.read_records(rig.layout) == ()


# --- reconcile --------------------------------------------------------------------------


@pytest.fixture
def audited(rig: Rig) -> Rig:
    config = rig.layout.config
    made = msgspec.structs.replace(config.devices, virtual_functions=(f"{rig.pfs[0].address}=4",))
    rig.layout = Layout(msgspec.structs.replace(config, devices=made))
    for number in range(4):
        vf.park(vf_driver(rig, number), "a VF")
    return rig


def unparked(rig: Rig) -> list[NodeFinding]:
    return list(AssignedDevice().orphans(rig.layout))


def test_a_vf_on_an_unknown_network_is_parked(audited: Rig) -> None:
    assert unparked(audited) == []
    port = audited.kernel.interfaces[1].ports[2]
    port.port_guid, port.state = 0x02CC123400000400, 0
    (found,) = unparked(audited)
    assert found.what == (
        f"virtual function {audited.pfs[0].virtfns[2]} belongs to no job but is not parked: "
        "its port GUID is 02:cc:12:34:00:00:04:00, not ff:ff:ff:ff:ff:ff:ff:ff"
    )
    found.repair()
    assert (port.port_guid, port.state) == (PARKED_GUID, 2)
    assert unparked(audited) == []


def test_a_jobs_vf_is_no_orphan_from_its_reservation_on(audited: Rig) -> None:
    port = audited.kernel.interfaces[1].ports[2]
    port.port_guid = 1
    (found,) = unparked(audited)
    journal = audited.journal()
    function = audited.pfs[0].virtfns[2]
    reservation = Reservation(str(GENERATION), 0, (0,), (), 0, (function,))
    journal.announce("claim", "claim:g0", reservation)
    found.repair()  # found before the job came
    assert port.port_guid == 1
    assert unparked(audited) == []
    journal.released("claim:g0")
    journal.announce("device", "device:x", HeldDevice(function, "vf", {}))
    assert unparked(audited) == []


def test_an_orphan_vf_that_cannot_be_parked_is_quarantined(audited: Rig) -> None:
    interface = audited.kernel.interfaces[1]
    interface.ports[0].port_guid = 1
    interface.deaf.add(PORT)
    (found,) = unparked(audited)
    with pytest.raises(TeardownError, match="may still be on its network"):
        found.repair()
    assert [record.key for record in quarantine.read_records(audited.layout)] == [audited.pfs[0].virtfns[0]]
    assert unparked(audited) == []
