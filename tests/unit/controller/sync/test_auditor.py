# SPDX-License-Identifier: Apache-2.0
"""Findings and repairs of the auditor if something cannot be read or was changed behind OpenSM's back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backend_site import Site
from controller_lab import Munged, wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    SM_GUID,
    SimulatedFabric,
    crowding,
    holding,
    sets,
    simulated_fabric,
)
from opensm_disturbances import KINDS, folder, link_to_nothing, named_socket, pipe
from vhpcd_fabric import HAVE_ALL, NEEDED, a_vhpcd, carries, opened
from vhpcd_process import Vhpcd

from vhpc_slurm.config.fabric import Manager, Subnet
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import FabricFinding
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.model import Generation

pytestmark = [pytest.mark.skipif(not HAVE_ALL, reason=NEEDED), pytest.mark.long]

STRANGER = GUIDS[9]
JOINED = (0x7FFF, 0x9000)  # the first job's key


def descriptors(vhpcd: Vhpcd) -> int:
    assert vhpcd.process is not None
    return len(list(Path(f"/proc/{vhpcd.process.pid}/fd").iterdir()))


# --- files that are none ---------------------------------------------------------------------------


@pytest.mark.promise("fabric.audit", "attack.auditor")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_special_file_hides_no_open_port_and_is_replaced(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    site.open(1, "n1", "n2")
    kind(fabric.partitions)
    fabric.write_table(STRANGER, *JOINED)
    found = site.backend.audit(site.store.keys.snapshot())
    assert {one.port_guid for one in found} == {0, STRANGER}
    assert all(one.open for one in found), found
    site.service.audit.run()
    assert partitions.lint(fabric.partitions.read_bytes()) == ()
    assert sets(fabric) == holding((0x1000, 2))
    assert site.backend.audit(site.store.keys.snapshot()) == ()


@pytest.mark.promise("fabric.audit")
@pytest.mark.parametrize("kind", [folder, link_to_nothing, pipe, named_socket], ids=lambda k: k.__name__)
def test_an_unreadable_log_hides_no_open_port(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    site.open(1, "n1")
    kept = fabric.log.with_name("kept")
    fabric.log.rename(kept)  # OpenSM continues to write it
    fabric.log.touch()
    kind(fabric.log)
    try:
        fabric.write_table(STRANGER, *JOINED)
        with pytest.raises(FabricError, match="cannot read"):
            site.service.audit.run()
        state = site.service.audit.watch.state()
        assert state.open_since is not None
        assert f"port {STRANGER:#018x} has the keys 0x7fff 0x9000" in state.what
    finally:
        if kind is folder:
            (fabric.log / "something").unlink()
            fabric.log.rmdir()
        else:
            fabric.log.unlink()
        kept.rename(fabric.log)
    site.service.audit.run()
    assert sets(fabric) == holding((0x1000, 1))


@pytest.mark.promise("fabric.audit")
def test_audits_of_special_files_leak_no_descriptor(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, audit_interval_s=0.05) as vhpcd:
        opened(vhpcd, 1)
        wait_for(lambda: vhpcd.client.status().fabric.audited is not None, "no audit")
        before = descriptors(vhpcd)
        fabric.pidfile.write_text("0\n")  # so that it cannot be put right for good
        try:
            for _ in range(20):
                folder(fabric.partitions)
                wait_for(fabric.partitions.is_file, "not put back")
        finally:
            fabric.pidfile.write_text(f"{fabric.opensm.pid}\n")
        # a connection that ends counts for a moment; a leak stays
        wait_for(lambda: descriptors(vhpcd) <= before + 2, "more descriptors than before")


# --- tables behind OpenSM's back ---------------------------------------------------------------------


@pytest.mark.promise("fabric.repair", "attack.port-table")
@pytest.mark.parametrize(
    ("guid", "block", "entries"),
    [
        (STRANGER, 0, JOINED),
        (STRANGER, 1, (0x9000,)),
        (STRANGER, 0, (0xFFFF,)),
        (GUIDS[0], 0, (0x7FFF,)),
        (GUIDS[0], 0, ()),
        (GUIDS[0], 0, (0x9001, 0x7FFF)),
        (SM_GUID, 0, (0xFFFF, 0x9000)),
    ],
    ids=["joined", "joined in the second block", "reset", "lost", "emptied", "moved", "the master's"],
)
def test_a_table_changed_by_a_management_packet_is_written_again(
    fabric: SimulatedFabric,
    reader: FabricReader,
    tmp_path: Path,
    guid: int,
    block: int,
    entries: tuple[int, ...],
) -> None:
    site = Site(fabric, reader, tmp_path / "db", last=0x10FF)
    site.open(1, "n1", "n2")
    site.open(2, "n1")
    fabric.write_table(guid, *entries, block=block)
    fabric.sweep()
    assert sets(fabric) != holding((0x1000, 2), (0x1001, 1)), "OpenSM leaves it as it is"
    site.service.audit.run()
    assert sets(fabric) == holding((0x1000, 2), (0x1001, 1))
    assert partitions.parse(fabric.partitions.read_bytes())[1:] == tuple(
        one for one in partitions.of_snapshot(site.store.keys.snapshot())[1:]
    )
    assert site.backend.audit(site.store.keys.snapshot()) == ()


def test_all_ports_that_were_opened_by_packets_are_closed_again(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    site.open(1, "n1")
    for guid in GUIDS:
        fabric.write_table(guid, 0xFFFF)
    site.service.audit.run()
    assert sets(fabric) == holding((0x1000, 1))


@pytest.mark.promise("fabric.repair")
@pytest.mark.parametrize("guid", [STRANGER, GUIDS[0]], ids=["without a job", "of a job"])
def test_the_table_of_a_port_that_had_many_keys_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guid: int
) -> None:
    """OpenSM remembers the place of each key that a port has had, and puts new ones behind them."""
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric:
        fabric.replace(partitions.render((partitions.DEFAULT, *crowding(guid, 40)), 0, ""))
        fabric.sweep()
        fabric.replace(DEFAULT)
        fabric.sweep()
        reader = FabricReader(environment=fabric.environment)
        try:
            site = Site(fabric, reader, tmp_path / "db")
            site.open(1, "n1")
            for entries in ((0xFFFF,), (), (0x7FFF, 0x9000, 0xFFFF)):
                fabric.write_table(guid, *entries)
                site.service.audit.run()
                assert sets(fabric) == holding((0x1000, 1))
        finally:
            reader.close()


def test_a_vhpcd_killed_in_a_table_repair_knows_its_file(
    fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path
) -> None:
    site = Site(fabric, reader, tmp_path / "db")
    site.open(1, "n1")
    left = fabric.partitions.read_bytes() + f"rewrite_1003=0x1003 : {STRANGER:#018x}=limited ;\n".encode()
    fabric.replace(left)
    fabric.sweep()
    again = Site(fabric, reader, tmp_path / "db")
    again.backend.validate(again.store.keys.snapshot())
    again.service.audit.run()
    assert sets(fabric) == holding((0x1000, 1))


def test_a_running_vhpcd_closes_a_port_and_gives_a_key_back(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric) as vhpcd:
        first = opened(vhpcd, 1, "n1", "n2")
        fabric.write_table(STRANGER, *JOINED)
        carries(fabric, holding((0x1000, 2)))
        fabric.write_table(GUIDS[1], 0x7FFF)
        carries(fabric, holding((0x1000, 2)))
        wait_for(lambda: vhpcd.client.status().fabric.what == "", "not well again")
        assert f"{first.generation} has lost its key: port {GUIDS[1]:#018x} has" in vhpcd.log
        assert vhpcd.client.status().fabric.lost == ()


@pytest.mark.promise("fabric.repair", "attack.port-table")
def test_a_key_that_cannot_be_released_is_named_in_time(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, open_deadline_s=1, apply_timeout_s=3) as vhpcd:
        first, _ = opened(vhpcd, 1), opened(vhpcd, 2)
        fabric.pidfile.write_text("0\n")  # so that OpenSM cannot be told
        try:
            fabric.write_table(GUIDS[0], 0x7FFF)
            wait_for(lambda: vhpcd.client.status().fabric.lost, "nobody notices")
            state = vhpcd.client.status().fabric
            assert [name for name, _ in state.lost] == [str(first.generation)]
            assert f"port {GUIDS[0]:#018x} has the keys 0x7fff, and should have" in state.lost[0][1]
            assert (state.safe, state.open_since) == (True, None), "it hurts nobody else"
        finally:
            fabric.pidfile.write_text(f"{fabric.opensm.pid}\n")
        carries(fabric, holding((0x1000, 1), (0x1001, 1)))
        wait_for(lambda: not vhpcd.client.status().fabric.lost, "not forgiven")


# --- what cannot be read -------------------------------------------------------------------------------


@pytest.fixture
def with_standby(tmp_path: Path, daemon: Munged, fabric: SimulatedFabric) -> Iterator[Vhpcd]:
    """A vhpcd with a standby behind a command, which fails when there is a file `gone`."""
    standby = fabric.folder / "standby"
    standby.mkdir(exist_ok=True)
    (standby / "partitions.conf").write_bytes(DEFAULT)
    (standby / "log").write_bytes(b"")
    (standby / "pid").write_text(f"{fabric.opensm.pid}\n")
    (tmp_path / "sm.toml").write_text(
        f'[fabric]\npartitions = "{standby}/partitions.conf"\n'
        f'opensm_pidfile = "{standby}/pid"\nopensm_log = "{standby}/log"\n'
    )
    script = (
        f"test -e {tmp_path}/gone && exit 255; echo $$ >{tmp_path}/connection; "
        f"VHPC_CONFIG={tmp_path}/sm.toml PYTHONPATH={Path(__file__).parents[4]}/python "
        f"exec {sys.executable} -m vhpc_slurm.cli.main fabric manager"
    )
    managers = (
        Manager(partitions=str(fabric.partitions), pidfile=str(fabric.pidfile), log=str(fabric.log)),
        Manager(command=("sh", "-c", script)),
    )
    subnets = (Subnet(managers=managers),)
    with a_vhpcd(
        tmp_path, daemon, fabric, subnets=subnets, unread_deadline_s=6, open_deadline_s=60, apply_timeout_s=20
    ) as vhpcd:
        yield vhpcd


@pytest.mark.promise("fabric.audit", "attack.auditor")
def test_an_unreachable_standby_hides_no_open_port(
    with_standby: Vhpcd, fabric: SimulatedFabric, tmp_path: Path
) -> None:
    opened(with_standby, 1, "n1", "n2")
    wait_for(lambda: with_standby.client.status().fabric.audited is not None, "no audit")
    (tmp_path / "gone").touch()
    os.kill(int((tmp_path / "connection").read_text()), signal.SIGKILL)
    wait_for(lambda: "cannot reach" in with_standby.client.status().fabric.what, "not noticed")
    assert with_standby.client.status().fabric.open_since is not None
    fabric.write_table(STRANGER, *JOINED)
    carries(fabric, holding((0x1000, 2)))
    for guid in GUIDS:
        fabric.write_table(guid, 0xFFFF)
    carries(fabric, holding((0x1000, 2)))
    wait_for(lambda: not with_standby.client.status().fabric.safe, "taken for safe")
    with pytest.raises(FabricError, match="the fabric does not keep jobs apart"):
        opened(with_standby, 2)
    (tmp_path / "gone").unlink()
    wait_for(lambda: with_standby.client.status().fabric.what == "", "not well again")
    assert with_standby.client.status().fabric.safe


@pytest.mark.promise("fabric.audit", "attack.auditor")
def test_a_silent_adapter_is_named_and_is_not_safe(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with a_vhpcd(tmp_path, daemon, fabric, unread_deadline_s=2) as vhpcd:
        opened(vhpcd, 1)
        fabric.silence("H16")
        try:
            wait_for(lambda: "1 nodes do not answer" in vhpcd.client.status().fabric.what, "not seen")
            assert "smpquery -D nodeinfo 0,1,16" in vhpcd.client.status().fabric.what
            fabric.write_table(STRANGER, *JOINED)
            wait_for(lambda: set(fabric.tables(STRANGER)[STRANGER]) == {0x7FFF}, "not closed")
            wait_for(lambda: not vhpcd.client.status().fabric.safe, "taken for safe")
        finally:
            fabric.silence("H16", silent=False)
        wait_for(lambda: vhpcd.client.status().fabric.what == "", "not well again")
        assert vhpcd.client.status().fabric.safe


@pytest.mark.promise("fabric.audit")
def test_an_unreadable_fabric_does_not_stay_safe(fabric: SimulatedFabric, tmp_path: Path) -> None:
    reader = FabricReader(environment=fabric.environment)
    reader.scan(60.0)
    site = Site(fabric, reader, tmp_path / "db", timeout_s=2.0)
    site.open(1, "n1")
    audit = site.service.audit
    now = 0.0
    audit.watch = IsolationWatch(60.0, 300.0, lambda: now)
    reader._child.close()
    reader._child._command = ("false",)
    audit.run()
    assert "cannot read the fabric" in audit.watch.state().what
    assert (audit.watch.state().safe, audit.watch.state().open_since is not None) == (True, True)
    now = 301.0
    assert not audit.watch.state().safe
    with pytest.raises(FabricError, match="does not keep jobs apart"):
        audit.watch.must_be_safe()


# --- what the watch makes of it ----------------------------------------------------------------------

OPEN = FabricFinding(1, "port 1 is open", open=True)
BLIND = FabricFinding(0, "nobody answers", unread=True, blind=True)
AWAY = FabricFinding(0, "the standby is away", unread=True)
LOST = FabricFinding(2, "port 2 has nothing", lost=True)
JOB = Generation(7, 0, "00000001")


def test_an_open_fabric_that_cannot_be_read_any_more_stays_open() -> None:
    now = 0.0
    watch = IsolationWatch(60.0, 300.0, lambda: now)
    watch.saw((OPEN,))
    now = 50.0
    watch.saw((BLIND,))
    now = 61.0
    assert not watch.state().safe
    watch.saw((AWAY,))
    assert watch.state().safe, "the ports were seen to be closed"
    now = 349.0
    assert watch.state().safe
    watch.saw((AWAY,))
    now = 400.0
    assert not watch.state().safe


def test_a_lost_key_counts_from_when_it_was_first_missed() -> None:
    now = 0.0
    watch = IsolationWatch(60.0, 300.0, lambda: now)
    watch.saw((LOST,), holders={2: JOB})
    now = 40.0
    watch.saw((BLIND,), holders={2: JOB})
    now = 61.0
    assert watch.state().lost == ((JOB, LOST.what),)
    watch.saw((LOST,), holders={})
    assert watch.state().lost == (), "it is nobody's any more"
    watch.saw((LOST,), holders={2: JOB})
    assert watch.state().lost == ()
