# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: which handler has it, and what its errors look like to the client."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import msgspec

from vhpc_slurm import __version__
from vhpc_slurm.controller.api import checkpoint_messages, cluster_messages, listing, usage_messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.checkpointing import Checkpointing
from vhpc_slurm.controller.api.clustering import Clustering
from vhpc_slurm.controller.api.operating import Operating
from vhpc_slurm.controller.api.progress import Progress
from vhpc_slurm.controller.api.quarantine import Quarantine
from vhpc_slurm.controller.api.sofar import UsageSoFar
from vhpc_slurm.controller.api.starting import Starting
from vhpc_slurm.controller.api.status_messages import (
    AlarmWire,
    AskTrouble,
    FabricState,
    ReportQuarantine,
    Status,
    Trouble,
)
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.store.errors import RetryError, UnknownOutcomeError
from vhpc_slurm.controller.store.writership import FencedError
from vhpc_slurm.controller.sync.isolation import IsolationState, IsolationWatch
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import Generation, NodeUsage, Timeline, Viewer
from vhpc_slurm.terminal import one_line

log = logging.getLogger("vhpcd")

ByUsers = checkpoint_messages.Changing | cluster_messages.ByUsers
"""Requests of ordinary users about what belongs to them alone."""
Lists = wire.ListLeases | wire.ListTimelines | wire.ListReports | usage_messages.AskUsage | AskTrouble


class Answering(Protocol):
    """An object that answers requests."""

    async def answer(self, request: wire.Request, uid: int = 0, viewer: Viewer | None = None) -> wire.Answer:
        """Do what ``uid`` asks; every VhpcError becomes a Failure, and nothing else is raised.

        ``viewer`` limits lists to what an ordinary user may see; None: root or SlurmUser.
        """


