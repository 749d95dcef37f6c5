# SPDX-License-Identifier: Apache-2.0
"""Lease records in a store."""

from __future__ import annotations

from controller_lab import allocation, identity, request

from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.model import (
    Generation,
    LeaseRecord,
    NetworkIdentity,
)


def record(job_id: int = 42, nonce: int = 0, now: float = 1.0) -> LeaseRecord:
    generation = Generation(job_id, 0, f"{nonce:08x}")
    return rules.reserve(generation, request(job_id), allocation(), identity(), NetworkIdentity(), now)


def put(store: LeaseStore, *records: LeaseRecord) -> None:
    with store.transaction():
        for one in records:
            store.put(one)


LEASE = rules.reserve(
    Generation(1, 0, "0" * 8), request(1), allocation(), identity(), NetworkIdentity(), 0.0
).lease
