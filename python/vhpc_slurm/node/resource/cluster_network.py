# SPDX-License-Identifier: Apache-2.0
"""The other members of a job's cluster, in its segment and firewall on this node."""

from __future__ import annotations

from vhpc_slurm.model import Generation
from vhpc_slurm.node.network import cluster, firewall
from vhpc_slurm.node.resource import job_network
from vhpc_slurm.node.resource.job_network import NetworkData
from vhpc_slurm.node.store import journal, membership
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.membership import Membership


class ClusterNetwork:
    """Segment and firewall of a running job, for one process; ``fresh``: they know no other member yet."""

    def __init__(self, layout: Layout, generation: Generation, *, fresh: bool) -> None:
        self._layout, self._generation = layout, generation
        self._accepted: tuple[str, ...] | None = () if fresh else None
        """Underlay addresses of others that the firewall accepts; None: not known."""

    def follow(self, known: Membership) -> None:
        """Make segment and firewall know exactly these other members, and note it in the job's file.

        Raises:
            NodeError: the kernel or nftables refuses, the job has no network here any more, or the file
                cannot be written.
            TeardownError: the process that has the copies of the nftables tables does not end.
        """
        with membership.changing(self._layout, self._generation.job_id):
            entries = journal.read_entries(self._layout.journals, self._generation)
            found = job_network.entry_of(entries).read(NetworkData)
            self._accept(found, cluster.peers(known.others, found.local))
            cluster.follow(known.own, known.others)
            membership.write(self._layout, self._generation.job_id, known)

    def _accept(self, found: NetworkData, around: tuple[str, ...]) -> None:
        """Have the firewall accept frames from these nodes, if it does not accept just these already."""
        if around == self._accepted or not firewall.available():
            return
        self._accepted = None
        firewall.replace(self._generation, found.segment(), (*found.peers, *around))
        self._accepted = around
