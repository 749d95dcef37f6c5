# SPDX-License-Identifier: Apache-2.0
"""Finding ports ahead of reading their tables, on a simulated fabric."""

from __future__ import annotations

from pathlib import Path

import pytest
from controller_lab import wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    HAVE_SIMULATOR,
    NEEDED,
    NOBODY,
    SM_GUID,
    SimulatedFabric,
    may_lose_packets,
    sets,
    simulated_fabric,
)

from vhpc_slurm.fabric import smp
from vhpc_slurm.fabric.partitions import DEFAULT as DEFAULT_PARTITION
from vhpc_slurm.fabric.readback import Expected
from vhpc_slurm.fabric.smp import FabricReader, Scan

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), may_lose_packets]

ONE_KEY = DEFAULT + f"k=0x1000, indx0 : {GUIDS[0]:#018x}=full ;\n".encode()


def found(scan: Scan) -> dict[int, set[int]]:
    return {guid: set(keys) for guid, keys in scan.tables().items()}


def test_ports_are_found_ahead_and_tables_read_at_the_scan(
    fabric: SimulatedFabric, reader: FabricReader
) -> None:
    assert found(reader.scan(10.0)) == NOBODY
    reader.look_ahead()
    fabric.replace(ONE_KEY)
    fabric.sweep()
    scan = reader.scan(10.0)
    assert found(scan) == sets(fabric) == NOBODY | {GUIDS[0]: {0x7FFF, 0x9000}}
    assert scan == reader.scan(10.0), "nothing is missing of what a whole scan sees"


def test_discovery_counts_for_the_next_scan_only(
    fabric: SimulatedFabric, reader: FabricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    ask = reader._child.ask

    def listening(line: bytes, timeout_s: float) -> bytes:
        asked.append(line)
        return ask(line, timeout_s)

    monkeypatch.setattr(reader._child, "ask", listening)
    reader.look_ahead()
    assert found(reader.scan(10.0)) == found(reader.scan(10.0)) == NOBODY
    monkeypatch.setattr(smp, "AHEAD_S", 0.0)
    reader.look_ahead()
    assert found(reader.scan(10.0)) == NOBODY
    assert asked == [b"tables", b"scan", b"scan"]


@pytest.mark.promise("fabric.audit")
@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_slow_fabric_hides_no_port(fabric: SimulatedFabric, reader: FabricReader, seconds: float) -> None:
    assert found(reader.scan(60.0)) == NOBODY
    with fabric.held(seconds):
        ports = reader.ports(GUIDS, 60.0)
    assert {port.guid for port in ports} == set(GUIDS)
    with fabric.held(seconds):
        scan = reader.scan(60.0)
    assert (found(scan), scan.silent) == (NOBODY, 0)


def test_a_reader_that_ended_meanwhile_finds_the_ports_again(
    fabric: SimulatedFabric, reader: FabricReader
) -> None:
    reader.look_ahead()
    reader.close()
    assert found(reader.scan(60.0)) == NOBODY


def test_a_master_that_has_moved_since_discovery_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smp, "AHEAD_S", 60.0)
    with simulated_fabric(tmp_path) as fabric:
        standby = fabric.start_standby("H16", DEFAULT)
        # From a host that runs neither.
        reader = FabricReader(environment=fabric.environment | {"SIM_HOST": "H15"})
        assert [port.guid for port in reader.scan(60.0).ports if port.master] == [SM_GUID]
        reader.look_ahead()
        fabric.opensm.kill()
        fabric.opensm.wait()
        wait_for(lambda: standby.says(b"SUBNET UP"), "the standby does not take over")
        scan = reader.scan(10.0)
        assert [port.guid for port in scan.ports if port.master] == [GUIDS[15]]
        assert scan.tables()[GUIDS[15]] == (0xFFFF,)
        assert Expected([DEFAULT_PARTITION]).differences(scan) == []
        reader.close()
