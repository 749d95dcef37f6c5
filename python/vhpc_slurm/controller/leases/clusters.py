# SPDX-License-Identifier: Apache-2.0
"""Named clusters: which jobs are members, their addresses, and what nodes know of each other.

A job is a member from the transaction that makes its lease until its lease ends or its last guest has ended.
The others know it from the moment when all of its nodes have passed the barrier inside the job.
"""
# Decision: Nodes of a cluster ask for changes since a version

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vhpc_slurm.config.network import Network
from vhpc_slurm.config.policy import Rule
from vhpc_slurm.controller.leases import cluster_rules as rules
from vhpc_slurm.controller.store.clusters import StoredCluster, StoredMember
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import (
    ClusterMember,
    ClusterPlace,
    Generation,
    JobRequest,
    Lease,
    LeaseState,
    Roster,
    Segment,
    SegmentPart,
)
from vhpc_slurm.options import parse_cluster
from vhpc_slurm.policy import PolicyError, Subject, applying
from vhpc_slurm.policy import clusters as limits

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore

log = logging.getLogger("vhpcd")

NAMED = 8
"""Most nodes that are named."""
ROWS = 500
"""Most members in a page."""
PAGE_BYTES = 256 << 10
"""About how much JSON goes into a page."""

Place = tuple[Generation, str]
"""A member, and one of its nodes."""


@dataclass(frozen=True)
class Asked:
    """The effects of a question of a node.

    Attributes:
        cluster: number of the member's cluster; None: it is no member.
        aware: jobs that all nodes know now; their first nodes wait for this.
    """

    cluster: int | None
    aware: tuple[int, ...] = ()


@dataclass
class _Waiting:
    """Nodes that do not know a member yet, which has joined with ``joined``; computed at ``version``."""

    joined: int
    version: int
    undone: int
    nodes: set[Place]


