# SPDX-License-Identifier: Apache-2.0
"""vhpcd as a process on a simulated fabric: a real OpenSM, a real munged, and what ports have by smpquery."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from controller_lab import Munged, allocation, request, wait_for
from fabric_lab import GUIDS, NOBODY, SimulatedFabric, holding, sets
from vhpc_command import Vhpc
from vhpcd_fabric import HAVE_ALL, NEEDED, Ack, a_vhpcd, carries, opened, states
from vhpcd_process import Vhpcd

from vhpc_slurm.cli.host.checks import CheckResult, Level, services
from vhpc_slurm.cli.main import main
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState

pytestmark = [pytest.mark.skipif(not HAVE_ALL, reason=NEEDED), pytest.mark.long]


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged, fabric: SimulatedFabric) -> Iterator[Vhpcd]:
    with a_vhpcd(tmp_path, daemon, fabric) as started:
        yield started


# --- the life of jobs ---------------------------------------------------------------------------


def test_jobs_have_their_keys_while_they_run_and_none_afterwards(
    vhpcd: Vhpcd, fabric: SimulatedFabric
) -> None:
    first, second = opened(vhpcd, 1, "n1", "n2"), opened(vhpcd, 2, "n3")
    assert (first.network.pkey, second.network.pkey) == (0x1000, 0x1001)
    assert sets(fabric) == holding((0x1000, 2), (0x1001, 1))
    vhpcd.client.lease(1, 0, "n1", 5.0)
    vhpcd.client.ending(1, 0)
    vhpcd.client.ending(2, 0)
    carries(fabric, holding((0x1000, 2)))
    vhpcd.client.acknowledge(Ack(first.generation, "n1"))
    carries(fabric, NOBODY)
    wait_for(lambda: states(vhpcd) == {1: "quarantine", 2: "quarantine"}, "not released")


@pytest.mark.promise("fabric.no-wait")
def test_starts_without_new_keys_wait_for_no_sweep(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    ready = opened(vhpcd, 1)
    os.kill(fabric.opensm.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as hooks:
            started = hooks.submit(opened, vhpcd, 2)
            wait_for(lambda: states(vhpcd).get(2) == "reserved", "no lease is made")
            wait_for(lambda: b"0x1001" in fabric.partitions.read_bytes(), "the batch does not begin")
            assert vhpcd.client.lease(1, 0, "n1", 5.0).generation == ready.generation
            vhpcd.client.acknowledge(Ack(ready.generation, "n1", clean=False, note="busy"))
            vhpcd.client.acknowledge(Ack(ready.generation, "n1"))
            assert [len(one.taken) for one in vhpcd.client.leases()] == [1, 0]
            small = allocation("n1", memory_mib=256)  # all of it stays outside the guest
            refused = vhpcd.client.open_generation(request(3), small)
            assert refused.state is LeaseState.REFUSED
            assert not started.done(), "all this while the fabric was waited for"
            os.kill(fabric.opensm.pid, signal.SIGCONT)
            assert started.result().state is LeaseState.READY
    finally:
        os.kill(fabric.opensm.pid, signal.SIGCONT)


@pytest.mark.promise("fabric.sweeps")
def test_a_hundred_jobs_cost_three_sweeps_and_three_to_end(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, sweep_interval_s=2.0, audit_interval_s=60.0) as vhpcd:
        wait_for(lambda: vhpcd.client.status().fabric.audited is not None, "vhpcd did not look at the fabric")
        before = fabric.sweeps()
        with ThreadPoolExecutor(100) as hooks:
            leases = list(hooks.map(lambda job_id: opened(vhpcd, job_id), range(1, 101)))
            assert {lease.state for lease in leases} == {LeaseState.READY}
            assert len({lease.network.pkey for lease in leases}) == 100
            assert sets(fabric) == holding(*((pkey, 1) for pkey in range(0x1000, 0x1004)))
            starts = fabric.sweeps() - before
            before = fabric.sweeps()
            list(hooks.map(lambda job_id: vhpcd.client.ending(job_id, 0), range(1, 101)))
        wait_for(lambda: set(states(vhpcd).values()) == {"quarantine"}, "not all are released")
        assert sets(fabric) == NOBODY
        assert 1 <= starts <= 3
        assert 1 <= fabric.sweeps() - before <= 3


def doctor_on_isolation(vhpcd: Vhpcd) -> list[CheckResult]:
    """The result of `vhpc doctor` about it on any host."""
    return [one for one in services.vhpcd(vhpcd.config, listener=True) if one.check == "fabric.open"]


@pytest.mark.promise("fabric.open")
def test_a_fabric_that_stays_open_is_unsafe_and_gives_no_key(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, open_deadline_s=1, apply_timeout_s=3) as vhpcd:
        opened(vhpcd, 1)
        fabric.pidfile.write_text("0\n")  # so that vhpcd cannot have it cured
        began = time.time()
        try:
            fabric.write_table(GUIDS[15], 0xFFFF)
            wait_for(lambda: not vhpcd.client.status().fabric.safe, "it is taken for safe")
            state = vhpcd.client.status().fabric
            assert state.open_since is not None
            assert began - 1 < state.open_since < time.time() + 1
            says = r"the fabric does not keep jobs apart: .* \(vhpcd starts no job with a key"
            with pytest.raises(FabricError, match=says):
                opened(vhpcd, 2)
            with pytest.raises(FabricError, match=says):
                vhpcd.client.lease(1, 0, "n1", 1.0)
            assert states(vhpcd) == {1: "active"}
            (found,) = doctor_on_isolation(vhpcd)
            assert found.level is Level.ERROR
            assert re.match(
                r"for \d+ s the fabric has been open or unreadable, so jobs with a key", found.what
            )
            assert found.what.endswith(vhpcd.client.status().fabric.what)
        finally:
            fabric.pidfile.write_text(f"{fabric.opensm.pid}\n")
        wait_for(lambda: vhpcd.client.status().fabric.what == "", "it is not cured")
        assert doctor_on_isolation(vhpcd) == []
        assert vhpcd.client.status().fabric.safe
        assert opened(vhpcd, 2).state is LeaseState.READY
        assert sets(fabric) == holding((0x1000, 1), (0x1001, 1))


# --- the subnet manager's life --------------------------------------------------------------------


def test_without_opensm_no_job_starts_and_keys_stay(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    opened(vhpcd, 1)
    fabric.opensm.kill()
    fabric.opensm.wait()
    try:
        with pytest.raises(FabricError, match="OpenSM does not run"):
            opened(vhpcd, 2)
        assert sets(fabric) == holding((0x1000, 1))
        wait_for(lambda: "does not run" in vhpcd.client.status().fabric.what, "the auditor does not see it")
        assert vhpcd.client.status().fabric.safe, "it is closed as it is"
        (found,) = doctor_on_isolation(vhpcd)
        assert (found.level, "OpenSM does not run" in found.what) == (Level.WARN, True)
    finally:
        fabric.start_opensm()
    assert opened(vhpcd, 2).state is LeaseState.READY
    assert sets(fabric) == holding((0x1000, 1), (0x1001, 1))


def test_vhpcd_killed_again_and_again_comes_to_the_same_end(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    for moment in range(6):
        with ThreadPoolExecutor(4) as hooks:
            asked = [hooks.submit(opened, vhpcd, job_id) for job_id in range(1, 5)]
            time.sleep(0.02 * moment)
            vhpcd.kill()
            vhpcd.start()
            assert {one.result().state for one in asked} == {LeaseState.READY}
        assert sets(fabric) == holding(*((pkey, 1) for pkey in range(0x1000, 0x1004)))
    for job_id in range(1, 5):
        vhpcd.client.ending(job_id, 0)
        vhpcd.kill()
        vhpcd.start()
    wait_for(lambda: set(states(vhpcd).values()) == {"quarantine"}, "not released")
    assert sets(fabric) == NOBODY


@pytest.mark.promise("fabric.old-database")
def test_yesterday_s_database_takes_no_key_away(vhpcd: Vhpcd, fabric: SimulatedFabric) -> None:
    opened(vhpcd, 1)
    vhpcd.stop()
    database = Path(vhpcd.config.controller.database)
    shutil.copy(database, vhpcd.folder / "yesterday")
    vhpcd.start()
    opened(vhpcd, 2, "n1", "n2")
    vhpcd.stop()
    shutil.copy(vhpcd.folder / "yesterday", database)
    vhpcd.start()
    assert "was not written from this database of vhpcd" in vhpcd.log
    with pytest.raises(FabricError, match="restored from a copy"):
        opened(vhpcd, 3)
    wait_for(lambda: "restored" in vhpcd.log and "not proven" in vhpcd.log, "the auditor says nothing")
    assert sets(fabric) == holding((0x1000, 1), (0x1001, 2))


# --- lost nodes and tombstones --------------------------------------------------------------------


@pytest.mark.promise("fabric.tombstone")
def test_the_key_of_a_lost_node_is_out_of_use_until_it_is_fenced(
    tmp_path: Path,
    daemon: Munged,
    fabric: SimulatedFabric,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, lost_after_s=1, pkey_last=0x1001) as vhpcd:
        monkeypatch.setenv("VHPC_CONFIG", str(tmp_path / "vhpc.toml"))
        vhpc = Vhpc(tmp_path, capsys)
        lease = opened(vhpcd, 1, "n1", "n2")
        for node in ("n1", "n2"):
            vhpcd.client.lease(1, 0, node, 5.0)
        said = vhpc("fabric", "fence", "n2", "--yes", code=1)
        assert said.startswith(f"{lease.generation} still runs on n2; end its job first")
        vhpcd.client.ending(1, 0)
        vhpcd.client.acknowledge(Ack(lease.generation, "n1"))
        wait_for(lambda: states(vhpcd) == {1: "tombstone"}, "no tombstone")
        carries(fabric, NOBODY)
        shown = vhpc.json("fabric", "show", "0x1000")["assignments"]
        assert [(one["node"], one["said"]) for one in shown[0]["nodes"]] == [
            ("n1", "is clean"),
            ("n2", "holds its part"),
        ]
        assert shown[0]["note"] == "n2 did not acknowledge within 1 s"
        assert shown[0]["port_guids"] == [f"{guid:#018x}" for guid in GUIDS[:2]]
        assert "node    n2  holds its part" in vhpc("fabric", "show", "1")
        opened(vhpcd, 2)
        with pytest.raises(FabricError, match="1 tombstones"):
            opened(vhpcd, 3)
        vhpc("fabric", "clear", "0x1000", code=1)
        assert "may still run on n2" in vhpc.error
        vhpc("fabric", "fence", "n2", code=1)
        assert "stdin is not a terminal to confirm it" in vhpc.error
        vhpc("fabric", "fence", "n9", "--yes", code=1)
        assert "no job that has ended waits for node n9" in vhpc.error
        assert vhpc.json("fabric", "fence", "n2", "--yes") == {
            "node": "n2",
            "fenced": [str(lease.generation)],
            "in_use": [],
        }
        assert f"{lease.generation}: uid {os.geteuid()} declares node n2 off" in vhpcd.log
        wait_for(lambda: states(vhpcd)[1] == "quarantine", "not released")


def test_a_node_that_returns_and_acknowledges_lifts_tombstones(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, lost_after_s=1) as vhpcd:
        lease = opened(vhpcd, 1)
        vhpcd.client.lease(1, 0, "n1", 5.0)
        vhpcd.client.ending(1, 0)
        wait_for(lambda: states(vhpcd) == {1: "tombstone"}, "no tombstone")
        carries(fabric, NOBODY)
        vhpcd.client.acknowledge(Ack(lease.generation, "n1"))
        wait_for(lambda: states(vhpcd) == {1: "quarantine"}, "not lifted")
        vhpcd.client.acknowledge(Ack(lease.generation, "n1", clean=False, note="a guest after all"))
        assert states(vhpcd) == {1: "tombstone"}, "it was too early"


def test_an_unanswered_tombstone_clears_when_no_port_has_the_key(
    vhpcd: Vhpcd, fabric: SimulatedFabric, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VHPC_CONFIG", str(vhpcd.folder / "vhpc.toml"))
    vhpc = Vhpc(vhpcd.folder, capsys)
    opened(vhpcd, 1)
    vhpc("fabric", "clear", "1", code=1)
    assert "1 has no tombstone" in vhpc.error
    vhpcd.stop()
    with sqlite3.connect(vhpcd.config.controller.database) as db:
        db.execute("DELETE FROM lease")  # whoever did that: the key is still somebody's, for all vhpcd knows
    vhpcd.start()
    wait_for(lambda: states(vhpcd) == {1: "tombstone"}, "no tombstone")
    vhpc("fabric", "clear", "0x2000", code=1)
    assert "0x2000 is free" in vhpc.error
    vhpc("fabric", "show", "junk", code=1)
    assert "write a key as 0x1000" in vhpc.error
    assert "it has no lease any more" in vhpc("fabric", "show", "0x1000")
    fabric.pidfile.write_text("0\n")  # so that vhpcd cannot take it off again
    try:
        fabric.write_table(GUIDS[9], 0x7FFF, 0x9000)
        vhpc("fabric", "clear", "0x1000", code=4)
        assert states(vhpcd) == {1: "tombstone"}
    finally:
        fabric.pidfile.write_text(f"{fabric.opensm.pid}\n")
    # OpenSM may not have written that port's table again at the first time
    wait_for(lambda: main(("fabric", "clear", "0x1000")) == 0, "it is not cleared")
    assert "no port has key 0x1000" in capsys.readouterr().out
    assert states(vhpcd) == {1: "quarantine"}
    assert sets(fabric) == NOBODY


def test_a_database_that_lost_keys_writes_the_file_only_by_force(
    vhpcd: Vhpcd, fabric: SimulatedFabric, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VHPC_CONFIG", str(vhpcd.folder / "vhpc.toml"))
    vhpc = Vhpc(vhpcd.folder, capsys)
    opened(vhpcd, 1)
    vhpcd.stop()
    Path(vhpcd.config.controller.database).unlink()
    vhpcd.start()
    with pytest.raises(FabricError, match="was not written from this database"):
        opened(vhpcd, 2, "n1", "n2")
    vhpc("fabric", "render", "--install", code=4)
    assert "was not written from this database" in vhpc.error
    assert sets(fabric) == holding((0x1000, 1))
    vhpc("fabric", "render", "--force", code=2)
    assert vhpc.json("fabric", "render", "--install", "--force") == {"told": True}
    assert "has vhpcd tell the fabric again, by force" in vhpcd.log
    assert sets(fabric) == NOBODY
    assert opened(vhpcd, 2, "n1", "n2").state is LeaseState.READY


def test_a_start_hears_of_a_fabric_that_hangs_before_it_gives_up(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, apply_timeout_s=60, request_timeout_s=8) as vhpcd:
        opened(vhpcd, 1)
        os.kill(fabric.opensm.pid, signal.SIGSTOP)
        try:
            with pytest.raises(FabricError, match=r"the fabric did not carry 2\.0\.[0-9a-f]{8} within 7 s"):
                opened(vhpcd, 2)
        finally:
            os.kill(fabric.opensm.pid, signal.SIGCONT)
        assert opened(vhpcd, 2).state is LeaseState.READY
