# SPDX-License-Identifier: Apache-2.0
"""Several OpenSM on simulated fabrics: a master with a standby, two subnets, one behind a command."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
from controller_lab import Alone, allocation, identity, request, wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    HAVE_SIMULATOR,
    NEEDED,
    SM_GUID,
    SimulatedFabric,
    StandbyOpensm,
    may_lose_packets,
    sets,
    simulated_fabric,
    unless_lost,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pace import examples, limit
from vhpc_slurm.config.fabric import Fabric, Manager, Subnet
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.backend import FabricRefusedError, KeyPolicy
from vhpc_slurm.fabric.managers import ManagerRequest, Managers, RemoteOpensm, SeveralReaders, serve
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.opensm import Opensm, SubnetManager, sweep
from vhpc_slurm.fabric.opensm_file import OpensmFile
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.select import backend
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.model import LeaseRecord, LeaseState

pytestmark = [pytest.mark.skipif(not HAVE_SIMULATOR, reason=NEEDED), pytest.mark.long, may_lose_packets]

TIMEOUT_S = 5.0
HELD = {0x7FFF, 0x9000}


class Site:
    """vhpcd's own parts over some managers."""

    def __init__(self, database: Path, managers: Managers, readers: list[FabricReader]) -> None:
        self.store = SqliteStore(database)
        self.backend = OpensmFile(
            KeyPolicy(KeyPool(0x1000, 0x1003)),
            managers,
            Readback(SeveralReaders(readers), TIMEOUT_S),
            self.store.keys.knows,
        )
        self.service = Alone(self.store, self.backend, reserve_mib=0, quarantine_s=30.0)

    def open(self, job_id: int, *nodes: str) -> LeaseRecord:
        return self.service.open(request(job_id), allocation(*nodes), identity(0))


def local(one: SimulatedFabric | StandbyOpensm) -> Opensm:
    return Opensm(one.partitions, one.pidfile, one.log, TIMEOUT_S)


def remote(tmp_path: Path, one: SimulatedFabric | StandbyOpensm) -> RemoteOpensm:
    """As another host would be reached, less the SSH."""
    (tmp_path / "sm.toml").write_text(
        f'[fabric]\npartitions = "{one.partitions}"\n'
        f'opensm_pidfile = "{one.pidfile}"\nopensm_log = "{one.log}"\n'
    )
    environment = ("env", f"VHPC_CONFIG={tmp_path}/sm.toml")
    command = (*environment, sys.executable, "-m", "vhpc_slurm.cli.main", "fabric", "manager")
    return RemoteOpensm(command, 30.0)


@pytest.fixture
def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SimulatedFabric, StandbyOpensm, FabricReader]]:
    folder = tmp_path / "pair"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with simulated_fabric(folder) as fabric:
        standby = fabric.start_standby("H16", DEFAULT)
        # From a host that runs neither: what is read must not depend on who is master.
        environment = fabric.environment | {"SIM_HOST": "H15"}
        with closing(FabricReader(environment=environment)) as reader:
            reader.scan(60.0)
            yield fabric, standby, reader


@pytest.mark.promise("fabric.standby")
def test_a_standby_that_takes_over_has_the_current_file(
    pair: tuple[SimulatedFabric, StandbyOpensm, FabricReader], tmp_path: Path
) -> None:
    fabric, standby, reader = pair
    site = Site(tmp_path / "db", Managers([[local(fabric), local(standby)]], TIMEOUT_S), [reader])
    record = site.open(1, "n1", "n2")
    assert record.lease.state is LeaseState.READY
    assert sets(fabric, *GUIDS[:3]) == {GUIDS[0]: HELD, GUIDS[1]: HELD, GUIDS[2]: {0x7FFF}}
    assert standby.partitions.read_bytes() == fabric.partitions.read_bytes()
    assert not standby.says(b"SUBNET UP"), "it only stood by"
    assert site.backend.audit(site.store.keys.snapshot()) == ()
    fabric.opensm.kill()
    fabric.opensm.wait()
    with unless_lost():  # the answer to the question whether the master still runs
        wait_for(lambda: standby.says(b"SUBNET UP"), "the standby does not take over")
    assert sets(fabric, *GUIDS[:3]) == {GUIDS[0]: HELD, GUIDS[1]: HELD, GUIDS[2]: {0x7FFF}}
    assert site.open(2, "n1").lease.state is LeaseState.READY, "and jobs begin and end as before"
    site.service.end(1, 0)
    assert sets(fabric, GUIDS[0], GUIDS[4]) == {GUIDS[0]: {0x7FFF}, GUIDS[4]: {0x7FFF, 0x9001}}
    assert site.backend.audit(site.store.keys.snapshot()) == ()


