# SPDX-License-Identifier: Apache-2.0
"""Database servers, tables and passwords that vhpcd refuses, and what it says."""

from __future__ import annotations

from pathlib import Path

import mariadb_server
import msgspec
import pytest
from lease_records import put, record
from mariadb_server import Proxy, shared
from store_backends import ME, open_through

from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.errors import FabricError

pytestmark = pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT)


@pytest.mark.promise("db.unsafe")
@pytest.mark.parametrize(
    ("change", "back", "why"),
    [
        (
            "innodb_flush_log_at_trx_commit = 2",
            "innodb_flush_log_at_trx_commit = 1",
            r"innodb_flush_log_at_trx_commit is 2: a power loss would lose leases.*\(set innodb_flush",
        ),
        ("max_allowed_packet = 1048576", "max_allowed_packet = 16777216", "too small for leases"),
        ("read_only = 1", "read_only = 0", "the server is read-only"),
    ],
)
def test_a_server_that_may_lose_leases_is_refused(
    mariadb_settings: Database, change: str, back: str, why: str
) -> None:
    shared().query(f"SET GLOBAL {change}")
    try:
        with pytest.raises(FabricError, match=why):
            MariaStore(mariadb_settings, ME)
    finally:
        shared().query(f"SET GLOBAL {back}")
    MariaStore(mariadb_settings, ME).close()


def test_tables_of_others_and_newer_versions_are_not_changed(mariadb_settings: Database) -> None:
    shared().query("CREATE TABLE job_table (n INT)", mariadb_settings.name)
    with pytest.raises(FabricError, match="it has tables of another program"):
        MariaStore(mariadb_settings, ME)
    shared().query("DROP TABLE job_table", mariadb_settings.name)
    MariaStore(mariadb_settings, ME).close()
    shared().query("INSERT INTO vhpc_schema VALUES (99)", mariadb_settings.name)
    with pytest.raises(FabricError, match=r"it has schema 99 \(this vhpcd knows schema \d+; was it down"):
        MariaStore(mariadb_settings, ME)


@pytest.mark.parametrize("statements", [1, 4, 12])
def test_tables_that_a_killed_vhpcd_has_begun_are_completed(
    mariadb_settings: Database, mariadb_proxy: Proxy, statements: int
) -> None:
    made: list[bytes] = []

    def killed(data: bytes) -> bool:
        if b"CREATE TABLE" in data:
            made.append(data)
        return len(made) > statements

    mariadb_proxy.before = killed
    with pytest.raises(FabricError):
        open_through(mariadb_proxy, mariadb_settings)
    assert len(shared().query("SHOW TABLES", mariadb_settings.name)) == statements
    store = MariaStore(mariadb_settings, ME)
    put(store, record())
    assert store.live() == (record(),)
    store.close()


def test_a_missing_database_or_right_is_reported(mariadb_settings: Database) -> None:
    with pytest.raises(FabricError, match=r"Unknown database.*see 'Leases in MariaDB'"):
        MariaStore(msgspec.structs.replace(mariadb_settings, name="nowhere"), ME)
    with pytest.raises(FabricError, match=r"Access denied.*grant its user all rights"):
        MariaStore(msgspec.structs.replace(mariadb_settings, user="nobody_known"), ME)
    with pytest.raises(FabricError, match=r"is the server running\?"):
        MariaStore(msgspec.structs.replace(mariadb_settings, socket="/nonexistent"), ME)


@pytest.mark.promise("attack.database-password")
def test_passwords_come_from_a_file_that_others_cannot_read(
    mariadb_settings: Database, tmp_path: Path
) -> None:
    shared().query("CREATE OR REPLACE USER 'vhpc'@'localhost' IDENTIFIED BY 'söcret'")
    shared().query(f"GRANT ALL ON {mariadb_settings.name}.* TO 'vhpc'@'localhost'")
    path = tmp_path / "password"
    mine = msgspec.structs.replace(mariadb_settings, user="vhpc", password_file=str(path))
    with pytest.raises(FabricError, match=r"cannot use database\.password_file .*No such file"):
        MariaStore(mine, ME)
    path.write_text("söcret\n")
    path.chmod(0o640)
    with pytest.raises(FabricError, match="chmod 600"):
        MariaStore(mine, ME)
    path.chmod(0o600)
    MariaStore(mine, ME).close()
    for content in ("", "two\nlines\n", "x" * 5000):
        path.write_text(content)
        with pytest.raises(FabricError, match="does not have one line"):
            MariaStore(mine, ME)
    path.write_text("wrong\n")
    with pytest.raises(FabricError, match="Access denied"):
        MariaStore(mine, ME)
    path.unlink()
    (tmp_path / "other").write_text("söcret\n")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(FabricError, match=r"cannot use database\.password_file"):
        MariaStore(mine, ME)
