# SPDX-License-Identifier: Apache-2.0
"""From a request to its answer: which handler has it, and what its errors look like to the client."""

from __future__ import annotations

import logging
import time

import msgspec

from vhpc_slurm import __version__
from vhpc_slurm.controller.api import listing
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.operating import Operating
from vhpc_slurm.controller.api.starting import Starting
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.sync.isolation import IsolationState, IsolationWatch
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.model import Generation, Timeline

log = logging.getLogger("vhpcd")


class Requests:
    """Answers requests that are authentic, authorised and fresh; belongs to the event loop."""

    def __init__(
        self,
        leases: LeaseLayer,
        executor: LeaseExecutor,
        starting: Starting,
        operating: Operating,
        watch: IsolationWatch,
        database: str,
    ) -> None:
        """``database`` is the path that the status shows."""
        self._leases = leases
        self._executor = executor
        self._starting = starting
        self._operating = operating
        self._watch = watch
        self._database = database
        self._began = time.monotonic()

    async def answer(self, request: wire.Request, uid: int = 0) -> wire.Answer:
        """Do what ``uid`` asks; every VhpcError becomes a Failure, and nothing else is raised."""
        try:
            return await self._answer(request, uid)
        except VhpcError as err:
            return wire.Failure(kind=err.kind, what=err.what, why=err.why, hint=err.hint)
        except (ValueError, msgspec.MsgspecError) as err:
            return wire.Failure(kind="fabric", what="vhpcd cannot use that request", why=str(err)[:300])
        except Exception:
            log.exception("internal error")
            return wire.Failure(kind="fabric", what="vhpcd failed", hint="see its log")

    async def _answer(self, request: wire.Request, uid: int) -> wire.Answer:
        executor, leases, starting = self._executor, self._leases, self._starting
        answer: wire.Answer = wire.Done()
        match request:
            case wire.OpenGeneration():
                answer = await starting.open(request)
            case wire.WithoutGuests():
                starting.without_guests(request)
            case wire.GetLease():
                answer = await starting.get(request)
            case wire.Ending():
                await executor.write(leases.lifecycle.end_job, request.job_id, request.restart)
                starting.notify(request.job_id)
            case wire.Acknowledge():
                await self._acknowledge(request)
            case wire.ReportTimeline():
                await executor.write(leases.nodes.report, request.timeline.unpack())
            case wire.ReportReady():
                answer = await starting.ready(request)
            case wire.ListLeases() | wire.ListTimelines():
                answer = await self._list(request)
            case wire.AskStatus():
                answer = await self._status()
            case wire.Fence():
                answer = await self._operating.fence(request, uid)
            case wire.ClearKey():
                await self._operating.clear(request, uid)
            case wire.TellFabric():
                await self._operating.tell(request, uid)
        return answer

    async def _list(self, request: wire.ListLeases | wire.ListTimelines) -> wire.Answer:
        if isinstance(request, wire.ListLeases):
            return await listing.leases(self._executor, self._leases.store, request)
        return await listing.timelines(self._executor, self._leases.store, request)

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

    async def _status(self) -> wire.Status:
        counts = await self._executor.write(self._leases.store.counts)
        alarms = await self._executor.write(self._leases.nodes.alarms)
        return wire.Status(
            version=__version__,
            protocol=wire.VERSION,
            time=time.time(),
            uptime_s=time.monotonic() - self._began,
            database=self._database,
            leases=counts,
            connections=0,  # the server fills it in
            fabric=_fabric_state(self._watch.state()),
            alarms=tuple(
                wire.AlarmWire(job_id=one.job_id, node=one.node, time=one.time, what=one.what)
                for one in alarms
            ),
        )


def _fabric_state(state: IsolationState) -> wire.FabricState:
    return wire.FabricState(
        safe=state.safe,
        open_since=state.open_since,
        what=state.what,
        audited=state.audited,
        lost=tuple((str(generation), what) for generation, what in state.lost),
    )
