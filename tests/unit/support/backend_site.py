# SPDX-License-Identifier: Apache-2.0
"""vhpcd's own parts with a simulated fabric under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from controller_lab import Alone, allocation, identity, request
from fabric_lab import (
    SimulatedFabric,
)

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.backend import KeyPolicy, NetworkBackend, Proof
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.opensm import Opensm
from vhpc_slurm.fabric.opensm_file import OpensmFile
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.model import Generation, LeaseRecord


class Site:
    """vhpcd's own parts with a fabric under them."""

    def __init__(
        self,
        fabric: SimulatedFabric,
        reader: FabricReader,
        database: Path,
        *,
        owner: Literal["job", "user"] = "job",
        site: tuple[IbPartition, ...] = (),
        timeout_s: float = 5.0,
        last: int = 0x1003,
        reserved: frozenset[int] = frozenset(),
        store: type[SqliteStore] = SqliteStore,
        opensm: type[Opensm] = Opensm,
        fresh_s: float = 0.0,
        **other: Any,
    ) -> None:
        self.now = 0.0
        self.store = store(database)
        self.backend = OpensmFile(
            KeyPolicy(KeyPool(0x1000, last, reserved)),
            opensm(fabric.partitions, fabric.pidfile, fabric.log, timeout_s),
            Readback(reader, timeout_s, fresh_s),
            self.store.keys.knows,
            site=site,
        )
        self.service = Alone(
            self.store,
            self.backend,
            reserve_mib=0,
            quarantine_s=30.0,
            key_owner=owner,
            steady=lambda: self.now,
            **other,
        )

    def open(self, job_id: int, *nodes: str, uid: int = 2001) -> LeaseRecord:
        return self.service.open(request(job_id, uid=uid), allocation(*nodes), identity(0))

    def states(self) -> dict[int, str]:
        return {
            assignment.generation.job_id: assignment.state.value
            for assignment in self.store.keys.snapshot().assignments
        }


def verify(backend: NetworkBackend, generation: Generation, snapshot: KeySnapshot) -> Proof:
    return proof(backend.verify([generation], snapshot)[generation])


def proof(outcome: Proof | FabricError) -> Proof:
    if isinstance(outcome, FabricError):
        raise outcome
    return outcome


@pytest.fixture(name="site")
def backend_site(fabric: SimulatedFabric, reader: FabricReader, tmp_path: Path) -> Site:
    return Site(fabric, reader, tmp_path / "db")


def strip(backend: NetworkBackend, generation: Generation, snapshot: KeySnapshot) -> Proof:
    return proof(backend.strip([generation], snapshot.without([generation]))[generation])
