# SPDX-License-Identifier: Apache-2.0
"""Nodes that Slurm has taken from a running job (``scontrol update JobId= NumNodes=``).

Slurm ends the job's steps on such a node and runs its Epilog there, while the job runs on with
its other nodes.  These learn of it here: from the Epilog's acknowledgement, which vhpcd has.
An Epilog that was killed, or never ran, is made up for as well.
"""
# Decision: The health check detects nodes that left a job

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.model import Generation, Lease, LeaseRecord, LeaseState
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.guest.channel import ROOT_SOCKET, GuestChannel
from vhpc_slurm.node.network import cluster, plan, segment, tools
from vhpc_slurm.node.resource.domain import Domain, DomainData
from vhpc_slurm.node.resource.job_network import NetworkData, find_entry, name_guests
from vhpc_slurm.node.store import joblock, journal, membership
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm.port import RUNNING, Slurm

log = logging.getLogger("vhpc")
LOCK_TIMEOUT_S = 10.0
CONNECT_S, ANSWER_S = 1.0, 5.0
"""For a guest's shim, and for the guest itself; Slurm ends a health check after 60 s."""


def has_left(slurm: Slurm, node: str, generation: Generation) -> bool:
    """Whether this node is no longer one of a running job's, whose Epilog did not run.

    Ask only if the generation has a journal here and none of the job's steps runs here.
    False if Slurm does not answer.
    """
    try:
        job = slurm.load(generation.job_id)
    except (FabricError, UserError) as err:
        log.info("job %d: %s", generation.job_id, err.line())
        return False
    if job.state != RUNNING or job.restarts != generation.restart or not job.allocation.nodes:
        return False
    return all(part.node != node for part in job.allocation.nodes)


def findings(
    layout: Layout, node: str, records: Sequence[LeaseRecord], known: Sequence[LeaseRecord]
) -> Iterator[NodeFinding]:
    """Job networks on this node that still contain nodes which have left the job.

    Args:
        layout: where the node keeps its state.
        node: this node's name.
        records: live leases with a part on this node.
        known: all leases of the cluster that are not released, for components of heterogeneous jobs.
    """
    for record in records:
        lease = record.lease
        if lease.state is not LeaseState.READY or lease.segment is None or node in record.acknowledged:
            continue
        left = _left(lease, known)
        if not left or joblock.busy(layout, lease.generation.job_id):
            continue
        entry = find_entry(journal.read_entries(layout.journals, lease.generation))
        if entry is not None and not set(left) <= set(entry.read(NetworkData).left):
            job = f"job {lease.generation.job_id}"
            what = f"the network of {job} contains {', '.join(left)}, which Slurm has taken from the job"
            yield NodeFinding(Kind.LEFT_NODE, what, partial(_forget, layout, node, lease, left))


def _left(lease: Lease, known: Sequence[LeaseRecord]) -> tuple[str, ...]:
    """The nodes that have left the segment, in their order: also those of components that have ended."""
    leases = {record.lease.generation: record for record in known}
    left: list[str] = []
    for part in lease.parts:
        record = leases.get(part.generation)
        if record is None:  # released
            left += part.nodes
        else:
            left += (node for node in part.nodes if node in record.acknowledged)
    return tuple(left)


def _forget(layout: Layout, node: str, lease: Lease, left: Sequence[str]) -> None:
    """Remove the nodes from segment, firewall and the guests' lists of names.

    The journal is written last, so that this is repeated if it is interrupted.
    """
    with joblock.held(layout, lease.generation.job_id, timeout_s=LOCK_TIMEOUT_S, brief=True):
        entries = journal.read_entries(layout.journals, lease.generation)
        entry = find_entry(entries)
        if entry is None or joblock.has_tombstone(layout, lease.generation):
            return  # the job has ended meanwhile
        with membership.changing(layout, lease.generation.job_id) as known:
            local = entry.read(NetworkData).local
            others = () if known is None else cluster.peers(known.others, local)
            segment.forget(lease, node, left, others)
        for domain in entries:
            if domain.kind == Domain.kind:
                _name_guests(layout, node, lease, domain.read(DomainData).name, left)
        found = Journal(layout.journals, lease.generation)
        try:
            found.update(entry.key, peers=plan.peers(lease, node, left), left=left)
        finally:
            found.close()


def _name_guests(layout: Layout, node: str, lease: Lease, domain: str, left: Sequence[str]) -> None:
    """Give the guest of a domain the shorter lists of names.

    Raises:
        NodeError: its interface or its shim is not there.
        ChannelError: the guest does not answer, or refuses.
    """
    folder = layout.guest_of(domain)
    interface = plan.interface(lease, node, int(folder.name.removeprefix("g")), 1)
    assert interface is not None
    links = tools.query("ip", "link", "show", "dev", interface.tap)
    if not links:
        raise NodeError(f"interface {interface.tap} is not there")
    with GuestChannel.connect(folder / ROOT_SOCKET, CONNECT_S) as channel:
        channel.hello(ANSWER_S, wait_for_boot=False)
        name_guests(lease, interface, int(links[0]["mtu"]), channel, ANSWER_S, left)
