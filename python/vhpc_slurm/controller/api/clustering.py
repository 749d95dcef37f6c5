# SPDX-License-Identifier: Apache-2.0
"""Requests about clusters: nodes ask who is in them, users list, keep and remove theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.api import cluster_messages as messages
from vhpc_slurm.controller.api import listing
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.changes import Changes, of_cluster
from vhpc_slurm.controller.leases.cluster_access import ClusterAccess
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.store.clusters import StoredCluster, StoredMember
from vhpc_slurm.model import Cluster, ClusterJob, Generation, Roster, Viewer

GATHER_S = 0.03
"""Jobs often join and leave together: after a change the answers wait so long for further ones."""


class Clustering:
    """Belongs to the event loop."""

    def __init__(
        self, leases: LeaseLayer, executor: LeaseExecutor, changes: Changes, policy: Sequence[Rule] = ()
    ) -> None:
        """``changes`` are told each job that all nodes know now, and tell of changes of clusters."""
        self._access = ClusterAccess(policy)
        self._clusters = leases.clusters
        self._store = leases.store.clusters
        self._executor = executor
        self._changes = changes

    async def answer(
        self, request: messages.OfClusters, uid: int, viewer: Viewer | None
    ) -> messages.AboutClusters:
        """The answer; ``viewer`` is None for root and SlurmUser.

        Lists have the clusters of all users for these and for operators of Slurm.

        Raises:
            UserError: the request is refused.
        """
        match request:
            case messages.AskRoster():
                return messages.RosterAnswer(roster=await self._roster(request))
            case messages.ListClusters():
                return await self._page(request, viewer)
            case messages.ListClusterJobs():
                return await self._jobs(request, viewer)
            case messages.KeepCluster():
                return await self._keep(request, uid, viewer)
            case messages.RemoveCluster():
                return await self._remove(request, viewer)

    async def _roster(self, request: messages.AskRoster) -> Roster:
        """Take the report of a node; the answer comes when there are changes, or after ``wait_s``."""
        generation, write = Generation.parse(request.generation), self._executor.write
        asked = await write(self._clusters.ask, generation, request.node, request.applied, request.gone)
        for job_id in asked.aware:
            self._changes.notify(job_id)
        if asked.cluster is None:
            return Roster(request.applied, over=True)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._changes.listening(of_cluster(asked.cluster)) as change:
                found = await write(self._clusters.roster, generation, request.applied)
                left = deadline - loop.time()
                if found.over or found.version != request.applied or left <= 0:
                    return found
                await asyncio.wait({change}, timeout=left)
            await asyncio.sleep(GATHER_S)

    async def lose(self, generation: str, node: str) -> None:
        """A node of a member is silent.

        Raises:
            VhpcError: the database does not take it.
        """
        await self._executor.write(self._clusters.lose, Generation.parse(generation), node)

    async def _page(self, request: messages.ListClusters, viewer: Viewer | None) -> messages.ClusterPage:
        uid = None if viewer is None or viewer.everything else viewer.uid

        def read() -> list[tuple[int, Cluster]]:
            known = self._store.page(request.after, uid, listing.PAGE, self._access.accounts(viewer))
            return [(one.serial, self._shown(one)) for one in known]

        page, more = listing.fill(await self._executor.write(read), listing.PAGE)
        return messages.ClusterPage(clusters=page, more=more)

    async def _jobs(
        self, request: messages.ListClusterJobs, viewer: Viewer | None
    ) -> messages.ClusterJobPage:
        def read() -> list[tuple[int, ClusterJob]]:
            cluster = self._access.seen(self._store.get(request.cluster), request.cluster, viewer)
            members = self._store.members(cluster.serial, request.after, listing.PAGE)
            begun = self._store.begun([one.generation for one in members])
            return [(one.serial, _job(one, begun.get(one.generation, 0.0))) for one in members]

        page, more = listing.fill(await self._executor.write(read), listing.PAGE)
        return messages.ClusterJobPage(jobs=page, more=more)

    async def _keep(
        self, request: messages.KeepCluster, uid: int, viewer: Viewer | None
    ) -> messages.ClusterAnswer:
        for_s = self._access.kept_s(request.name, request.for_s, viewer)

        def keep() -> Cluster:
            return self._shown(self._clusters.keep(uid, request.name, for_s))

        return messages.ClusterAnswer(cluster=await self._executor.write(keep))

    async def _remove(self, request: messages.RemoveCluster, viewer: Viewer | None) -> messages.ClusterAnswer:
        def remove() -> Cluster:
            cluster = self._access.seen(self._store.get(request.cluster), request.cluster, viewer)
            self._access.must_change(cluster, viewer)
            self._clusters.remove(cluster)
            return self._shown(cluster)

        return messages.ClusterAnswer(cluster=await self._executor.write(remove))

    def _shown(self, one: StoredCluster) -> Cluster:
        """A cluster as its user sees it; for the database thread."""
        jobs, guests = self._store.count(one.serial)
        return Cluster(one.serial, one.name, one.uid, one.created, one.kept, one.kept_until, jobs, guests)


def _job(one: StoredMember, since: float) -> ClusterJob:
    shown = replace(one.member, host_public="", user_public="")
    return ClusterJob(shown, one.joined is not None, one.uid, since)
