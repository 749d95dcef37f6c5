# SPDX-License-Identifier: Apache-2.0
"""The same store in each of its engines."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import mariadb_server
import msgspec
import pytest

from vhpc_slurm.config import Config
from vhpc_slurm.config.controller import Controller
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.sqlstore import SqlStore

ME = pwd.getpwuid(os.geteuid()).pw_name
Place = Path | str | Database
"""Where leases are: an SQLite file, or a database of the tests' MariaDB server."""
ENGINES = [
    "sqlite",
    pytest.param(
        "mariadb", marks=pytest.mark.skipif(not mariadb_server.HAVE_SERVER, reason=mariadb_server.WHY_NOT)
    ),
]


def place(engine: str, folder: Path) -> Place:
    """A place without leases."""
    return mariadb_server.shared().database() if engine == "mariadb" else folder / "leases.sqlite"


def open_at(found: Place) -> SqlStore:
    """The store at a place, which may have leases."""
    return MariaStore(found, ME) if isinstance(found, Database) else SqliteStore(found)


def open_through(proxy: mariadb_server.Proxy, settings: Database) -> MariaStore:
    """The store of a database whose connections a test cuts."""
    return MariaStore(msgspec.structs.replace(settings, socket=str(proxy.path)), ME)


def written(found: Place) -> str:
    """A place as an argument of a process."""
    return msgspec.json.encode(found).decode() if isinstance(found, Database) else str(found)


def place_from(text: str) -> Place:
    """A place that is an argument of this process."""
    return msgspec.json.decode(text, type=Database) if text.startswith("{") else text


def opened_from(text: str) -> SqlStore:
    """The store at such a place."""
    return open_at(place_from(text))


def configured(folder: Path, database: Place) -> Config:
    """A configuration with a server's database, whose leases are in an SQLite file of ``folder``."""
    assert isinstance(database, Database)
    return Config(
        controller=Controller(user=ME, database=str(folder / "state/leases.sqlite")),
        database=msgspec.structs.replace(database, engine="sqlite"),
    )
