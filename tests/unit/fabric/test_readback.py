# SPDX-License-Identifier: Apache-2.0
"""Which tables are read before a job starts: those of its ports, and of all others soon before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from backend_site import Site
from controller_lab import wait_for
from fabric_lab import (
    GUIDS,
    HAVE_SIMULATOR,
    NEEDED,
    SM_GUID,
    SimulatedFabric,
    holding,
    sets,
    simulated_fabric,
)

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import Proof
from vhpc_slurm.fabric.smp import FabricReader

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), pytest.mark.long]

STRANGER = GUIDS[9]
ALL = len(GUIDS) + 1


@pytest.fixture
def asked(reader: FabricReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of all requests to the reader's child."""
    found: list[str] = []

    def listening(exchange: Callable[..., bytes]) -> Callable[..., bytes]:
        def listen(line: bytes, *more: object, **how: object) -> bytes:
            found.append(line.split()[0].decode())
            return exchange(line, *more, **how)

        return listen

    monkeypatch.setattr(reader._child, "_exchange", listening(reader._child._exchange))
    return found


@pytest.fixture
def site(fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path, asked: list[str]) -> Site:
    """vhpcd's parts; one audit has read all tables."""
    site = Site(fabric, reader, tmp_path / "db", fresh_s=60.0)
    site.service.audit.run()
    asked.clear()
    return site


def proof(site: Site, job_id: int) -> Proof:
    """The proof of a running job, made again."""
    snapshot = site.store.keys.snapshot()
    (generation,) = (one.generation for one in snapshot.carried() if one.generation.job_id == job_id)
    found = site.backend.verify([generation], snapshot)[generation]
    assert isinstance(found, Proof), found
    return found


@pytest.mark.promise("fabric.readback")
def test_a_start_reads_the_tables_of_its_ports_only(
    site: Site, fabric: SimulatedFabric, asked: list[str]
) -> None:
    site.open(1, "n1", "n2")
    site.open(2, "n1", "n2", "n3")
    assert asked == ["ports", "ports"]
    assert sets(fabric) == holding((0x1000, 2), (0x1001, 3))
    found = proof(site, 2)
    assert (found.scanned, found.seen, found.absent, found.earlier) == (3, 3, 0, ALL - 3)


def test_an_end_reads_all_tables(site: Site, fabric: SimulatedFabric, asked: list[str]) -> None:
    site.open(1, "n1", "n2")
    site.service.end(1, 0)
    assert asked == ["ports", "look", "tables"]
    assert sets(fabric) == holding()


@pytest.mark.promise("fabric.readback")
def test_tables_that_were_read_too_long_ago_prove_nothing(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path, asked: list[str]
) -> None:
    site = Site(fabric, reader, tmp_path / "db", fresh_s=0.0)
    site.service.audit.run()
    asked.clear()
    site.open(1, "n1")
    assert asked == ["look", "tables"]
    found = proof(site, 1)
    assert (found.scanned, found.earlier) == (ALL, 0)


@pytest.mark.promise("fabric.readback")
def test_a_port_that_had_the_key_before_is_read_again(
    site: Site, fabric: SimulatedFabric, asked: list[str]
) -> None:
    fabric.write_table(STRANGER, 0x7FFF, 0x9000)
    assert len(site.backend.audit(site.store.keys.snapshot())) == 1
    asked.clear()
    with pytest.raises(FabricError, match=f"port {STRANGER:#018x} has the keys 0x7fff 0x9000"):
        site.open(1, "n1")
    assert asked[:2] == ["ports", "scan"]
    site.service.audit.run()
    assert site.open(2, "n1").lease.network.pkey == 0x1001


@pytest.mark.promise("fabric.readback")
def test_a_key_that_a_port_gets_afterwards_is_seen_by_the_audit(site: Site, fabric: SimulatedFabric) -> None:
    fabric.write_table(STRANGER, 0x7FFF, 0x9000)
    site.open(1, "n1")
    assert site.service.audit.run()
    assert sets(fabric) == holding((0x1000, 1))


@pytest.mark.promise("fabric.readback")
def test_a_port_of_the_job_without_its_key_proves_nothing(
    site: Site, fabric: SimulatedFabric, asked: list[str]
) -> None:
    site.open(1, "n1")
    fabric.write_table(GUIDS[0], 0x7FFF)
    asked.clear()
    with pytest.raises(AssertionError, match=r"has the keys 0x7fff, and should have 0x7fff 0x9000"):
        proof(site, 1)
    assert asked[:2] == ["ports", "scan"]


def test_a_port_that_does_not_answer_any_more_proves_nothing(
    site: Site, fabric: SimulatedFabric, asked: list[str]
) -> None:
    site.open(1, "n1")
    fabric.silence("H1")
    asked.clear()
    try:
        with pytest.raises(AssertionError, match="1 nodes do not answer"):
            proof(site, 1)
    finally:
        fabric.silence("H1", silent=False)
    assert asked[:2] == ["ports", "scan"]


@pytest.mark.promise("fabric.readback")
def test_a_port_is_not_taken_for_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric:
        reader = FabricReader(environment=fabric.environment)
        reader.scan(60.0)
        assert {port.guid for port in reader.ports(GUIDS[:3], 10.0)} == set(GUIDS[:3])
        fabric.swap_cables()
        wait_for(lambda: len(reader.ports(GUIDS[:3], 10.0)) == 1, "the cables are as they were")
        assert {port.guid for port in reader.ports(GUIDS[:3], 10.0)} == {GUIDS[2]}
        assert len(reader.scan(60.0).ports) == ALL
        assert {port.guid for port in reader.ports(GUIDS[:3], 10.0)} == set(GUIDS[:3])
        reader.close()


def test_a_new_child_knows_no_ports(reader: FabricReader) -> None:
    assert {port.guid for port in reader.ports((SM_GUID, STRANGER, 0x77), 10.0)} == {SM_GUID, STRANGER}
    reader.close()
    assert reader.ports((SM_GUID, STRANGER), 60.0) == ()


def test_a_reader_that_has_ended_is_started_again(site: Site, reader: FabricReader, asked: list[str]) -> None:
    reader.close()
    site.open(1, "n1")
    assert asked == ["ports", "scan"]


def test_the_port_of_the_master_is_recognized(reader: FabricReader) -> None:
    (port,) = reader.ports((SM_GUID,), 10.0)
    assert (port.master, port.local, port.pkeys) == (True, True, (0xFFFF,))
