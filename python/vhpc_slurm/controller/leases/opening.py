# SPDX-License-Identifier: Apache-2.0
"""The request of PrologSlurmctld: finds or makes the lease of a job."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from vhpc_slurm import policy
from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import cluster_rules, resuming, rules, savable, segments
from vhpc_slurm.controller.leases.clusters import Clusters
from vhpc_slurm.controller.leases.lifecycle import Lifecycle
from vhpc_slurm.controller.leases.transitions import Ended
from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.keys import ExhaustedError, KeyAssignment, owner_of
from vhpc_slurm.model import (
    Allocation,
    CheckpointState,
    ClusterPlace,
    Generation,
    ImageIdentity,
    JobRequest,
    LeaseRecord,
    LeaseState,
    Resume,
    Segment,
    SegmentPart,
)
from vhpc_slurm.placement import drivers

if TYPE_CHECKING:
    from vhpc_slurm.controller.store.port import LeaseStore
    from vhpc_slurm.fabric.backend import NetworkBackend

log = logging.getLogger("vhpcd")


@dataclass(frozen=True)
class Wanted:
    """A job, or a component of a heterogeneous job, that needs a lease.

    ``image`` is from ``look_up`` or ``check_saved``; ``resume`` is the checkpoint that the job continues.
    """

    request: JobRequest
    allocation: Allocation
    image: ImageIdentity | UserError
    resume: StoredCheckpoint | None = None


@dataclass(frozen=True)
class _Refusal:
    """Why the user's request cannot be served: a word for statistics, and one line for the user."""

    cause: str
    line: str


class _RefusedError(Exception):
    """No usable lease can be made."""

    def __init__(self, refusal: _Refusal) -> None:
        super().__init__(refusal.line)
        self.refusal = refusal


