# SPDX-License-Identifier: Apache-2.0
"""VLANs: what is allocated, and what the backend ethernet says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_site import verify
from controller_lab import Alone, allocation, identity, request
from key_fabric import an_assignment

from vhpc_slurm.cli import options
from vhpc_slurm.cli.fabric import keys as cli
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import numbers, partitions
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.model import NetworkIdentity


class Site:
    """vhpcd's own parts on a network without a subnet manager."""

    def __init__(self, database: Path, **options: Any) -> None:
        self.store = SqliteStore(database)
        config = Fabric(**options)
        self.backend = backend(config, self.store.keys.knows)
        self.service = Alone(
            self.store, self.backend, reserve_mib=0, quarantine_s=30.0, key_owner=config.key_owner
        )

    @property
    def snapshot(self) -> KeySnapshot:
        return self.store.keys.snapshot()

    def open(self, job_id: int, *nodes: str, uid: int = 2001) -> NetworkIdentity:
        return self.service.open(request(job_id, uid=uid), allocation(*nodes), identity(0)).lease.network


ETHERNET = {"backend": "ethernet", "vlan_first": 100, "vlan_last": 102, "rails": 2, "vfs": 2}


def test_each_job_has_a_vlan_that_rests_afterwards(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.backend.validate(site.snapshot)
    assert site.open(1, "n1", "n2") == NetworkIdentity("ethernet", vlan=100, rails=2, vfs=2)
    assert site.open(2, "n1").vlan == 101
    site.service.end(1, 0)
    assert {
        assignment.generation.job_id: assignment.state.value for assignment in site.snapshot.assignments
    } == {
        1: "quarantine",
        2: "active",
    }
    assert site.open(3, "n1").vlan == 102
    with pytest.raises(FabricError, match=r"no VLAN is free: 2 are in use, 1 in quarantine"):
        site.open(4, "n1")


def test_a_vlan_is_reused_only_after_all_nodes_acknowledged(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.open(1, "n1", "n2")
    generation = site.snapshot.assignments[0].generation
    for node in ("n1", "n2"):
        site.service.take(1, 0, node)
    site.service.end(1, 0)
    site.service.acknowledge(generation, "n1", clean=True, note="", timeline=None)
    assert site.snapshot.must(generation).state is KeyState.DRAINING
    site.service.acknowledge(generation, "n2", clean=True, note="", timeline=None)
    assert site.snapshot.must(generation).state is KeyState.QUARANTINE


def test_a_user_s_jobs_share_a_vlan_and_no_address(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", **ETHERNET, key_owner="user")
    assert site.open(1, "n1", "n2") == NetworkIdentity("ethernet", vlan=100, rails=2, vfs=2)
    assert site.open(2, "n1") == NetworkIdentity("ethernet", vlan=100, first_rank=2, rails=2, vfs=2)
    assert site.open(3, "n1", uid=2002).vlan == 101


def test_ports_that_cannot_be_read_count_as_absent(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.open(1, "n1", "n2")
    proof = verify(site.backend, site.snapshot.assignments[0].generation, site.snapshot)
    assert (proof.scanned, proof.seen, proof.absent) == (0, 0, 8)


def test_numbers_that_left_the_pool_are_found(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.open(1, "n1")
    assert site.backend.audit(site.snapshot) == ()
    smaller = Site(tmp_path / "db", **ETHERNET | {"vlan_first": 101})
    (found,) = smaller.backend.audit(smaller.snapshot)
    assert found.what == f"VLAN 100 of {site.snapshot.assignments[0].generation} is not in the pool"
    assert smaller.open(2, "n1").vlan == 101


@pytest.mark.parametrize(
    "options",
    [{"backend": "none"}, {"backend": "static-pool"}, {"backend": "opensm-file"}],
)
def test_no_other_backend_serves_while_vlans_are_in_use(tmp_path: Path, options: dict[str, Any]) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.open(1, "n1")
    other = Site(tmp_path / "db", **options)
    with pytest.raises(FabricError, match=r"VLAN 100 of 1\.0\."):
        other.backend.validate(other.snapshot)
    site.service.end(1, 0)
    if options == {"backend": "none"}:
        other = Site(tmp_path / "db", **options)
        other.backend.validate(other.snapshot)  # a VLAN in quarantine blocks no start


def test_a_vlan_survives_a_backend_that_does_not_know_it(tmp_path: Path) -> None:
    Site(tmp_path / "db", **ETHERNET).open(1, "n1")
    other = Site(tmp_path / "db", backend="none")
    other.service.end(1, 0)
    assert [assignment.state for assignment in other.snapshot.assignments] == [KeyState.DRAINING]
    back = Site(tmp_path / "db", **ETHERNET)
    back.service.settle()
    assert [assignment.state for assignment in back.snapshot.assignments] == [KeyState.QUARANTINE]


def test_a_partitions_file_and_its_proofs_leave_vlans_out() -> None:
    vlan = an_assignment(2, pkey=(1 << 16) + 100)
    snapshot = KeySnapshot(1, (an_assignment(1), vlan))
    assert [one.pkey for one in partitions.of_snapshot(snapshot)] == [0x7FFF, 0x1000]
    nobody: Any = None  # no port is read
    for prove in (Readback(nobody, 1.0).carried, Readback(nobody, 1.0).gone):
        (outcome,) = prove([vlan], (), snapshot).values()
        assert isinstance(outcome, FabricError)
        assert "VLAN 100" in outcome.line()


def test_keys_of_infiniband_and_vlans_never_meet() -> None:
    assert [numbers.label(number) for number in (0x64, (1 << 16) + 0x64)] == ["0x0064", "VLAN 100"]
    with pytest.raises(FabricError, match="the first is 0x1000"):
        NoNetwork().validate(KeySnapshot(1, (an_assignment(),)))


def test_a_vlan_is_shown_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path / "db", **ETHERNET)
    site.open(7, "n1")
    config = Config(controller=Controller(database=str(tmp_path / "db")))
    monkeypatch.setattr(options, "config", lambda: config)
    cli.ls()
    assert "VLAN 100  active" in capsys.readouterr().out
    for name in ("vlan100", "VLAN 100", "7"):
        assert [assignment.generation.job_id for assignment in cli._chosen(config, name)] == [7]
    for name in ("vlan101", "0x0064", "vlan0"):
        with pytest.raises(UserError, match="is free, or job"):
            cli._chosen(config, name)


@pytest.mark.parametrize(
    ("first", "last", "space"),
    [
        (1, 5, numbers.VLANS),
        (4000, 4095, numbers.VLANS),
        (9, 8, numbers.VLANS),
    ],
)
def test_invalid_ranges_are_refused(first: int, last: int, space: numbers.Space) -> None:
    with pytest.raises(FabricError, match=f"invalid range of {space.name}s"):
        KeyPool(first, last, space=space)


def test_a_mac_address_is_made_of_the_number_rail_rank_and_vf() -> None:
    vlan = (1 << 16) + 0xABC
    assert numbers.mac(vlan, 0xD, 0x1234, 0x56) == "02:ab:cd:12:34:56"
    for number, rail, rank, vf in (
        (0x1000, 0, 0, 0),
        (vlan, 16, 0, 0),
        (vlan, 0, 1 << 16, 0),
    ):
        with pytest.raises(ValueError, match="no MAC address has"):
            numbers.mac(number, rail, rank, vf)


def test_more_rails_than_have_room_in_an_address_are_refused() -> None:
    with pytest.raises(FabricError, match="17 rails are too many"):
        backend(Fabric(backend="ethernet", rails=17), lambda _epoch, _tag: False)


def test_a_number_has_one_owner(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "db")
    vlan = (1 << 16) + 0xFFE
    with store.transaction():
        store.keys.add(an_assignment(1, ports=(0xA1, 0xA2)))
        store.keys.add(an_assignment(3, pkey=vlan))
    for pkey in (0x1000, vlan):
        with pytest.raises(FabricError, match="another owner has it"), store.transaction():
            store.keys.add(an_assignment(4, pkey=pkey, first_rank=9, owner="another"))