@pytest.mark.promise("fabric.standby")
@pytest.mark.slow
def test_a_returning_master_has_the_current_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is killed, and when a standby has taken over it is started again."""
    monkeypatch.chdir(tmp_path)
    with simulated_fabric(tmp_path) as fabric, ExitStack() as stack:
        standby = fabric.start_standby("H16", DEFAULT)
        reader = stack.enter_context(
            closing(FabricReader(environment=fabric.environment | {"SIM_HOST": "H15"}))
        )
        reader.scan(60.0)
        site = Site(tmp_path / "db", Managers([[local(fabric), local(standby)]], TIMEOUT_S), [reader])
        site.open(1, "n1", "n2")
        fabric.opensm.kill()
        fabric.opensm.wait()
        with unless_lost():
            wait_for(lambda: standby.says(b"SUBNET UP"), "the standby does not take over")
        # what the first master does not see: a job comes, and one goes
        site.open(2, "n1")
        site.service.end(1, 0)
        held = {GUIDS[0]: {0x7FFF}, GUIDS[1]: {0x7FFF}, GUIDS[4]: {0x7FFF, 0x9001}}
        assert sets(fabric, *held) == held
        with unless_lost():
            fabric.start_opensm()
        assert sets(fabric, *held) == held
        assert [port.guid for port in reader.scan(30.0).ports if port.master] == [SM_GUID]
        assert site.backend.audit(site.store.keys.snapshot()) == ()
        assert site.open(3, "n1").lease.state is LeaseState.READY
        assert sets(fabric, *held, GUIDS[8]) == held | {GUIDS[8]: {0x7FFF, 0x9002}}


def test_a_standby_with_another_file_is_found_and_repaired(
    pair: tuple[SimulatedFabric, StandbyOpensm, FabricReader], tmp_path: Path
) -> None:
    fabric, standby, reader = pair
    site = Site(tmp_path / "db", Managers([[local(fabric), local(standby)]], TIMEOUT_S), [reader])
    site.open(1, "n1")
    standby.partitions.write_bytes(DEFAULT)
    (found,) = site.backend.audit(site.store.keys.snapshot())
    assert (found.what, found.open) == (
        f"{standby.partitions} is not the same file as {fabric.partitions}",
        True,
    )
    site.service.audit.run()
    assert standby.partitions.read_bytes() == fabric.partitions.read_bytes()
    assert site.backend.audit(site.store.keys.snapshot()) == ()


@pytest.mark.promise("fabric.standby")
def test_opensm_reads_no_file_that_a_standby_lacks(
    pair: tuple[SimulatedFabric, StandbyOpensm, FabricReader], tmp_path: Path
) -> None:
    fabric, _, reader = pair
    unreachable = RemoteOpensm(("false",), 5.0)
    managers = Managers([[local(fabric), unreachable]], TIMEOUT_S)
    site = Site(tmp_path / "db", managers, [reader])
    with pytest.raises(FabricError, match="cannot reach the file behind `false`"):
        site.backend.validate(site.store.keys.snapshot())
    before, file = fabric.sweeps(), fabric.partitions.read_bytes()
    with pytest.raises(FabricError, match="cannot reach the file behind `false`"):
        site.open(1, "n1")
    assert (fabric.sweeps(), fabric.partitions.read_bytes()) == (before, file)


def test_an_opensm_behind_a_command_is_as_good_as_one_here(
    pair: tuple[SimulatedFabric, StandbyOpensm, FabricReader], tmp_path: Path
) -> None:
    fabric, standby, reader = pair
    far: SubnetManager = remote(tmp_path, fabric)
    site = Site(tmp_path / "db", Managers([[far, local(standby)]], 30.0), [reader])
    site.backend.validate(site.store.keys.snapshot())
    assert site.open(1, "n1").lease.state is LeaseState.READY
    assert sets(fabric, GUIDS[0]) == {GUIDS[0]: HELD}
    assert site.backend.audit(site.store.keys.snapshot()) == ()
    with pytest.raises(FabricError, match="the file in the request is refused, line 1"):
        far.replace(b"Default=0x7fff : ALL=full ;\n")
    assert partitions.lint(fabric.partitions.read_bytes()) == ()
    os.kill(fabric.opensm.pid, signal.SIGKILL)
    fabric.opensm.wait()
    with pytest.raises(FabricError, match="OpenSM does not run"):
        far.check()


def test_ports_on_two_subnets_have_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        fabrics = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            monkeypatch.chdir(folder)
            fabrics.append(stack.enter_context(simulated_fabric(folder)))
        readers = [stack.enter_context(closing(FabricReader(environment=one.environment))) for one in fabrics]
        managers = Managers([[local(one)] for one in fabrics], TIMEOUT_S)
        site = Site(tmp_path / "db", managers, readers)
        record = site.open(1, "n1")
        assert [sets(one, GUIDS[0]) for one in fabrics] == [{GUIDS[0]: HELD}] * 2
        snapshot = site.store.keys.snapshot()
        assert site.backend.audit(snapshot) == ()
        fabrics[1].replace(DEFAULT)
        fabrics[1].sweep()
        assert {one.port_guid for one in site.backend.audit(snapshot)} == {0, GUIDS[0]}
        site.service.audit.run()
        assert [sets(one, GUIDS[0]) for one in fabrics] == [{GUIDS[0]: HELD}] * 2
        os.kill(fabrics[1].opensm.pid, signal.SIGKILL)
        fabrics[1].opensm.wait()
        with pytest.raises(FabricError, match="OpenSM does not run"):
            site.open(2, "n1")
        fabrics[1].start_opensm()
        assert site.open(2, "n1").lease.state is LeaseState.READY
        site.service.end(1, 0)
        assert [sets(one, GUIDS[0]) for one in fabrics] == [{GUIDS[0]: {0x7FFF}}] * 2
        assert record.lease.network.pkey == 0x1000


def test_only_the_master_is_a_full_member_of_the_default(
    pair: tuple[SimulatedFabric, StandbyOpensm, FabricReader],
) -> None:
    _, _, reader = pair
    scan = reader.scan(30.0)
    assert [port.guid for port in scan.ports if port.master] == [SM_GUID]
    assert scan.tables()[SM_GUID] == (0xFFFF,)
    assert scan.tables()[GUIDS[15]] == (0x7FFF,)


# --- the other end of a command ------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Opensm:
    (tmp_path / "log").write_bytes(b"nothing\nSUBNET UP\nother\nPARSE ERROR line 3\n")
    (tmp_path / "partitions.conf").write_bytes(DEFAULT)
    return Opensm(tmp_path / "partitions.conf", tmp_path / "pid", tmp_path / "log", 1.0)


DEAF_ONCE = """
import pathlib, signal, sys
pathlib.Path("/proc/self/comm").write_text("opensm")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
pathlib.Path(sys.argv[1], "pid").write_text(str(__import__("os").getpid()))
signal.sigwait([signal.SIGHUP])
signal.sigwait([signal.SIGHUP])
with open(sys.argv[1] + "/log", "a") as log:
    log.write("SUBNET UP\\n")