class Requests:
    """Answers requests that are authentic, authorised and fresh; belongs to the event loop."""

    def __init__(
        self,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        starting: Starting,
        operating: Operating,
        checkpoints: Checkpointing,
        clusters: Clustering,
        watch: IsolationWatch,
        database: str,
        *,
        standbys: bool = False,
    ) -> None:
        """``database`` is the path that the status shows; with ``standbys`` there are other vhpcd."""
        self._standbys = standbys
        self._leases = leases
        self._executor = executor
        self._starting = starting
        self._operating = operating
        self._checkpoints = checkpoints
        self._clusters = clusters
        self._watch = watch
        self._database = database
        self._began = time.monotonic()
        self._progress = Progress()
        self._so_far = UsageSoFar()
        self.quarantine = Quarantine()

    async def answer(self, request: wire.Request, uid: int = 0, viewer: Viewer | None = None) -> wire.Answer:
        """Do what ``uid`` asks; every VhpcError becomes a Failure, and nothing else is raised.

        ``viewer`` limits lists to what an ordinary user may see; None: root or SlurmUser.
        """
        try:
            return await self._route(request, uid, viewer)
        except (RetryError, UnknownOutcomeError, FencedError) as err:
            # Every request may be repeated, and a standby may reach the database where this vhpcd does not.
            kind = wire.AGAIN if self._standbys else err.kind
            return wire.Failure(kind=kind, what=err.what, why=err.why, hint=err.hint)
        except VhpcError as err:
            return wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
        except (ValueError, msgspec.MsgspecError) as err:
            log.error("the request %s cannot be used: %s", type(request).__name__, one_line(str(err)[:300]))
            return wire.Failure(kind=wire.UNUSABLE, what="vhpcd cannot use that request", why=str(err)[:300])
        except Exception:
            log.exception("internal error")
            return wire.Failure(kind="fabric", what="vhpcd failed", hint="see its log")

    async def _route(self, request: wire.Request, uid: int, viewer: Viewer | None) -> wire.Answer:
        if isinstance(request, checkpoint_messages.ListCheckpoints):
            return await listing.checkpoints(self._executor, self._leases, request, viewer)
        if isinstance(request, wire.OfUsers):
            return await self._list(request, viewer)
        if viewer is not None and not isinstance(request, ByUsers):
            raise UserError("only root and SlurmUser may send this request")
        if isinstance(request, checkpoint_messages.OfCheckpoints):
            return await self._checkpoints.answer(request, uid, viewer)
        if isinstance(request, cluster_messages.OfClusters):
            return await self._clusters.answer(request, uid, viewer)
        return await self._answer(request, uid)

    async def _answer(self, request: wire.Request, uid: int) -> wire.Answer:
        executor, leases, starting = self._executor, self._leases, self._starting
        answer: wire.Answer = wire.Done()
        match request:
            case wire.OpenGeneration():
                self._progress.waits(request.waiter, request.request.job_id)
                answer = await starting.open(request)
            case wire.WithoutGuests():
                starting.without_guests(request)
            case wire.GetLease():
                found = await starting.get(request)
                if request.stage:
                    self._say(request, found)
                answer = wire.LeaseAnswer(lease=found.lease.brief()) if request.brief else found
            case wire.Ending():
                await executor.write(leases.lifecycle.end_job, request.job_id, request.restart)
                self._progress.over(request.job_id)
                starting.notify(request.job_id)
            case wire.Acknowledge():
                await self._acknowledge(request)
            case wire.ReportTimeline():
                await executor.write(leases.nodes.report, request.timeline.unpack(), request.report)
            case usage_messages.ReportUsage():
                answer = await self._keep(request)
            case wire.ReportReady():
                answer = await starting.ready(request)
            case ReportQuarantine() | usage_messages.ReportUsageSoFar():
                self._remember(request)
            case wire.AskStatus():
                answer = await self._status()
            case wire.Fence() | wire.ClearKey() | wire.TellFabric():
                answer = await self._operate(request, uid)
        return answer

    def _remember(self, request: ReportQuarantine | usage_messages.ReportUsageSoFar) -> None:
        """Keep in memory a report that nodes repeat in each health check."""
        match request:
            case ReportQuarantine():
                self.quarantine.report(request)
            case usage_messages.ReportUsageSoFar():
                self._so_far.report(request)

    async def _operate(self, request: wire.Fence | wire.ClearKey | wire.TellFabric, uid: int) -> wire.Answer:
        match request:
            case wire.Fence():
                return await self._operating.fence(request, uid)
            case wire.ClearKey():
                await self._operating.clear(request, uid)
            case wire.TellFabric():
                await self._operating.tell(request, uid)
        return wire.Done()

    async def _keep(self, request: usage_messages.ReportUsage) -> wire.Answer:
        usage = NodeUsage(Generation.parse(request.generation), request.node, request.guests)
        complete = await self._executor.write(self._leases.nodes.keep_usage, usage)
        self._so_far.ended(request.generation, request.node)
        return usage_messages.UsageKept(complete=complete)

    async def _list(self, request: Lists, viewer: Viewer | None) -> wire.Answer:
        executor, store = self._executor, self._leases.store
        match request:
            case wire.ListLeases():
                if request.waiter:
                    job_id = self._progress.job_of(request.waiter)
                    if job_id is None:
                        return wire.LeasePage(records=(), more=None)
                    request = msgspec.structs.replace(request, job_id=job_id)
                page = await listing.leases(executor, store, request, viewer)
                if request.progress:
                    page = await listing.progress(executor, store, page, self._progress)
                if request.usage:
                    page = await listing.used(executor, store, page, self._so_far if request.so_far else None)
                return page
            case wire.ListTimelines():
                return await listing.timelines(executor, store, request, viewer)
            case wire.ListReports():
                return await listing.reports(executor, store, request, viewer)
            case usage_messages.AskUsage():
                return await listing.usage(executor, store, request, self._so_far, viewer)
            case AskTrouble():
                return await self._trouble(viewer)

    def _say(self, request: wire.GetLease, answer: wire.LeaseAnswer) -> None:
        """A node has said what it does for its job, if it is one of the job's nodes."""
        groups = answer.lease.node_groups
        if request.restart is not None and any(request.node in group.nodes for group in groups):
            self._progress.doing(
                request.job_id, request.restart, request.node, request.stage, request.stage_s
            )

    async def _acknowledge(self, request: wire.Acknowledge) -> None:
        generation = Generation.parse(request.generation)
        stages = request.stages
        await self._executor.write(
            self._leases.nodes.acknowledge,
            generation,
            request.node,
            clean=request.clean,
            note=request.note[:1000],
            timeline=None if stages is None else Timeline(generation, request.node, stages),
        )

    async def _trouble(self, viewer: Viewer | None = None) -> Trouble:
        if not (viewer is None or viewer.everything):
            raise UserError("only operators and administrators of Slurm may send this request")
        alarms = await self._executor.write(self._leases.nodes.alarms)
        return Trouble(
            fabric=_fabric_state(self._watch.state()),
            alarms=tuple(
                AlarmWire(job_id=one.job_id, node=one.node, time=one.time, what=one.what) for one in alarms
            ),
            quarantine=self.quarantine.shown(),
        )

    async def _status(self) -> Status:
        counts = await self._executor.write(self._leases.store.counts)
        trouble = await self._trouble()
        return Status(
            version=__version__,
            protocol=wire.VERSION,
            time=time.time(),
            uptime_s=time.monotonic() - self._began,
            database=self._database,
            leases=counts,
            connections=0,  # the server fills it in
            fabric=trouble.fabric,
            alarms=trouble.alarms,
            quarantine=trouble.quarantine,
        )


def _fabric_state(state: IsolationState) -> FabricState:
    return FabricState(
        safe=state.safe,
        open_since=state.open_since,
        what=state.what,
        audited=state.audited,
        lost=tuple((str(generation), what) for generation, what in state.lost),
    )
