# SPDX-License-Identifier: Apache-2.0
"""The backends against a real OpenSM on a simulated fabric; what ports have is said by smpquery."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from backend_site import Site, backend_site, strip, verify
from controller_lab import allocation, manifest, publish, request, wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    HAVE_SIMULATOR,
    NEEDED,
    NOBODY,
    SM_GUID,
    SimulatedFabric,
    crowding,
    holding,
    sets,
    simulated_fabric,
)
from key_fabric import an_assignment

from vhpc_slurm.config import Config
from vhpc_slurm.config.images import Images
from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.fabric.static_pool import StaticPool
from vhpc_slurm.model import Generation, LeaseState
from vhpc_slurm.slurm import connect

site = backend_site

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), pytest.mark.long]

FOUR = ("n1", "n2", "n3", "n4")


def test_ports_with_own_guids_get_keys_of_jobs_on_their_nodes(site: Site, fabric: SimulatedFabric) -> None:
    # nothing about these adapters says which key they could have: n1 has the last two, n2 the first
    site.backend._policy = replace(
        site.backend._policy, ports=PortMap("ports", {("n1", 0): GUIDS[14:], ("n2", 0): GUIDS[:2]})
    )
    alices, bobs = site.open(1, "n1", "n2"), site.open(2, "n1", uid=2002)
    assert (alices.lease.network.pkey, bobs.lease.network.pkey) == (0x1000, 0x1001)
    assert [[int(word, 16) for word in row] for row in alices.lease.network.port_guids] == [
        [GUIDS[14]],
        [GUIDS[0]],
    ]
    assert sets(fabric) == NOBODY | {
        GUIDS[14]: {0x7FFF, 0x9000},
        GUIDS[0]: {0x7FFF, 0x9000},
        GUIDS[15]: {0x7FFF, 0x9001},
    }
    with pytest.raises(FabricError, match="no port of node n1 on rail 0 is free: other jobs have 2 of its 2"):
        site.open(3, "n1")
    site.service.end(1, None)
    assert sets(fabric) == NOBODY | {GUIDS[15]: {0x7FFF, 0x9001}}
    assert site.open(3, "n1").lease.network.port_guids == ((f"{GUIDS[14]:#018x}",),)


def test_the_reader_sees_the_same_as_smpquery(fabric: SimulatedFabric, reader: FabricReader) -> None:
    text = "k=0x1000, indx0 : 0x02cc100000000000=full ;\nl=0x1001 : 0x02cc100100000000=limited ;\n"
    fabric.replace(DEFAULT + text.encode())
    fabric.sweep()
    scan = reader.scan(10.0)
    assert scan.silent == 0
    assert scan.tables() == fabric.tables()
    assert [port.guid for port in scan.ports if port.local] == [SM_GUID]
    assert all(port.active for port in scan.ports)


def test_ports_have_their_own_keys_only_while_jobs_run(site: Site, fabric: SimulatedFabric) -> None:
    alice = site.open(1, "n1", "n2", uid=2001)
    bob = site.open(2, *FOUR, uid=2002)
    assert [alice.lease.state, bob.lease.state] == [LeaseState.READY] * 2
    assert (alice.lease.network.pkey, bob.lease.network.pkey) == (0x1000, 0x1001)
    assert site.states() == {1: "active", 2: "active"}
    assert sets(fabric) == holding((0x1000, 2), (0x1001, 4))
    assert site.backend.audit(site.store.keys.snapshot()) == ()
    for node in ("n1", "n2"):
        site.service.take(1, 0, node)
    site.service.end(1, 0)
    assert sets(fabric) == holding((0x1000, 2), (0x1001, 4)), "a node may still have guests that use it"
    for node in ("n1", "n2"):
        site.service.acknowledge(alice.lease.generation, node, clean=True, note="", timeline=None)
    assert sets(fabric) == holding((0x1001, 4))
    assert site.states() == {1: "quarantine", 2: "active"}
    site.service.end(2, 0)
    assert sets(fabric) == NOBODY
    assert partitions.parse(fabric.partitions.read_bytes()) == (partitions.DEFAULT,)
    assert site.open(3, "n1").lease.network.pkey == 0x1002, "neither of those that rest"
    site.service.end(3, 0)


def test_a_user_s_jobs_share_a_key_and_no_port(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db", owner="user")
    first, second = site.open(1, "n1"), site.open(2, "n1", "n2")
    other = site.open(3, "n1", uid=2002)
    assert (first.lease.network.pkey, first.lease.network.first_rank) == (0x1000, 0)
    assert (second.lease.network.pkey, second.lease.network.first_rank) == (0x1000, 1)
    assert other.lease.network.pkey == 0x1001
    assert sets(fabric) == holding((0x1000, 3), (0x1001, 1))
    site.service.end(1, 0)
    assert sets(fabric) == holding((0x1000, 3), (0x1001, 1)) | {GUIDS[0]: {0x7FFF}}
    site.service.end(2, 0)
    site.service.end(3, 0)
    assert sets(fabric) == NOBODY


def test_ports_that_do_not_exist_yet_are_reported_as_absent(site: Site, fabric: SimulatedFabric) -> None:
    record = site.open(1, *(f"n{number}" for number in range(1, 7)))
    assignment = site.store.keys.snapshot().must(record.lease.generation)
    proof = verify(site.backend, assignment.generation, site.store.keys.snapshot())
    assert (proof.scanned, proof.seen, proof.absent) == (17, 4, 2)


def test_readiness_follows_opensm(fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    site.open(1, "n1")
    fabric.opensm.kill()
    fabric.opensm.wait()
    try:
        with pytest.raises(FabricError, match="OpenSM does not run"):
            site.backend.validate(site.store.keys.snapshot())
        with pytest.raises(FabricError, match="OpenSM does not run"):
            site.open(2, "n1")
        assert site.states() == {1: "active", 2: "reserved"}
        site.service.end(1, 0)
        assert site.states()[1] == "draining", "nobody has seen that it is off the fabric"
        assert 0x9000 in sets(fabric)[GUIDS[0]]
    finally:
        fabric.start_opensm()
    assert site.open(2, "n1").lease.state is LeaseState.READY
    site.service.settle()
    assert site.states() == {1: "quarantine", 2: "active"}
    assert sets(fabric) == holding((0x1001, 1))


def test_waiting_for_a_hanging_opensm_has_a_deadline(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db", timeout_s=0.5)
    os.kill(fabric.opensm.pid, signal.SIGSTOP)
    try:
        with pytest.raises(FabricError, match=r"did not sweep within 0\.5 s"):
            site.open(1, "n1")
    finally:
        before = fabric.sweeps()
        os.kill(fabric.opensm.pid, signal.SIGCONT)
        wait_for(lambda: fabric.sweeps() > before, "opensm does not go on")
    patient = Site(fabric, reader, tmp_path / "db")
    assert patient.open(1, "n1").lease.state is LeaseState.READY


def test_a_process_other_than_opensm_gets_no_signal(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    fabric.pidfile.write_text(f"{os.getpid()}\n")
    try:
        with pytest.raises(FabricError, match=f"process {os.getpid()} of .* is "):
            site.open(1, "n1")
    finally:
        fabric.pidfile.write_text(f"{fabric.opensm.pid}\n")


# --- the file, the log and the fabric by others' hands ------------------------------------------


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b"junk\n", "has no ';'"),
        (b"", "there is no partition"),
        (None, "is missing"),
        (DEFAULT, "is not what vhpcd wrote"),
        (DEFAULT + b"x=0x1000 : A=full ;\n", "is not a port GUID"),
    ],
)
def test_the_auditor_repairs_a_damaged_file_and_its_effect(
    site: Site, fabric: SimulatedFabric, damage: bytes | None, says: str
) -> None:
    site.open(1, "n1", "n2")
    if damage is None:
        fabric.partitions.unlink()
    else:
        fabric.replace(damage)
    fabric.sweep()
    snapshot = site.store.keys.snapshot()
    found = site.backend.audit(snapshot)
    assert any(says in one.what for one in found)
    assert {GUIDS[14], GUIDS[15]} & {one.port_guid for one in found} or damage == DEFAULT, (
        "ports that nobody named show it"
    )
    assert sets(fabric) != holding((0x1000, 2))
    site.service.audit.run()
    wait_for(lambda: site.backend.audit(snapshot) == (), "not cured")
    assert sets(fabric) == holding((0x1000, 2))


def test_the_command_shows_the_auditors_findings(
    site: Site, fabric: SimulatedFabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.open(1, "n1", "n2")
    (tmp_path / "vhpc.toml").write_text(
        f'[controller]\ndatabase = "{tmp_path}/db"\n[fabric]\nbackend = "opensm-file"\n'
        f'partitions = "{fabric.partitions}"\nopensm_pidfile = "{fabric.pidfile}"\n'
        f'opensm_log = "{fabric.log}"\n'
    )
    environment = fabric.environment | {"VHPC_CONFIG": str(tmp_path / "vhpc.toml")}
    command = [sys.executable, "-m", "vhpc_slurm.cli.main", "fabric", "audit", "--json"]

    def audit() -> tuple[int, list[dict[str, str]]]:
        done = subprocess.run(
            command, env=environment, cwd=fabric.folder, capture_output=True, check=False, timeout=60
        )
        return done.returncode, json.loads(done.stdout)["findings"]

    assert audit() == (0, [])
    fabric.replace(DEFAULT)
    fabric.sweep()
    code, found = audit()
    assert code == 1
    assert {one["port_guid"] for one in found} == {None, f"{GUIDS[0]:#018x}", f"{GUIDS[1]:#018x}"}


def test_portless_jobs_cost_a_second_sweep_only_after_a_change(site: Site, fabric: SimulatedFabric) -> None:
    record = site.open(1, *(f"n{number}" for number in range(1, 3)))
    snapshot = site.store.keys.snapshot()
    absent = an_assignment(9, pkey=0x1002, first_rank=8, ranks=1)
    snapshot = KeySnapshot(snapshot.epoch, (*snapshot.assignments, absent), snapshot.freed, snapshot.tag)
    site.backend.apply(snapshot)
    before = fabric.sweeps()
    for _ in range(3):
        assert verify(site.backend, absent.generation, snapshot).absent == 1
    assert fabric.sweeps() == before + 1
    assert verify(site.backend, record.lease.generation, snapshot).seen == 2


def test_a_burst_of_a_hundred_jobs_costs_at_most_three_sweeps(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    publish(tmp_path / "catalog", manifest(min_memory_mib=1))
    site = Site(fabric, reader, tmp_path / "db", last=0x1063, timeout_s=30.0)
    config = Config(images=Images(catalog=str(tmp_path / "catalog")))
    asked = [
        wire.OpenGeneration(request=request(job_id), node_groups=wire_types.pack_allocation(allocation("n1")))
        for job_id in range(1, 101)
    ]

    async def burst() -> list[wire.Answer]:
        vhpcd = assemble(config, site.service.leases, site.backend, connect(config))
        try:
            return await asyncio.gather(*(vhpcd.requests.answer(one) for one in asked))
        finally:
            vhpcd.close()

    before = fabric.sweeps()
    answers = asyncio.run(burst())
    states = [one.lease.state for one in answers if isinstance(one, wire.LeaseAnswer)]
    assert states == [LeaseState.READY] * 100
    assert 1 <= fabric.sweeps() - before <= 3
    assert sets(fabric) == holding((0x1000, 1), (0x1001, 1), (0x1002, 1), (0x1003, 1))
    assert len({assignment.pkey for assignment in site.store.keys.snapshot().assignments}) == 100


def test_a_job_does_not_begin_on_a_key_that_a_stranger_has(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    stranger = IbPartition("other", 0x1000, ((f"{GUIDS[15]:#018x}", True),))
    site = Site(fabric, reader, tmp_path / "db", timeout_s=3)
    snapshot = KeySnapshot(1, (an_assignment(1, ranks=1),))
    fabric.replace(partitions.render((partitions.DEFAULT, stranger), 1))
    fabric.sweep()
    with pytest.raises(FabricError, match=r"0x02cc100300000300 has the keys .*0x9000"):
        verify(site.backend, Generation(1, 0, "00000001"), snapshot)


def test_a_file_that_fills_a_port_s_table_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fabric of its own: opensm never finds back to the default key on a port that was full once.
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric:
        reader = FabricReader(environment=fabric.environment)
        site = Site(fabric, reader, tmp_path / "db", site=crowding(GUIDS[0], 64))
        before = fabric.partitions.read_bytes()
        with pytest.raises(FabricError, match=r"rejected its configuration.*ERR 0512"):
            site.open(1, "n1")
        assert site.states() == {1: "reserved"}
        assert fabric.partitions.read_bytes() == before
        reader.close()


def test_a_reader_without_a_fabric_fails_in_time(tmp_path: Path, fabric: SimulatedFabric) -> None:
    nowhere = fabric.environment | {"IBSIM_SOCKNAME": "vhpc-nothing-here"}
    reader = FabricReader(environment=nowhere)
    began = time.monotonic()
    with pytest.raises(FabricError, match="cannot read the fabric"):
        reader.scan(3.0)
    assert time.monotonic() - began < 60
    reader.close()


# --- static pool -------------------------------------------------------------------------------


def test_a_static_pool_needs_no_sweep_and_waits_for_the_ports(
    fabric: SimulatedFabric, reader: FabricReader
) -> None:
    pool = KeyPool(0x1000, 0x1002)
    declared = partitions.of_pool(pool, ranks=4, rails=1, vfs=1)
    backend = StaticPool(KeyPolicy(pool, limit=4), Readback(reader, 5.0), declared, (), fabric.partitions)
    with pytest.raises(FabricError, match="not what the configuration describes"):
        backend.validate(KeySnapshot(0))
    fabric.replace(partitions.render(declared, 0))
    fabric.sweep()
    backend.validate(KeySnapshot(0))
    before = fabric.sweeps()
    here, elsewhere = an_assignment(1, ranks=4), an_assignment(2, pkey=0x1001, first_rank=4, ranks=2)
    snapshot = KeySnapshot(1, (here, elsewhere))
    backend.apply(snapshot)
    assert verify(backend, here.generation, snapshot).seen == 4
    assert sets(fabric)[GUIDS[0]] == {0x7FFF, 0x9000}
    soon = StaticPool(KeyPolicy(pool), Readback(reader, 0.5), declared, (), fabric.partitions)
    with pytest.raises(FabricError, match="is still on the fabric"):
        strip(soon, here.generation, snapshot)
    with pytest.raises(FabricError, match="at most 4 guests"):
        backend.plan(Generation(3, 0, "0" * 8), request(3), allocation("n1", *FOUR), KeySnapshot(0), "job 3")
    assert backend.audit(snapshot) == ()
    assert fabric.sweeps() == before


def test_a_static_pool_is_clean_when_no_port_has_the_guid(
    fabric: SimulatedFabric, reader: FabricReader
) -> None:
    pool = KeyPool(0x2000, 0x2001)
    declared = partitions.of_pool(pool, ranks=4, rails=1, vfs=1)
    backend = StaticPool(KeyPolicy(pool), Readback(reader, 5.0), declared, (), fabric.partitions)
    assignment = an_assignment(1, pkey=0x2000, state=KeyState.DRAINING)
    assert strip(backend, assignment.generation, KeySnapshot(1, (assignment,))).scanned == 17
