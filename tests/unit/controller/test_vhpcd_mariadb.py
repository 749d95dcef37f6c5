# SPDX-License-Identifier: Apache-2.0
"""The process vhpcd with its leases in MariaDB: killed, cut off, and checked by vhpc doctor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import mariadb_server
import msgspec
import pytest
from controller_lab import HAVE_MUNGED, Munged, allocation, request, stop, wait_for
from mariadb_server import Proxy, shared
from store_backends import ME
from vhpcd_process import Vhpcd, make
from web_site import end, start_job

from vhpc_slurm.cli.host.checks import CheckResult, Level, leasedatabase
from vhpc_slurm.cli.web.gathering import Viewing
from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.controller.store.choice import read_keys
from vhpc_slurm.controller.store.mariasession import trouble
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.keys import KeyState

pytestmark = pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT)
have_munged = pytest.mark.skipif(not HAVE_MUNGED, reason="needs munged: apt install munge")


@pytest.fixture
def proxy(run_dir: str) -> Iterator[Proxy]:
    found = Proxy(Path(run_dir), shared().socket)
    yield found
    found.close()


@pytest.fixture
def vhpcd(tmp_path: Path, daemon: Munged, proxy: Proxy) -> Iterator[Vhpcd]:
    database = msgspec.structs.replace(shared().database(timeout_s=2), socket=str(proxy.path))
    found = make(tmp_path, daemon, database=database).start()
    yield found
    if found.process is not None:
        stop(found.process)


@have_munged
def test_leases_survive_kill_9_of_vhpcd(vhpcd: Vhpcd) -> None:
    vhpcd.client.open_generation(request(1), allocation())
    vhpcd.kill()
    vhpcd.start()
    vhpcd.client.open_generation(request(2), allocation())
    assert sorted(one.lease.generation.job_id for one in vhpcd.client.leases()) == [1, 2]
    assert "database vhpc_" in vhpcd.client.status().database
    assert vhpcd.stop() == 0
    assert not Path(vhpcd.config.controller.database).exists(), "the file of SQLite is not made"


@have_munged
def test_clients_get_the_error_of_an_unreachable_server(vhpcd: Vhpcd, proxy: Proxy) -> None:
    vhpcd.client.open_generation(request(1), allocation())
    proxy.refuses, proxy.before = True, lambda _data: True
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(FabricError, match=r"cannot use the database .*connects again by itself"):
            vhpcd.client.open_generation(request(2), allocation())
        assert time.monotonic() - began < 25.0, "before the client's own deadline"
    assert vhpcd.log.count("CRITICAL") == 1, "logged once a minute"
    assert "Traceback" not in vhpcd.log
    proxy.refuses, proxy.before = False, lambda _data: False
    time.sleep(1.1)
    vhpcd.client.open_generation(request(2), allocation())
    assert sorted(one.lease.generation.job_id for one in vhpcd.client.leases()) == [1, 2]


@pytest.mark.promise("db.unsafe")
@have_munged
def test_vhpcd_does_not_start_on_an_unsafe_server(tmp_path: Path, daemon: Munged) -> None:
    vhpcd = make(tmp_path, daemon, database=shared().database())
    shared().query("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
    try:
        process = vhpcd.spawn()
        _, said = process.communicate(timeout=30)
    finally:
        shared().query("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert process.returncode == 1
    (line,) = said.splitlines()
    assert "innodb_flush_log_at_trx_commit is 0: a power loss would lose leases" in line


@have_munged
def test_vhpc_fabric_reads_keys_while_vhpcd_runs(vhpcd: Vhpcd) -> None:
    config = vhpcd.config
    assert read_keys(config).assignments == ()
    missing = msgspec.structs.replace(config.database, name="nowhere")
    with pytest.raises(FabricError, match="Unknown database"):
        read_keys(msgspec.structs.replace(config, database=missing))


@have_munged
def test_vhpc_web_shows_keys_in_quarantine(tmp_path: Path, daemon: Munged) -> None:
    database = shared().database()
    vhpcd = make(tmp_path, daemon, Fabric(backend="ethernet", vlan_first=100), database=database).start()
    try:
        start_job(vhpcd, 1, "nobody", "runs", "n1")
        end(vhpcd, start_job(vhpcd, 2, "nobody", "ended", "n1"), "n1", "")
        wait_for(lambda: vhpcd.client.status().leases["released"] == 1, "the ended job is not released")
        resting = Viewing(vhpcd.config, None).overview().resting
    finally:
        vhpcd.stop()
    assert [(one.generation.job_id, one.state) for one in resting] == [(2, KeyState.QUARANTINE)]


def settings_file(tmp_path: Path, **other: object) -> Config:
    path = tmp_path / "password"
    path.write_text("secret\n")
    path.chmod(0o600)
    shared().query("CREATE OR REPLACE USER 'doctor'@'localhost' IDENTIFIED BY 'secret'")
    database = shared().database(user="doctor", password_file=str(path), **other)
    shared().query(f"GRANT ALL ON {database.name}.* TO 'doctor'@'localhost'")
    return Config(controller=Controller(user=ME), database=database)


def found(config: Config, *, root: bool = True) -> dict[str, CheckResult]:
    return {one.check: one for one in leasedatabase.check(config, root=root)}


def test_doctor_says_whether_commits_are_on_the_disk(tmp_path: Path) -> None:
    config = settings_file(tmp_path)
    one = found(config)["database"]
    assert one.level is Level.OK
    assert "commits are on its disk" in one.what
    shared().query("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        one = found(config)["database"]
    finally:
        shared().query("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert one.level is Level.ERROR
    assert "innodb_flush_log_at_trx_commit is 2" in one.what
    assert found(config, root=False)["database"].level is Level.WARN
    assert found(Config()) == {}


def test_doctor_warns_of_clear_text_and_long_deadlines(tmp_path: Path) -> None:
    config = settings_file(tmp_path, timeout_s=10)
    remote = msgspec.structs.replace(config.database, host="db.example.org", password_file="")
    names = found(msgspec.structs.replace(config, database=remote))
    assert names["database.tls"].level is Level.WARN
    assert names["database.timeout"].level is Level.WARN
    assert "database.shared" not in names
    several = msgspec.structs.replace(config.controller, backup_hosts=("ctl2",))
    names = found(msgspec.structs.replace(config, controller=several))
    assert names["database.shared"].level is Level.WARN


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"log_bin": "ON", "sync_binlog": "0"}, "sync_binlog is 0"),
        ({"log_bin": "ON", "sync_binlog": "1"}, None),
        ({"innodb_flush_log_at_trx_commit": "0"}, "innodb_flush_log_at_trx_commit is 0"),
        ({"read_only": "ON"}, "read-only"),
    ],
)
def test_settings_of_servers_are_judged(changed: dict[str, str], why: str | None) -> None:
    safe = {
        "innodb_flush_log_at_trx_commit": "1",
        "log_bin": "OFF",
        "max_allowed_packet": "16777216",
        "read_only": "OFF",
        "sync_binlog": "0",
    }
    said = trouble(safe | changed)
    assert (said is None) if why is None else (said is not None and why in said[0])


def test_a_bad_name_of_a_database_is_refused_early() -> None:
    for name in ("", "a b", "x`; DROP", "ü"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": name}, Database)
