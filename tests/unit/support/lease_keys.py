# SPDX-License-Identifier: Apache-2.0
"""vhpcd's parts for tests of the keys that go with a lease."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

from controller_lab import Alone, allocation, identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.assembly import assemble
from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import Lease
from vhpc_slurm.slurm import connect


class KeyVhpcd:
    """vhpcd's parts over a database, without its process."""

    def __init__(self, database: Path, site: Network) -> None:
        self.database, self.site = database, site
        self.store = SqliteStore(database)
        self.alone = Alone(self.store, NoNetwork(), reserve_mib=0, job_network=site)

    def open(self, *nodes: str, **asked: Any) -> Lease:
        return self.alone.open(request(42, **asked), allocation(*nodes), identity(0)).lease

    def run(self, *bodies: wire.Request) -> list[Any]:
        """Answers to requests that are sent at the same time."""

        async def all_of() -> list[Any]:
            vhpcd = assemble(Config(network=self.site), self.alone.leases, NoNetwork(), connect(Config()))
            try:
                return await asyncio.gather(*(vhpcd.requests.answer(body) for body in bodies))
            finally:
                vhpcd.close()

        return asyncio.run(all_of())

    def secrets(self, table: str) -> int:
        """Rows of a table of keys, as any reader of the file sees them."""
        with sqlite3.connect(self.database) as db:
            (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)


def take(node: str) -> wire.GetLease:
    return wire.GetLease(job_id=42, restart=None, node=node, wait_s=1.0)
