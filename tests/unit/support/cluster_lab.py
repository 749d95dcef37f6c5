# SPDX-License-Identifier: Apache-2.0
"""Members of a cluster on the nodes of ``network_lab``, with the files that their followers use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from network_lab import Guest, Host, build, inside, lease_of, plan_of

from vhpc_slurm.config import Config
from vhpc_slurm.model import ClusterMember, ClusterPlace, Lease
from vhpc_slurm.node.boot import follower
from vhpc_slurm.node.network import firewall, plan
from vhpc_slurm.node.resource.cluster_network import ClusterNetwork
from vhpc_slurm.node.resource.job_network import NetworkData
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.membership import Membership


def member_lease(job_id: int, vni: int, *nodes: str, first: int, each: int = 1, version: int = 4) -> Lease:
    """The lease of a member whose guests have the addresses from number ``first`` on."""
    lease = lease_of(job_id, vni, *nodes, each=each, version=version)
    assert lease.segment is not None
    return replace(lease, segment=replace(lease.segment, first=first), cluster=ClusterPlace(7, "mesh"))


def member_of(lease: Lease, *gone: int) -> ClusterMember:
    return replace(follower.of(lease).own, gone=gone)


class Part:
    """A member on one node: its segment, its firewall, and its guests."""

    def __init__(self, host: Host, lease: Lease, folder: Path) -> None:
        self.host, self.lease = host, lease
        paths = {name: str(folder / host.name / name) for name in ("state", "run", "log")}
        self.layout = Layout(msgspec.convert({"paths": paths}, Config))
        job_id = lease.generation.job_id
        self.layout.job(job_id).mkdir(parents=True)
        membership.write(self.layout, job_id, follower.of(lease))
        found = plan_of(lease, host.name).segment
        assert found is not None
        self.journal = Journal(self.layout.journals, lease.generation)
        peers = plan.peers(lease, host.name)
        self.journal.announce("network", f"network:{found.vni}", NetworkData.of(found, peers))
        build(host, lease)
        with inside(host.namespace):
            firewall.hold(lease.generation, found, peers)
        count = lease.request.guests_per_node
        self.guests = [Guest(host, lease, index) for index in range(count)]
        self.network = ClusterNetwork(self.layout, lease.generation, fresh=True)

    def follow(self, *others: ClusterMember, version: int = 1) -> None:
        """Apply an answer of vhpcd as the follower does."""
        known = self.known
        with inside(self.host.namespace):
            self.network.follow(replace(known, version=version, others=others))

    @property
    def known(self) -> Membership:
        found = membership.read(self.layout, self.lease.generation.job_id)
        assert found is not None
        return found

    @property
    def state(self) -> tuple[set[str], set[str], set[str]]:
        """Lines of the kernel: entries of the VXLAN device, neighbours, and sets of the firewall."""
        vni = self.known.own.segment.vni
        rules = self.host.run("nft", "list", "ruleset").splitlines()
        table, sets = "", set()
        for line in rules:
            table = line.split()[2] if line.startswith("table") else table
            if "elements" in line and firewall.table_name(self.lease.generation) in table:
                sets.add(f"{table.removeprefix(firewall.table_name(self.lease.generation))}{line.strip()}")
        return (
            set(self.host.run("bridge", "fdb", "show", "dev", f"vhpcx{vni}").splitlines()),
            {
                line.strip()
                for line in self.host.run("ip", "neighbour", "show", "dev", f"vhpcb{vni}").splitlines()
            },
            sets,
        )

    def close(self) -> None:
        for guest in self.guests:
            guest.close()
        self.journal.close()