"""


def test_a_signal_that_opensm_loses_is_sent_again(here: Opensm, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF_ONCE, tmp_path]) as deaf:
        try:
            wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "no process")
            sweep([[here]], limit(10))
        finally:
            deaf.kill()


def test_only_relevant_lines_of_a_log_are_sent(here: Opensm) -> None:
    inode = here.mark()[0].inode
    asked = f'{{"do": "since", "mark": {{"inode": {inode}, "size": 0}}}}'
    assert serve(here, asked.encode()).said == b"SUBNET UP\nPARSE ERROR line 3"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"read",
        b"{}",
        b'{"do": "sweep"}',
        b'{"do": "read", "else": 1}',
        b'{"do": "since"}',
        b'{"do": "since", "mark": {"inode": -1, "size": "x"}}',
        b'{"do": "replace"}',
        b'{"do": "replace", "file": "???"}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_request_is_refused(here: Opensm, tmp_path: Path, line: bytes) -> None:
    assert serve(here, line).error is not None
    assert (tmp_path / "partitions.conf").read_bytes() == DEFAULT


@given(line=st.binary(max_size=60))
@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_input_gets_an_answer(here: Opensm, line: bytes) -> None:
    assert serve(here, line).error is not None


@pytest.mark.parametrize("data", [b"", b"# none\n", b"Default=0x7fff : ALL=full ;\n", DEFAULT[:-3]])
def test_no_host_takes_a_file_that_opens_its_fabric(here: Opensm, tmp_path: Path, data: bytes) -> None:
    request = msgspec.json.encode(ManagerRequest("replace", file=data))
    assert serve(here, request).error is not None
    assert (tmp_path / "partitions.conf").read_bytes() == DEFAULT


def test_the_command_answers_line_by_line_until_its_input_ends(here: Opensm, tmp_path: Path) -> None:
    (tmp_path / "vhpc.toml").write_text(f'[fabric]\npartitions = "{tmp_path}/partitions.conf"\n')
    done = subprocess.run(
        [sys.executable, "-m", "vhpc_slurm.cli.main", "fabric", "manager"],
        env=os.environ | {"VHPC_CONFIG": str(tmp_path / "vhpc.toml")},
        input=b'{"do": "read"}\nread; reboot\n{"do": "read"}\n',
        capture_output=True,
        check=True,
        timeout=60,
    )
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert base64.b64decode(first["file"]) == DEFAULT
    assert second["error"][0] == "the request cannot be read"
    assert third == first


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("cat >/dev/null", "no answer in time"),
        ("read line; echo hello", "JSON is malformed"),
        ("echo no route >&2; exit 255", "it has ended: status 255, no route"),
        ("sleep 60", "no answer in time"),
        ("read line; echo '{\"unknown\": 1}'", "unknown"),
    ],
)
def test_an_invalid_answer_of_a_command_is_an_error(script: str, message: str) -> None:
    with pytest.raises(FabricError, match=message):
        RemoteOpensm(("sh", "-c", script), 1.0).read()


def test_a_command_that_does_not_listen_is_not_waited_for() -> None:
    with pytest.raises(FabricError, match="it does not read its input"):
        RemoteOpensm(("sleep", "60"), 1.0).replace(bytes(1 << 20))


def test_a_broken_connection_is_opened_again(tmp_path: Path) -> None:
    script = f"test -e {tmp_path}/once || {{ touch {tmp_path}/once; exit 255; }}; read line; echo '{{}}'"
    remote = RemoteOpensm(("sh", "-c", script), 5.0)
    with pytest.raises(FabricError, match="it has ended: status 255"):
        remote.check()
    remote.check()
    remote.close()


def test_a_missing_command_is_an_error() -> None:
    with pytest.raises(FabricError, match="No such file"):
        RemoteOpensm(("/none",), 1.0).read()


def test_a_complaint_elsewhere_is_a_complaint_here() -> None:
    answer = '{"error": ["OpenSM does not like it", "PARSE ERROR", ""], "complaint": true}'
    with pytest.raises(FabricRefusedError, match="PARSE ERROR"):
        RemoteOpensm(("sh", "-c", f"read line; echo '{answer}'"), 5.0).hang_up()


@pytest.mark.parametrize("manager", [Manager(), Manager(partitions="/p"), Manager(command=("x",), log="/l")])
def test_a_manager_that_cannot_be_spoken_to_is_refused(manager: Manager) -> None:
    fabric = Fabric(backend="opensm-file", subnets=(Subnet(managers=(manager,)),))
    with pytest.raises(FabricError, match="give it partitions, pidfile and log, or a command"):
        backend(fabric, lambda _epoch, _tag: False)
