# SPDX-License-Identifier: Apache-2.0
"""Starts the process that tells a node's network and guests who joins and leaves the job's cluster."""

from __future__ import annotations

from vhpc_slurm.model import ClusterMember, Lease
from vhpc_slurm.node.boot.attendant import Attendant
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.membership import Membership

FOLLOWER = Attendant("follower", first="first", again="again")


def start(layout: Layout, journal: Journal, lease: Lease, node: str) -> None:
    """Start the follower of a job whose guests run, if the job is in a cluster.

    Raises:
        NodeError, FabricError: it cannot be started, or the journal cannot be written.
        Stopped: the job has ended meanwhile.
    """
    if lease.cluster is None:
        return
    membership.write(layout, lease.generation.job_id, of(lease))
    FOLLOWER.start(layout, journal, node)


def of(lease: Lease) -> Membership:
    """The cluster before vhpcd has answered: the job itself."""
    assert lease.cluster is not None
    assert lease.segment is not None
    keys = lease.ssh
    own = ClusterMember(
        lease.parts[0].generation,
        lease.segment,
        lease.parts,
        "" if keys is None else keys.host_public,
        "" if keys is None else keys.user_public,
    )
    return Membership(lease.cluster.name, lease.request.uid, own)
