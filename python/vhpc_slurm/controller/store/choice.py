# SPDX-License-Identifier: Apache-2.0
"""Which engine keeps the leases: what ``database.engine`` of vhpc.toml says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.controller.store import mariasession
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.controller.store.errors import DamagedError, EngineError
from vhpc_slurm.controller.store.keys import SqlKeys, read_snapshot
from vhpc_slurm.controller.store.mariadb import MariaDatabase
from vhpc_slurm.controller.store.mariastore import MariaStore, explain
from vhpc_slurm.controller.store.sqlstore import SqlStore
from vhpc_slurm.errors import NodeError
from vhpc_slurm.fabric.keys import KeySnapshot


def open_store(config: Config) -> SqlStore:
    """The store that this configuration names; FabricError when it cannot be used."""
    if config.database.engine == "mariadb":
        return MariaStore(config.database, config.controller.user)
    return SqliteStore(config.controller.database)


def name(config: Config) -> str:
    """The database in one clause, for messages."""
    if config.database.engine == "mariadb":
        return mariasession.where(config.database)
    return config.controller.database


def lock_path(config: Config) -> Path:
    """The file whose lock a vhpcd of this host holds, whatever the engine."""
    return Path(config.controller.database)


def read_keys(config: Config) -> KeySnapshot:
    """The assignments of keys in a database that a running vhpcd may be writing; changes nothing.

    Raises:
        FabricError: it cannot be read, or is of a vhpcd that had no keys.
    """
    if config.database.engine == "sqlite":
        return read_snapshot(config.controller.database)
    with closing(MariaDatabase(config.database, config.controller.user)) as db:
        try:
            db.begin()
            return SqlKeys(db).snapshot()
        except EngineError as err:
            raise explain(err, config.database) from err
        except ValueError as err:
            raise DamagedError(
                mariasession.where(config.database), f"an assignment of a key cannot be read: {err}"
            ) from err


@contextlib.contextmanager
def only_one(database: Path) -> Iterator[None]:
    """Hold the lock of the database: two writers would assign the same keys twice.

    NodeError: its folder cannot be used, or another process holds it.
    """
    try:
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = files.open_lock(Path(f"{database}.lock"))
    except OSError as err:
        raise NodeError(
            f"vhpcd cannot use {database}", str(err), "create its folder, owned by its user"
        ) from err
    try:
        if not files.try_lock(lock):
            owner = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
            raise NodeError(f"another vhpcd uses {database}", f"it is process {owner}")
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)
