# SPDX-License-Identifier: Apache-2.0
"""How a job starts: PrologSlurmctld opens a generation, and Prologs wait until its lease is decided."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

import msgspec

from vhpc_slurm import policy
from vhpc_slurm.config import Config
from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.architectures import Architectures
from vhpc_slurm.controller.api.changes import Changes, Key, of_cluster
from vhpc_slurm.controller.api.components import Component, Components, LateError
from vhpc_slurm.controller.leases import (
    cluster_rules,
    resuming,
    rules,
    savable,
    segments,
    ssh_keys,
    tunnel_keys,
)
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.jobimage import check_saved, look_up
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.leases.opening import Wanted
from vhpc_slurm.controller.sync.isolation import IsolationWatch
from vhpc_slurm.controller.sync.scheduler import BatchScheduler
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import (
    Allocation,
    Generation,
    JobRequest,
    Lease,
    LeaseRecord,
    LeaseState,
    SshKeys,
    TunnelKeyPairs,
    TunnelKeys,
)
from vhpc_slurm.options import cluster_account
from vhpc_slurm.slurm.port import Slurm

log = logging.getLogger("vhpcd")

LOOK_S = 5.0
"""A component that waits for others looks at this interval whether it has a lease already."""
Locate = Callable[[Iterable[str]], Awaitable[Mapping[str, str]]]
"""Returns the underlay address of each node for which it is known."""


class Starting:
    """Requests that may wait for the fabric or for one another; belongs to the event loop."""

    def __init__(
        self,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        scheduler: BatchScheduler,
        watch: IsolationWatch,
        config: Config,
        locate: Locate,
        slurm: Slurm,
        changes: Changes | None = None,
    ) -> None:
        """``locate`` knows where nodes are, for job networks; ``changes`` are told of leases that change."""
        self._leases = leases
        self._executor = executor
        self._scheduler = scheduler
        self._watch = watch
        self._config = config
        self._network = config.network
        self._locate = locate
        self._slurm = slurm
        self._architectures = Architectures(slurm)
        self._components = Components()
        self._opening: dict[int, tuple[asyncio.Lock, int]] = {}
        self._changes = changes or Changes()

    async def open(self, request: wire.OpenGeneration) -> wire.LeaseAnswer:
        """The job's lease, READY or REFUSED; requests of one job are served one after the other."""
        job, allocation = request.request, wire_types.unpack_allocation(request.node_groups)
        opening = self._leases.opening
        async with self._one_at_a_time(job.job_id):
            record = await self._executor.write(opening.find, job, allocation)
            if job.resume is None:
                job = policy.with_defaults(self._config, job)
            if record is None and job.het is not None and job.resume is None:
                record, group = await self._gathered(job, allocation)
            else:
                group = ((job, allocation),)
            if record is None or record.lease.state not in rules.DECIDED:
                with self._scheduler.arriving():
                    record = await self._reserve(job.job_id, group)
            if record.lease.state is LeaseState.RESERVED:
                record = await self._scheduler.ready(record.lease.generation)
        self.notify(job.job_id)
        return _lease(record)

    async def _gathered(
        self, job: JobRequest, allocation: Allocation
    ) -> tuple[LeaseRecord | None, tuple[Component, ...]]:
        """The components that share a network with this one; its lease, if it was made meanwhile.

        Raises:
            FabricError: a component was not announced in time.
        """
        place, own = job.het, ((job, allocation),)
        assert place is not None
        if not (segments.wanted(job, self._network) and segments.is_allowed(job, self._network)):
            self._components.apart(place.leader, place.offset)
            return None, own
        until = asyncio.get_running_loop().time() + wire.GATHER_S
        while True:
            left = until - asyncio.get_running_loop().time()
            try:
                return None, await self._components.gather(job, allocation, min(LOOK_S, max(0.1, left)))
            except LateError:
                # the client may have lost the connection whose request was served together with the others
                record = await self._executor.write(self._leases.opening.find, job, allocation)
                if record is not None:
                    return record, own
                if left <= LOOK_S:
                    raise

    async def _reserve(self, job_id: int, group: tuple[Component, ...]) -> LeaseRecord:
        """Make the leases of all components; returns that of one of them."""
        wanted = [await self._looked_up(*one) for one in group]
        underlay: Mapping[str, str] = {}
        if segments.wanted(wanted[0].request, self._network):
            underlay = await self._locate([node for _, part in group for node in part.node_names])
        self._watch.must_be_safe()
        records = await self._executor.write(self._leases.opening.reserve_all, wanted, underlay)
        return next(one for one in records if one.lease.generation.job_id == job_id)

    async def _looked_up(self, job: JobRequest, allocation: Allocation) -> Wanted:
        """A job with its image, and with its checkpoint if it continues one."""
        # The file system of the catalogue may hang, and so may Slurm: that must not stop the database thread.
        aside, write, opening = self._executor.aside, self._executor.write, self._leases.opening
        if savable.is_asked(job) and not await aside(self._slurm.may_requeue, job.job_id):
            return Wanted(job, allocation, savable.NeverRequeuedError(job))
        account = cluster_account(job.cluster or "")
        if (
            account
            and account == job.account
            and account not in await aside(self._slurm.accounts, job.user, account)
        ):
            return Wanted(job, allocation, cluster_rules.NotOfAccountError(job))
        found = await write(opening.own, job, allocation) if job.restart else None
        if found is None and job.resume is None:
            of_nodes = await aside(self._architectures.of, allocation.node_names)
            return Wanted(job, allocation, await aside(look_up, self._config, job, of_nodes))
        if found is None:
            found = await write(opening.resumed, job, allocation)
        if isinstance(found, UserError):
            return Wanted(job, allocation, found)
        job, image = resuming.merged(job, found.origin), found.origin.image
        assert image is not None, "a lease without an image is never READY, and was not saved"
        return Wanted(job, allocation, await aside(check_saved, self._config, job, image), found)

    def without_guests(self, request: wire.WithoutGuests) -> None:
        """A component of a heterogeneous job needs no lease."""
        self._components.apart(request.leader, request.offset)

    async def get(self, request: wire.GetLease) -> wire.LeaseAnswer:
        """A look at the newest lease; or, with ``wait_s``, the decided lease, which the node takes."""
        if request.wait_s <= 0:
            record = await self._executor.write(self._leases.queries.look, request.job_id, request.restart)
            if record is None:
                raise FabricError(f"there is no lease of job {request.job_id}")
            return _lease(record)
        deadline = asyncio.get_running_loop().time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._changes.listening(request.job_id) as change:
                # Listening begins before the look, or a change between the two would be missed.
                self._watch.must_be_safe()
                record = await self._executor.write(
                    self._leases.nodes.take, request.job_id, request.restart, request.node
                )
                if record is not None:
                    return await self._taken(record, request.node)
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not (await asyncio.wait({change}, timeout=left))[0]:
                    raise FabricError(
                        f"no lease of job {request.job_id} became ready within {request.wait_s:g} s",
                        "PrologSlurmctld did not finish its work",
                        "see the log of vhpcd and of slurmctld",
                    )

    async def _taken(self, record: LeaseRecord, node: str) -> wire.LeaseAnswer:
        """The answer to a node that has taken a lease, with the keys that its guests need."""
        lease, answer = record.lease, _lease(record)
        if lease.resume is not None and lease.state is LeaseState.READY:
            resume = await self._executor.write(self._leases.checkpoints.secret, lease, node)
            answer = msgspec.structs.replace(answer, resume=resume)
        if lease.segment is None or lease.state is not LeaseState.READY:
            return answer
        parts = lease.parts
        if lease.cluster is None and sum(len(part.nodes) * part.guests_per_node for part in parts) == 1:
            return answer
        owner = parts[0].generation  # all components have the keys of the first one
        tunnel = await self._tunnel_keys(lease, node, owner)
        known = await self._executor.write(self._leases.store.ssh_keys.get, owner)
        if known is None:
            known = await self._new_ssh_keys(owner)
        return msgspec.structs.replace(answer, ssh=known, tunnel=tunnel)

    async def _tunnel_keys(self, lease: Lease, node: str, generation: Generation) -> TunnelKeys | None:
        """A node's keys for an encrypted segment, made once for all nodes; None if it has no tunnels.

        Raises:
            FabricError: vhpcd's host cannot make keys, or the lease is over.
        """
        nodes = lease.segment_nodes
        if lease.segment is None or not lease.segment.tunnel_port or len(nodes) == 1:
            return None
        store = self._leases.store.tunnel_keys
        known: TunnelKeyPairs | None = await self._executor.write(store.get, generation)
        if known is None:
            async with self._one_at_a_time(generation.job_id):
                known = await self._executor.write(store.get, generation)
                if known is None:
                    made = await self._executor.aside(tunnel_keys.make, len(nodes))
                    known = await self._executor.write(self._leases.nodes.keep_tunnel_keys, generation, made)
        if known is None:
            raise FabricError(f"lease {generation} is over", "the job has ended or was requeued")
        return known.of(nodes.index(node))

    async def _new_ssh_keys(self, generation: Generation) -> SshKeys | None:
        """Make keys once for all nodes; None when vhpcd's host cannot make any."""
        async with self._one_at_a_time(generation.job_id):
            known = await self._executor.write(self._leases.store.ssh_keys.get, generation)
            if known is not None:
                return known
            try:
                made = await self._executor.aside(ssh_keys.make)
            except FabricError as err:
                log.warning("no ssh between the guests of %s: %s", generation, err.line())
                return None
            return await self._executor.write(self._leases.nodes.keep_ssh_keys, generation, made)

    async def ready(self, request: wire.ReportReady) -> wire_types.ReadyState:
        """Store a node's report; with ``wait_s`` answer when the barrier is settled, or after that time."""
        generation, readiness = Generation.parse(request.generation), self._leases.readiness
        reported = await self._executor.write(
            readiness.report, generation, request.node, request.state, request.kind, request.line
        )
        keys: list[Key] = [generation.job_id]
        if reported.cluster is not None:
            keys.append(of_cluster(reported.cluster))
        deadline = asyncio.get_running_loop().time() + min(request.wait_s, wire.MAX_WAIT_S)
        while True:
            with self._changes.listening(*keys) as change:
                state = await self._executor.write(
                    readiness.look, generation, request.about, named=request.wait_s > 0
                )
                left = deadline - asyncio.get_running_loop().time()
                if not state.settled and left > 0:
                    await asyncio.wait({change}, timeout=left)
                    continue
            if state.settled:
                for job_id in reported.jobs:
                    self.notify(job_id)
            return state

    def notify(self, job_id: int) -> None:
        """A lease of the job has changed: nodes that wait for it look again."""
        self._changes.notify(job_id)

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, job_id: int) -> AsyncIterator[None]:
        lock, users = self._opening.get(job_id, (asyncio.Lock(), 0))
        self._opening[job_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._opening.pop(job_id)
            if users > 1:
                self._opening[job_id] = (lock, users - 1)


class _SameLease:
    """A lease compared by identity: comparing thousands of nodes would cost as much as packing them."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameLease) and self.lease is other.lease

    def __hash__(self) -> int:
        return id(self.lease)


@functools.lru_cache(maxsize=64)
def _packed(same: _SameLease) -> wire.LeaseAnswer:
    return wire.LeaseAnswer(lease=wire_types.LeaseWire.pack(same.lease))


def _lease(record: LeaseRecord) -> wire.LeaseAnswer:
    return _packed(_SameLease(record.lease))
