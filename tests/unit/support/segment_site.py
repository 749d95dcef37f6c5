# SPDX-License-Identifier: Apache-2.0
"""vhpcd's leases on a site with job networks."""

from __future__ import annotations

from typing import Any

import msgspec
from controller_lab import Alone, allocation, identity, request
from store_backends import Place, open_at

from vhpc_slurm.config.network import Network
from vhpc_slurm.fabric.backend import NoNetwork
from vhpc_slurm.model import Lease

JOB = Network(allowed=("none", "job"), default="job", vni_first=5000, vni_last=5002, quarantine_s=30)


class Site:
    """vhpcd's own parts, with a clock that the test moves."""

    def __init__(self, database: Place, network: Network = JOB) -> None:
        self.database, self.network, self.now = database, network, 0.0
        self.begin()

    def begin(self) -> None:
        self.store = open_at(self.database)
        self.service = Alone(
            self.store, NoNetwork(), reserve_mib=0, job_network=self.network, steady=lambda: self.now
        )

    def restart(self) -> None:
        self.store.close()
        self.begin()

    def open(self, job_id: int, *nodes: str, **asked: Any) -> Lease:
        return self.service.open(request(job_id, **asked), allocation(*nodes), identity(0)).lease

    def acknowledge(self, lease: Lease, node: str, *, clean: bool = True) -> None:
        self.service.acknowledge(lease.generation, node, clean=clean, note="", timeline=None)


def vni(lease: Lease) -> int:
    assert lease.segment is not None
    return lease.segment.vni


def replace_network(**changes: Any) -> Network:
    return msgspec.structs.replace(JOB, **changes)
