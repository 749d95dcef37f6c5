# SPDX-License-Identifier: Apache-2.0
"""Jobs in clusters: vhpcd's leases, and nodes that ask who is there."""

from __future__ import annotations

from typing import Any

from controller_lab import Alone
from segment_site import Site, replace_network
from store_backends import Place, open_at

from vhpc_slurm.controller.wire_types import ReadyState
from vhpc_slurm.fabric.backend import NetworkBackend, NoNetwork
from vhpc_slurm.model import Lease, LeaseState, Roster, SshKeys

HOUR_S = 3600.0


class ClusterSite(Site):
    """A site with job networks for those who ask for them; its clocks are the test's.

    ``quarantine_s`` is that of keys.
    """

    quarantine_s = 0.0

    def __init__(self, database: Place, **network: Any) -> None:
        settings = {"vni_last": 7000, "default": "none", "quarantine_s": 0}
        self.fabric = self.make_fabric()
        super().__init__(database, replace_network(**(settings | network)))

    def make_fabric(self) -> NetworkBackend:
        """The fabric of the site, which outlives vhpcd."""
        return NoNetwork()

    def begin(self) -> None:
        self.store = open_at(self.database)
        self.service = Alone(
            self.store,
            self.fabric,
            reserve_mib=0,
            quarantine_s=self.quarantine_s,
            job_network=self.network,
            clock=lambda: 1e9 + self.now,
            steady=lambda: self.now,
        )
        self.clusters = self.service.leases.clusters

    def member(self, job_id: int, *nodes: str, cluster: str = "dask", **asked: Any) -> Lease:
        """A job that has a lease and boots."""
        lease = self.open(job_id, *nodes, cluster=cluster, **asked)
        assert lease.state is LeaseState.READY, lease.refusal
        return lease

    def passes(self, lease: Lease) -> None:
        """All nodes of a job have passed its barrier."""
        for part in lease.parts:
            for node in part.nodes:
                self.service.leases.readiness.report(part.generation, node, "passed", "", "")

    def joined(self, job_id: int, *nodes: str, **asked: Any) -> Lease:
        """A job whose guests are ready."""
        lease = self.member(job_id, *nodes, **asked)
        self.passes(lease)
        return lease

    def ask(self, lease: Lease, node: str, applied: int = 0, gone: tuple[int, ...] = ()) -> Roster:
        """A question of a node that does not wait, and its answer."""
        asked = self.clusters.ask(lease.generation, node, applied, gone)
        if asked.cluster is None:
            return Roster(applied, over=True)
        return self.clusters.roster(lease.generation, applied)

    def state(self, lease: Lease) -> ReadyState:
        """The state of the barrier, as the first node of a job hears it."""
        return self.service.leases.readiness.look(lease.generation, (), named=True)

    def give_keys(self, lease: Lease) -> None:
        """A node has taken the lease, and vhpcd has made keys."""
        name = str(lease.generation.job_id)
        self.service.leases.nodes.keep_ssh_keys(
            lease.generation, SshKeys(f"host {name}", f"host.pub {name}", f"user {name}", f"user.pub {name}")
        )


def jobs(roster: Roster) -> list[int]:
    """JobIds of new and changed members."""
    return [member.generation.job_id for member in roster.members]
