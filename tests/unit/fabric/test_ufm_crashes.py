# SPDX-License-Identifier: Apache-2.0
"""Crashes of vhpcd with UFM, and databases that are not the one that UFM's keys are from."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from controller_lab import allocation, identity, request
from fabric_lab import GUIDS
from fake_ufm import FakeUfm
from ufm_site import ALICE, MARK, Site, soon_again, ufm_server, ufm_site

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState

_soon_again = soon_again
ufm = ufm_server
site = ufm_site

pytestmark = pytest.mark.long


def test_a_vhpcd_killed_between_steps_continues(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path)
    record = site.service.reserve(request(1), allocation("n1", "n2"), identity(0))
    site.backend.apply(site.snapshot)  # and dies before this is written down
    again = Site(ufm, tmp_path)
    again.backend.validate(again.snapshot)
    before = len(ufm.writes())
    assert again.open(1, "n1", "n2").lease == replace(record.lease, state=LeaseState.READY)
    assert len(ufm.writes()) == before, "nothing is left to be done"
    again.service.end(1, 0)
    assert ufm.members(0x1000) == set()


def test_a_change_that_is_there_costs_no_write(site: Site, ufm: FakeUfm) -> None:
    site.open(1, "n1")
    before = len(ufm.writes())
    for _ in range(3):
        site.backend.apply(site.snapshot)
    assert len(ufm.writes()) == before


@pytest.mark.promise("ufm.database")
def test_a_database_from_yesterday_changes_nothing(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path)
    site.open(1, "n1")
    with closing(sqlite3.connect(tmp_path / "db")) as now, closing(sqlite3.connect(tmp_path / "old")) as old:
        now.backup(old)
    site.open(2, "n1", "n2")
    keys = {pkey: ufm.members(pkey) for pkey in ufm.keys}
    restored = Site(ufm, tmp_path, database="old")
    with pytest.raises(FabricError, match="not changed last by this database"):
        restored.backend.validate(restored.snapshot)
    with pytest.raises(FabricError, match="not changed last by this database"):
        restored.open(3, "n1")
    restored.service.end(1, 0)
    assert restored.states() == {1: "draining", 3: "reserved"}
    assert {pkey: ufm.members(pkey) for pkey in ufm.keys} == keys
    site.backend.validate(site.snapshot)


@pytest.mark.promise("ufm.database")
def test_an_empty_database_takes_no_key_from_a_job(ufm: FakeUfm, tmp_path: Path) -> None:
    Site(ufm, tmp_path).open(1, "n1")
    new = Site(ufm, tmp_path, database="new")
    with pytest.raises(FabricError, match="was not changed last by this database"):
        new.backend.apply(new.snapshot)
    del ufm.keys[MARK]
    with pytest.raises(FabricError, match="no mark of a database"):
        new.backend.apply(new.snapshot)
    assert ufm.members(0x1000) == {GUIDS[0]}


def test_marks_do_not_pile_up(site: Site, ufm: FakeUfm) -> None:
    for job_id in (1, 2, 3):
        site.open(job_id, "n1")
    assert 1 <= len(ufm.members(MARK)) <= 2
    site.backend.validate(site.snapshot)


def test_a_stranger_on_a_key_stays_and_blocks_the_job(site: Site, ufm: FakeUfm) -> None:
    stranger = "0002c90300000001"
    ufm.do("POST", "/resources/pkeys/", {"pkey": "0x1000", "guids": [stranger]})
    with pytest.raises(FabricError, match=r"that vhpcd did not add: the first is 0x0002c90300000001"):
        site.open(1, "n1")
    assert [one.port_guid for one in site.backend.audit(site.snapshot)] == [int(stranger, 16)]
    site.backend.repair(site.snapshot)
    assert stranger in ufm.keys[0x1000].ports
    assert site.open(2, "n1").lease.network.pkey == 0x1001


def test_keys_of_the_site_are_not_changed(site: Site, ufm: FakeUfm) -> None:
    ufm.do("POST", "/resources/pkeys/", {"pkey": "0x20", "guids": ["0002c90300000001"]})
    site.open(1, "n1")
    site.service.end(1, 0)
    assert ufm.members(0x20) == {0x0002C90300000001}
    assert site.backend.audit(site.snapshot) == ()


def test_lost_and_leftover_keys_in_ufm_are_repaired(site: Site, ufm: FakeUfm) -> None:
    site.open(1, "n1", "n2")
    del ufm.keys[0x1000].ports["02cc100000000100"]
    ufm.keys[0x1000].ports["02cc100000000700"] = ("full", True)
    assert [one.what for one in site.backend.audit(site.snapshot)] == [
        "UFM: key 0x1000 lacks 1 ports and has 1 too many"
    ]
    site.backend.repair(site.snapshot)
    assert ufm.members(0x1000) == ALICE
    assert site.backend.audit(site.snapshot) == ()


def test_a_thousand_ports_go_in_portions_that_servers_take(ufm: FakeUfm, tmp_path: Path) -> None:
    site = Site(ufm, tmp_path)
    nodes = [f"n{number}" for number in range(1000)]
    assert site.open(1, *nodes).lease.state is LeaseState.READY
    assert len(ufm.members(0x1000)) == 1000
    site.service.end(1, 0)
    assert ufm.members(0x1000) == set()
    assert max(len(path) for _, path in ufm.asked) < 8000