class Clusters:
    """Members and rosters; for the database thread only.

    The versions that nodes have applied are only in memory: after a restart of vhpcd all nodes ask again.
    """

    def __init__(
        self,
        store: LeaseStore,
        network: Network,
        clock: Callable[[], float],
        policy: Sequence[Rule] = (),
    ) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self._store = store
        self._network = network
        self._clock = clock
        self._policy = policy
        self._applied: dict[Generation, dict[str, int]] = {}
        self._waiting: dict[int, dict[Generation, _Waiting]] = {}
        self._known: set[Generation] = set()
        """Members that all nodes know."""

    # --- leases ---------------------------------------------------------------

    def enter(
        self, requests: Sequence[JobRequest], segment: Segment, parts: Sequence[SegmentPart]
    ) -> tuple[ClusterPlace, Segment]:
        """A new job becomes a member, in the transaction that makes its lease; its segment has addresses.

        ``requests`` are those of all components with a network of a heterogeneous job.

        Raises:
            PolicyError: the policy does not permit it.
            UserError: there are no addresses for it, its nodes do not reach those of the other members, or
                the user keeps too many clusters.
        """
        request = requests[0]
        assert request.cluster is not None
        store, now = self._store.clusters, self._clock()
        name, kept = parse_cluster(request.cluster)
        guests = sum(len(part.nodes) * part.guests_per_node for part in parts)
        cluster = store.find(request.uid, name)
        others = 0 if cluster is None else store.count(cluster.serial)[1]
        applied = [applying(self._policy, Subject.of(one)) for one in requests]
        for rule in applied:
            exists = cluster is not None
            if line := limits.job_refusal(rule, request.cluster, exists=exists, guests=others + guests):
                raise PolicyError(line)
        cluster = cluster or store.create(request.uid, name, now)
        for other in store.members(cluster.serial, limit=1):
            if line := rules.apart(segment, other.member.segment):
                raise UserError(f"--vhpc-cluster={request.cluster}: {line}")
        if kept:
            self._keep_longer(cluster, limits.shortest_s(applied))
        taken = store.taken(cluster.serial, now - rules.RESERVED_S)
        first = rules.choose(taken, guests, self._network.most_guests)
        if first is None:
            held = sum(count for _, count in taken)
            raise UserError(
                f"cluster {name} has no addresses for {guests} guests: {held} of "
                f"{self._network.most_guests} are in use, or were until an hour ago",
                "",
                "wait for the end of other jobs of the cluster, or ask for fewer guests",
            )
        placed = replace(segment, first=first)
        member = ClusterMember(parts[0].generation, placed, tuple(parts))
        store.add(cluster.serial, member, guests, request.uid)
        return ClusterPlace(cluster.serial, name), placed

    def join(self, lease: Lease) -> None:
        """All nodes of a job have passed their barrier: nodes of the other members learn of it."""
        owner = lease.parts[0].generation
        member = self._store.clusters.member(owner)
        if member is None or member.joined is not None or member.left_at is not None:
            return
        keys = self._store.ssh_keys.get(owner)
        with self._store.transaction():
            self._store.clusters.join(
                owner, "" if keys is None else keys.host_public, "" if keys is None else keys.user_public
            )
        assert lease.cluster is not None
        log.info("%s has joined cluster %s of %s", owner, lease.cluster.name, lease.request.user)

    # --- nodes ----------------------------------------------------------------

    def ask(self, generation: Generation, node: str, applied: int, gone: Collection[int]) -> Asked:
        """Store what a node has applied, and which of its guests have ended.

        Raises:
            FabricError: the job has no part on that node, or other guests are there.
        """
        member = self._member(generation)
        if member is None:
            self._forget(generation)
            return Asked(None)
        owner = member.generation
        of_node = rules.ranks(member.member.parts, generation, node)
        if not of_node:
            raise FabricError(f"lease {generation} has no part on node {node[:80]}")
        if wrong := set(gone) - of_node:
            raise FabricError(f"guest {min(wrong)} of {generation} is not on node {node}")
        self._applied.setdefault(owner, {})[node] = applied
        if not set(gone) <= set(member.member.gone):
            with self._store.transaction():
                self._store.clusters.lose(owner, gone, self._clock())
        return Asked(member.cluster, self._aware(member.cluster, (owner, node), applied))

    def roster(self, generation: Generation, applied: int) -> Roster:
        """A page of the changes since a version."""
        own, store = self._member(generation), self._store.clusters
        cluster = None if own is None else store.get(own.cluster)
        if own is None or cluster is None:
            return Roster(applied, over=True)
        if applied >= cluster.version:
            return Roster(cluster.version)
        rows = store.changes(cluster.serial, applied, ROWS)
        size, count = 0, 0
        for row in rows:
            size += row.size
            if count and size > PAGE_BYTES:
                break
            count += 1
        page, more = rows[:count], count < len(rows) or len(rows) == ROWS
        return Roster(
            page[-1].changed if more else cluster.version,
            members=tuple(_seen_by(own.uid, row) for row in page if row.left_at is None),
            # A node that has never heard of a member need not be told of its end.
            left=tuple(row.generation for row in page if row.left_at is not None and _knew(row, applied)),
            more=more,
        )

    def unaware(self, lease: Lease, *, named: bool) -> tuple[int, tuple[str, ...]]:
        """How many nodes of the cluster do not know yet that a job has joined; the first of them."""
        owner = lease.parts[0].generation
        if owner in self._known:
            return 0, ()
        member = self._store.clusters.member(owner)
        if member is None or member.joined is None or member.left_at is not None:
            return 0, ()
        waiting = self._look(member)
        if not waiting.nodes:
            self._settle(member.cluster, owner)
            return 0, ()
        first = heapq.nsmallest(NAMED, waiting.nodes) if named else []
        return len(waiting.nodes), tuple(f"{node} (job {one.job_id})" for one, node in first)

    def _look(self, member: StoredMember) -> _Waiting:
        """The nodes that do not know a member; later calls read only what has changed meanwhile."""
        store, of_cluster = self._store.clusters, self._waiting.setdefault(member.cluster, {})
        cluster, waiting = store.get(member.cluster), of_cluster.get(member.generation)
        assert cluster is not None
        assert member.joined is not None
        if waiting is None or waiting.undone != store.undone:
            nodes = {
                (one.generation, node)
                for one in store.members(member.cluster)
                if one.joined is not None and one.joined <= member.joined  # later ones hear of it first
                for node in one.member.segment_nodes
                if self._applied.get(one.generation, {}).get(node, 0) < member.joined
            }
            waiting = _Waiting(member.joined, cluster.version, store.undone, nodes)
            of_cluster[member.generation] = waiting
        elif waiting.version < cluster.version:
            for one in store.changes(member.cluster, waiting.version):
                if one.left_at is not None:
                    waiting.nodes.difference_update(
                        (one.generation, node) for node in one.member.segment_nodes
                    )
            waiting.version = cluster.version
        return waiting

    def _aware(self, cluster: int, place: Place, applied: int) -> tuple[int, ...]:
        """A node has applied a version; jobs that no node has to learn of any more."""
        found = []
        for owner, waiting in tuple(self._waiting.get(cluster, {}).items()):
            if waiting.joined <= applied and place in waiting.nodes:
                waiting.nodes.discard(place)
                if not waiting.nodes:
                    found.append(owner.job_id)
        return tuple(found)

    def _settle(self, cluster: int, owner: Generation) -> None:
        self._known.add(owner)
        self._waiting.get(cluster, {}).pop(owner, None)

    def _forget(self, owner: Generation) -> None:
        self._applied.pop(owner, None)
        self._known.discard(owner)
        for of_cluster in self._waiting.values():
            of_cluster.pop(owner, None)

    def _member(self, generation: Generation) -> StoredMember | None:
        """The member that a component belongs to; None if it has left, or the component has ended."""
        found = self._store.clusters.member(generation)
        if found is None:  # perhaps a later component of a heterogeneous job
            record = self._store.newest(generation.job_id)
            if record is None or record.lease.generation != generation or record.lease.cluster is None:
                return None
            if record.lease.state is not LeaseState.READY:
                return None
            found = self._store.clusters.member(record.lease.parts[0].generation)
        return None if found is None or found.left_at is not None else found

    # --- users and periodic work ----------------------------------------------

    def keep(self, uid: int, name: str, for_s: float | None) -> StoredCluster:
        """Make a cluster that stays without members; one that exists is kept from now on.

        Raises:
            UserError: the user or account keeps too many.
        """
        store, now = self._store.clusters, self._clock()
        with self._store.transaction():
            cluster = store.find(uid, name) or store.create(uid, name, now)
            self._keep(cluster, None if for_s is None else now + for_s)
        kept = store.get(cluster.serial)
        assert kept is not None
        return kept

    def _keep_longer(self, cluster: StoredCluster, for_s: float | None) -> None:
        """Keep a cluster so long from now on; None: without limit. One that is kept longer stays so."""
        until = None if for_s is None else self._clock() + for_s
        now = cluster.kept_until
        if not cluster.kept or (now is not None and (until is None or until > now)):
            self._keep(cluster, until)

    def _keep(self, cluster: StoredCluster, until: float | None) -> None:
        store = self._store.clusters
        if not cluster.kept and store.kept(cluster) >= rules.MOST_KEPT:
            who = "you keep" if cluster.account is None else f"account {cluster.account} keeps"
            raise UserError(
                f"cluster {cluster.name} is not kept",
                f"{who} {rules.MOST_KEPT} clusters already",
                "remove one: vhpc cluster rm",
            )
        store.keep(cluster.serial, until)

    def remove(self, cluster: StoredCluster) -> None:
        """Delete a cluster that has no members.

        Raises:
            UserError: it has members.
        """
        store, serial = self._store.clusters, cluster.serial
        jobs = [one.generation.job_id for one in store.members(serial)]
        if jobs:
            shown = ", ".join(map(str, jobs[:NAMED])) + (", …" if len(jobs) > NAMED else "")
            raise UserError(
                f"cluster {cluster.name} is not removed",
                f"it has jobs: {shown}",
                f"end them first: scancel {jobs[0]}" if len(jobs) == 1 else "end them first: scancel JOBID",
            )
        with self._store.transaction():
            store.remove(serial)

    def prune(self) -> None:
        """Forget members that left long ago, if all nodes know of it; end clusters whose time is over."""
        store, now = self._store.clusters, self._clock()
        with self._store.transaction():
            store.remove_expired(now)
            present: set[Generation] = set()
            for cluster in store.page(0, None, 1 << 62):
                members = store.members(cluster.serial)
                present.update(one.generation for one in members)
                known = [
                    self._applied.get(one.generation, {}).get(node, 0)
                    for one in members
                    if one.is_present
                    for node in one.member.segment_nodes
                ]
                store.prune(cluster.serial, now - rules.RESERVED_S, min(known, default=cluster.version))
        for owner in {*self._applied, *self._known} - present:
            self._forget(owner)
        self._waiting = {serial: some for serial, some in self._waiting.items() if some}


def _seen_by(uid: int, row: StoredMember) -> ClusterMember:
    """A member as nodes of another one learn of it; keys to log in are those of the same user only."""
    return row.member if row.uid == uid else replace(row.member, user_public="")


def _knew(row: StoredMember, applied: int) -> bool:
    return row.joined is not None and row.joined <= applied