class LeaseOpening:
    """Finds and makes leases; for the database thread only."""

    def __init__(
        self,
        store: LeaseStore,
        lifecycle: Lifecycle,
        network: NetworkBackend,
        config: Config,
        clusters: Clusters,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` is the wall clock, in seconds since the epoch."""
        self.refusals: Counter[str] = Counter()
        """Refused leases since this object was made, by cause."""
        self._store = store
        self._lifecycle = lifecycle
        self._network = network
        self._config = config
        self._clusters = clusters
        self._clock = clock

    def resumed(self, request: JobRequest, allocation: Allocation) -> StoredCheckpoint | UserError:
        """The checkpoint that a job continues, or why it cannot continue any of that name."""
        name = request.resume or ""
        found = resuming.find_refusal(name, self._store.checkpoints.named(request.uid, name))
        line = found if isinstance(found, str) else resuming.refusal(request, allocation, found)
        return UserError(line) if line or isinstance(found, str) else found

    def own(self, request: JobRequest, allocation: Allocation) -> StoredCheckpoint | UserError | None:
        """The last checkpoint of an earlier run of the job, or why this run cannot continue it.

        None if there is no checkpoint, or if the job starts from the beginning: it has no --vhpc-checkpoint,
        no run of it was saved by --requeue, and no run of it has continued a checkpoint.
        """
        made = [
            one
            for one in self._store.checkpoints.valid(request.job_id)
            if one.generation.restart < request.restart and one.uid == request.uid
        ]
        continues = (
            savable.is_asked(request)
            or any(one.requeue for one in made)
            or any(record.lease.resume is not None for record in self._store.of_job(request.job_id))
        )
        if not made or not continues:
            return None
        line = resuming.other_shape(allocation, made[0])
        return UserError(line) if line else made[0]

    def find(self, request: JobRequest, allocation: Allocation) -> LeaseRecord | None:
        """The lease that this request already has, if it is usable.

        Raises:
            FabricError: the request is invalid, or a later incarnation of the job is alive.
        """
        rules.check_sizes(request, allocation)
        records = self._store.of_job(request.job_id)
        for record in records:
            generation = record.lease.generation
            if generation.restart > request.restart and record.lease.state in rules.USABLE:
                raise FabricError(
                    f"job {request.job_id} has restarted {generation.restart} times",
                    f"this request is of restart {request.restart}",
                )
        if records and rules.serves(records[0], request, allocation):
            return records[0]
        return None

    def reserve(
        self,
        request: JobRequest,
        allocation: Allocation,
        image: ImageIdentity | UserError,
        underlay: Mapping[str, str] = MappingProxyType({}),
    ) -> LeaseRecord:
        """The lease of this request; where there was none, a new one that ends all others of the job.

        A new lease is RESERVED, READY where it has no key, or REFUSED.  ``image``
        is the result of ``look_up``, ``underlay`` has the address of each node where the
        job has a job network; both count only where a lease is made.

        Raises:
            FabricError: the request is invalid, or no key or VNI is free.
        """
        return self.reserve_all((Wanted(request, allocation, image),), underlay)[0]

    def reserve_all(self, wanted: Sequence[Wanted], underlay: Mapping[str, str]) -> tuple[LeaseRecord, ...]:
        """As ``reserve``, for all components of a heterogeneous job that have one segment, in their order.

        Their leases are made in one transaction: all of them, or none.  If one is refused, all are.
        """
        found = [self.find(one.request, one.allocation) for one in wanted]
        known = tuple(record for record in found if record is not None)
        return known if len(known) == len(wanted) else self._make(wanted, underlay)

    def _make(self, wanted: Sequence[Wanted], underlay: Mapping[str, str]) -> tuple[LeaseRecord, ...]:
        refusal = self._refusal(wanted)
        self._lifecycle.age()
        stale = [
            old.lease.generation
            for one in wanted
            for old in self._store.of_job(one.request.job_id)
            if old.lease.state in rules.USABLE
        ]
        with self._store.transaction():
            self._lifecycle.apply(stale, Ended())
            records = self._create(wanted, underlay, refusal)
        for old in stale:
            log.info("%s ending: replaced by a new generation", old)
            self._lifecycle.release(old)
        for record in records:
            lease = record.lease
            nodes, user = len(lease.allocation.nodes), lease.request.user
            log.info("%s %s for %s on %d nodes %s", lease.generation, lease.state, user, nodes, lease.refusal)
        return records

    def _create(
        self, wanted: Sequence[Wanted], underlay: Mapping[str, str], refusal: _Refusal | None
    ) -> tuple[LeaseRecord, ...]:
        """Write new leases; REFUSED if there is a refusal already, or if nothing is left for them."""
        if refusal is None:
            try:
                with self._store.transaction():
                    return self._create_usable(wanted, underlay)
            except _RefusedError as err:
                refusal = err.refusal
        self.refusals[refusal.cause] += len(wanted)
        now = self._clock()
        records = tuple(
            rules.refuse(_generation(one.request), one.request, one.allocation, refusal.line, now)
            for one in wanted
        )
        for record in records:
            self._lifecycle.create(record, None)
        return records

    def _create_usable(
        self, wanted: Sequence[Wanted], underlay: Mapping[str, str]
    ) -> tuple[LeaseRecord, ...]:
        network = self._config.network
        generations = [_generation(one.request) for one in wanted]
        segment = self._segment(wanted, generations, underlay)
        cluster, segment = self._enter(wanted, generations, segment)
        records = []
        for generation, one in zip(generations, wanted, strict=True):
            record, key = self._plan(generation, one, cluster)
            nat, site = segments.nat_wanted(one.request, network), segments.site_wanted(one.request, network)
            resume = None if one.resume is None else self._continue(generation, one.resume)
            lease = replace(record.lease, nat=nat, site=site, segment=segment, resume=resume, cluster=cluster)
            if savable.is_asked(lease.request) and (why := savable.refusal(lease, self._config)):
                raise _RefusedError(
                    _Refusal("checkpoint", f"--vhpc-checkpoint: the job cannot be saved: {why}")
                )
            record = replace(record, lease=lease)
            self._lifecycle.create(record, key)
            records.append(record)
        return tuple(records)

    def _enter(
        self, wanted: Sequence[Wanted], generations: Sequence[Generation], segment: Segment | None
    ) -> tuple[ClusterPlace | None, Segment | None]:
        """The cluster of new leases, and their segment with its addresses there."""
        if segment is None or wanted[0].request.cluster is None:
            return None, segment
        try:
            return self._clusters.enter([one.request for one in wanted], segment, _parts(wanted, generations))
        except UserError as err:
            cause = "policy" if isinstance(err, policy.PolicyError) else "cluster"
            raise _RefusedError(_Refusal(cause, err.line())) from err

    def _continue(self, generation: Generation, asked: StoredCheckpoint) -> Resume:
        """A generation continues a checkpoint, which no other one does at the same time."""
        store = self._store.checkpoints
        one = store.get(asked.serial)
        if one is None or one.state is not CheckpointState.VALID:
            raise _RefusedError(_Refusal("checkpoint", f"checkpoint {asked.name} has been removed"))
        # Guests that are not to continue (--stop) are gone as soon as their checkpoint is valid.
        for other, runs in ((one.generation, not one.stop), (one.resumed_by, True)):
            if other is not None and runs and self._store.state(other) in rules.USABLE:
                verb = "runs still" if other == one.generation else f"continues checkpoint {one.name} already"
                raise _RefusedError(_Refusal("checkpoint", f"job {other.job_id} {verb}"))
        store.resume(one.serial, generation)
        return resuming.record(one, store.saved(one.serial))

    def _refusal(self, wanted: Sequence[Wanted]) -> _Refusal | None:
        """Why the user's request cannot be served; None when it can."""
        names = [node for one in wanted for node in one.allocation.node_names]
        if len(wanted) > 1 and len(set(names)) < len(names):
            twice = next(node for node in names if names.count(node) > 1)
            return _Refusal(
                "network",
                f"two components of the heterogeneous job are on node {twice}, so they cannot have one "
                "network (choose other nodes, or --vhpc-network=none)",
            )
        counts = [len(one.allocation.nodes) * one.request.guests_per_node for one in wanted]
        for one, guests in zip(wanted, counts, strict=True):
            found = self._refusal_of(one, sum(counts) - guests)
            if found and len(wanted) > 1 and one.request.het is not None:
                place = f"component {one.request.het.offset} of the heterogeneous job"
                return replace(found, line=f"{place}: {found.line}")
            if found:
                return found
        line = cluster_rules.refusal([one.request for one in wanted], self._config.network)
        return _Refusal("cluster", line) if line else None

    def _refusal_of(self, one: Wanted, others: int) -> _Refusal | None:
        """The same for one component; ``others`` is the number of the other components' guests."""
        image, request, allocation, config = one.image, one.request, one.allocation, self._config
        if isinstance(image, UserError):
            cause = "policy" if isinstance(image, policy.PolicyError) else "image"
            saved = request.resume or isinstance(image, savable.NeverRequeuedError)
            cause = "checkpoint" if saved and cause == "image" else cause
            cause = "cluster" if isinstance(image, cluster_rules.NotOfAccountError) else cause
            return _Refusal(cause, image.line())
        found = (
            ("policy", policy.limit_refusal(config, request, allocation)),
            ("network", segments.refusal(request, allocation, config.network, others)),
            ("boot time", rules.impatient(request, allocation, config)),
            ("disk", rules.oversized(request, config) or rules.misplaced(request, config)),
            (
                "driver",
                drivers.missing(allocation, image, config.placement.gpu_gres, config.images.gpu_drivers),
            ),
            ("size", rules.misfit(request, allocation, image, config)),
        )
        return next((_Refusal(cause, line) for cause, line in found if line), None)

    def _plan(
        self, generation: Generation, one: Wanted, cluster: ClusterPlace | None
    ) -> tuple[LeaseRecord, KeyAssignment | None]:
        """A lease with its network identity, and the key of that."""
        assert not isinstance(one.image, UserError)
        request, allocation, now = one.request, one.allocation, self._clock()
        serial, held = None if cluster is None else cluster.serial, self._store.keys.snapshot()
        owner = owner_of(generation, request.uid, serial, self._config.fabric.key_owner)
        try:
            network, key = self._network.plan(generation, request, allocation, held, owner)
        except ExhaustedError as err:
            if self._config.fabric.exhausted != "refuse":
                raise
            raise _RefusedError(_Refusal("keys", err.line())) from err
        record = rules.reserve(generation, request, allocation, one.image, network, now)
        if network.kind == "none":  # the fabric is not involved
            record = rules.move(record, LeaseState.READY, now)
        return record, key

    def _segment(
        self, wanted: Sequence[Wanted], generations: Sequence[Generation], underlay: Mapping[str, str]
    ) -> Segment | None:
        """The segment of new leases, whose VNI is taken; None if the job has no network."""
        network, store = self._config.network, self._store.segments
        if not segments.wanted(wanted[0].request, network):
            return None
        try:
            vni = segments.choose(network, store.held(), store.freed())
        except ExhaustedError as err:
            if network.exhausted != "refuse":
                raise
            raise _RefusedError(_Refusal("VNIs", err.line())) from err
        parts = _parts(wanted, generations)
        nodes = [node for part in parts for node in part.nodes]
        if line := segments.mixed(nodes, underlay):
            raise _RefusedError(_Refusal("network", line))
        flood = any(segments.flood_wanted(one.request, network) for one in wanted)
        store.add(vni, *generations)
        shared = parts if len(parts) > 1 else ()
        made = segments.make(network, vni, nodes, underlay, flood=flood, parts=shared)
        resume = wanted[0].resume
        return made if resume is None else resuming.segment(made, resume.origin.segment)


def _parts(wanted: Sequence[Wanted], generations: Sequence[Generation]) -> tuple[SegmentPart, ...]:
    return tuple(
        SegmentPart.of(generation, one.allocation, one.request.guests_per_node)
        for generation, one in zip(generations, wanted, strict=True)
    )


def _generation(request: JobRequest) -> Generation:
    while not (made := Generation(request.job_id, request.restart, os.urandom(4).hex())).has_lease:
        pass
    return made
