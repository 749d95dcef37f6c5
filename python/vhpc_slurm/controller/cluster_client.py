# SPDX-License-Identifier: Apache-2.0
"""How followers and commands ask vhpcd about clusters."""

from __future__ import annotations

from vhpc_slurm.controller.api import cluster_messages as messages
from vhpc_slurm.controller.exchange import Exchange
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Cluster, ClusterJob, Generation, Roster
from vhpc_slurm.options import CLUSTER, is_cluster_name


class ClusterCalls(Exchange):
    """The part of ``ControllerClient`` for clusters; errors are as there."""

    def roster(
        self, generation: Generation, node: str, applied: int, gone: tuple[int, ...], wait_s: float
    ) -> Roster:
        """Report what this node has applied, and return what has changed in the cluster since then.

        Args:
            generation: the job's.
            node: this node.
            applied: the version that this node has applied; 0: the answer has all members.
            gone: ranks of guests of this node that have ended.
            wait_s: if nothing has changed, wait so long for it.

        The connection stays open until the next question: by that vhpcd knows that this node is there.
        """
        body = messages.AskRoster(
            generation=str(generation), node=node, applied=applied, gone=gone, wait_s=wait_s
        )
        return self._ask(body, messages.RosterAnswer, wait_s, keep=True).roster

    def clusters(self) -> tuple[Cluster, ...]:
        """Clusters of this user and of the user's accounts, oldest first; operators and root get all."""
        found: list[Cluster] = []
        after: int | None = 0
        while after is not None:
            page = self._ask(messages.ListClusters(after=after), messages.ClusterPage)
            found.extend(page.clusters)
            after = page.more
        return tuple(found)

    def cluster_jobs(self, serial: int) -> tuple[ClusterJob, ...]:
        """The members of a cluster, in the order in which they began.

        Raises:
            UserError: there is no such cluster of this user.
        """
        found: list[ClusterJob] = []
        after: int | None = 0
        while after is not None:
            page = self._ask(messages.ListClusterJobs(cluster=serial, after=after), messages.ClusterJobPage)
            found.extend(page.jobs)
            after = page.more
        return tuple(found)

    def keep_cluster(self, name: str, for_s: float | None = None) -> Cluster:
        """Make a cluster of this user or an account, or keep one, for so long without jobs.

        None: as long as the policy permits, without limits until it is removed.

        Raises:
            UserError: the name is incorrect, the policy does not permit it, or there are too many.
        """
        if not is_cluster_name(name):
            raise UserError(f"{name[:80]!r} is not the name of a cluster", CLUSTER.grammar.expected)
        return self._ask(messages.KeepCluster(name=name, for_s=for_s), messages.ClusterAnswer).cluster

    def remove_cluster(self, serial: int) -> Cluster:
        """Remove a cluster without jobs; returns it.

        Raises:
            UserError: there is no such cluster of this user, it has jobs, or the policy does not permit it.
        """
        return self._ask(messages.RemoveCluster(cluster=serial), messages.ClusterAnswer).cluster
