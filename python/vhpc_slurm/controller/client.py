# SPDX-License-Identifier: Apache-2.0
"""How hooks and commands ask vhpcd.

Imports are few: a hook pays for them in the user's waiting time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import status_messages, usage_messages
from vhpc_slurm.controller.checkpoint_client import CheckpointCalls
from vhpc_slurm.controller.cluster_client import ClusterCalls
from vhpc_slurm.controller.exchange import AnswerError, UnusableError, as_error
from vhpc_slurm.controller.wire_types import NodeState, ReadyState
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.model import (
    Allocation,
    Generation,
    JobRequest,
    Lease,
    LeaseRecord,
    NodeReport,
    NodeUsage,
    Timeline,
)

UNPACED, PACE_S = 500, 0.25
"""After so many leases an ordinary user waits so long before each further page (useraccess.RATE)."""
NEWEST = (1 << 62) - 1
"""Above the serial number of every lease."""


class AcknowledgementFields(Protocol):
    """The acknowledgement of a node for a generation."""

    @property
    def generation(self) -> Generation:
        """The generation."""

    @property
    def node(self) -> str:
        """The node."""

    @property
    def clean(self) -> bool:
        """Whether the node holds nothing any more."""

    @property
    def note(self) -> str:
        """The resources that the node still holds, and why."""

    @property
    def timeline(self) -> Timeline | None:
        """The stages of the generation on this node, if known."""


class ControllerClient(CheckpointCalls, ClusterCalls):
    """A client of the vhpcd that the configuration names.

    All methods raise FabricError when vhpcd cannot be reached or does not
    answer within ``controller.request_timeout_s`` (plus the wait asked for),
    and UserError when it does not listen to this user.
    """

    def open_generation(self, request: JobRequest, allocation: Allocation, waiter: str = "") -> Lease:
        """Make the job's lease, or return the one it has: READY, or REFUSED with the line for the user.

        ``waiter`` is the word of a command that waits for the job on a terminal; empty: none.
        """
        node_groups = wire_types.pack_allocation(allocation)
        body = wire.OpenGeneration(request=request, node_groups=node_groups, waiter=waiter)
        wait_s = wire.GATHER_S if request.het is not None else 0.0
        return self._ask(body, wire.LeaseAnswer, wait_s).lease.unpack()

    def without_guests(self, leader: int, offset: int) -> None:
        """Report that a component of a heterogeneous job has no guests."""
        self._ask(wire.WithoutGuests(leader=leader, offset=offset), wire.Done)

    def lease(self, job_id: int, restart: int | None, node: str, wait_s: float) -> Lease:
        """The lease of a job.

        With ``wait_s`` > 0 this node *takes* it: READY or REFUSED, waiting up
        to ``wait_s`` seconds for that, and from then on the lease is released
        only after this node's acknowledgement.  With 0 it only looks: the
        newest lease (of that restart), in whatever state.

        Raises:
            FabricError: also when there is no lease by then, when it is over, or
                when the job has no part on this node.
        """
        body = wire.GetLease(job_id=job_id, restart=restart, node=node, wait_s=wait_s)
        answer = self._ask(body, wire.LeaseAnswer, wait_s)
        lease = answer.lease.unpack()
        resume = answer.resume or lease.resume
        return msgspec.structs.replace(lease, ssh=answer.ssh, tunnel=answer.tunnel, resume=resume)

    def look(
        self, job_id: int, restart: int | None, node: str, stage: tuple[str, float] = ("", 0.0)
    ) -> Lease:
        """The newest lease of a job (of that restart), in whatever state, without allocation and network.

        ``stage`` is what this node does for the job, and for how many seconds.

        Raises:
            FabricError: also when there is no lease, or when the job has no part on this node.
        """
        name, for_s = stage
        body = wire.GetLease(
            job_id=job_id, restart=restart, node=node, wait_s=0, stage=name[:40], stage_s=for_s, brief=True
        )
        return self._ask(body, wire.LeaseAnswer).lease.brief().unpack()

    def ending(self, job_id: int, restart: int | None) -> None:
        """Report that the job's generations up to this restart count (None: all) have ended."""
        self._ask(wire.Ending(job_id=job_id, restart=restart), wire.Done)

    def acknowledge(self, ack: AcknowledgementFields) -> None:
        """Report whether this node still holds something of a generation."""
        self._ask(_acknowledge(ack), wire.Done)

    def report_usage(self, usage: NodeUsage) -> bool:
        """Send what a generation has used on a node; returns whether all of its nodes have reported."""
        return self._ask(_report(usage), usage_messages.UsageKept).complete

    def report_and_acknowledge(self, usage: NodeUsage, ack: AcknowledgementFields) -> bool | VhpcError:
        """Send both with one credential; returns what ``report_usage`` returns or raises.

        Raises:
            UnusableError: also when vhpcd is older and knows no such request.
            VhpcError: vhpcd has not taken the acknowledgement.
        """
        if self._version != wire.VERSION:
            raise UnusableError("vhpcd takes these requests one by one only")
        body = wire.Together(requests=(_report(usage), _acknowledge(ack)))
        try:
            answers = self._ask(body, wire.Answers).answers
        except AnswerError as err:
            raise UnusableError(err.what, err.why, err.hint) from err
        kept, done = answers if len(answers) == 2 else (None, None)
        if isinstance(done, wire.Failure):
            raise as_error(done)
        if not isinstance(done, wire.Done):
            raise UnusableError("vhpcd sent an answer to another request", type(done).__name__)
        if isinstance(kept, wire.Failure):
            return as_error(kept)
        return isinstance(kept, usage_messages.UsageKept) and kept.complete

    def report_usage_so_far(self, node: str, usage: Sequence[NodeUsage]) -> None:
        """Send what all generations of a node have used until now."""
        used = tuple(
            usage_messages.GenerationUsage(generation=str(one.generation), guests=one.guests)
            for one in usage[: usage_messages.MAX_GENERATIONS]
        )
        self._ask(usage_messages.ReportUsageSoFar(node=node, used=used), wire.Done)

    def report_quarantine(self, node: str, devices: Sequence[status_messages.DeviceWire]) -> None:
        """Send all devices of a node that are in quarantine."""
        shown = tuple(devices[: status_messages.MAX_DEVICES])
        self._ask(status_messages.ReportQuarantine(node=node, devices=shown), wire.Done)

    def usage(
        self, job_id: int, *, so_far: bool = False
    ) -> tuple[usage_messages.UsagePage, tuple[NodeUsage, ...]]:
        """The usage of a job's last generation, in total and by node; the job's owner may ask as well.

        With ``so_far`` the page has what all other nodes have said of it until now.

        Raises:
            UserError: vhpcd has no such job of this user.
        """
        request = usage_messages.AskUsage(job_id=job_id, so_far=so_far)
        page = self._ask(request, usage_messages.UsagePage)
        first, found, running = page, list(page.reported), list(page.so_far)
        while page.more is not None:
            request = msgspec.structs.replace(request, after=page.more)
            page = self._ask(request, usage_messages.UsagePage)
            if page.generation != first.generation:
                raise FabricError(f"job {job_id} was restarted meanwhile", hint="ask again")
            found.extend(page.reported)
            running.extend(page.so_far)
        generation = Generation.parse(first.generation)
        nodes = tuple(NodeUsage(generation, row.node, row.guests) for row in found)
        return msgspec.structs.replace(first, so_far=tuple(running)), nodes

    def report_timeline(self, timeline: Timeline, report: NodeReport | None = None) -> None:
        """Send a node's timeline, and what it tells the job's owner; both replace earlier ones."""
        line = wire_types.TimelineWire(
            generation=str(timeline.generation), node=timeline.node, stages=timeline.stages
        )
        self._ask(wire.ReportTimeline(timeline=line, report=report), wire.Done)

    def ready(
        self,
        generation: Generation,
        node: str,
        state: NodeState,
        *,
        error: tuple[str, str] = ("", ""),
        about: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> ReadyState:
        """Report this node's part in the ready barrier; the answer is the barrier's state.

        Args:
            generation: the job's.
            node: this node.
            state: what it reports.
            error: kind and line, if it has failed.
            about: at most 8 nodes; the answer says which of them have reported.
            wait_s: wait so long until all nodes have passed, one has failed or the generation is over.
        """
        kind, line = error
        body = wire.ReportReady(
            generation=str(generation),
            node=node,
            state=state,
            kind=kind,
            line=line[: wire.MAX_LINE],
            about=tuple(about),
            wait_s=wait_s,
        )
        return self._ask(body, ReadyState, wait_s)

    def leases(
        self, *, job_id: int | None = None, live: bool = False, timelines: bool = True
    ) -> list[LeaseRecord]:
        """Leases as vhpcd keeps them, oldest first.

        Args:
            job_id: of this job only.
            live: only those that are not released.
            timelines: with what nodes reported; costs as much again.
        """
        records = self._listed(wire.ListLeases(job_id=job_id, live=live)).records
        return self._with_timelines(records, job_id) if timelines else [one.unpack() for one in records]

    def of_job(self, job_id: int) -> tuple[list[LeaseRecord], dict[str, wire_types.ProgressWire]]:
        """Leases of a job with timelines, and how far its generation is that boots."""
        found = self._listed(wire.ListLeases(job_id=job_id, progress=True))
        return self._with_timelines(found.records, job_id), {one.generation: one for one in found.progress}

    def booting(
        self, *, live: bool = False, waiter: str = "", job_id: int | None = None
    ) -> tuple[list[LeaseRecord], dict[str, wire_types.ProgressWire]]:
        """Leases without timelines, and for generations that boot how far they are.

        ``waiter`` is the word of a command: only the job that it waits for. ``job_id``: only this job.
        """
        found = self._listed(wire.ListLeases(job_id=job_id, live=live, waiter=waiter, progress=True))
        return [record.unpack() for record in found.records], {one.generation: one for one in found.progress}

    def history(self, *, live: bool = False) -> wire.LeasePage:
        """All leases, how far those are that boot, and what jobs have used: in all, or until now.

        With ``live`` only those that are not released.
        """
        return self._listed(wire.ListLeases(live=live, progress=True, usage=True, so_far=True))

    def newest(self, before: int = NEWEST) -> wire.LeasePage:
        """One page of leases, newest first, without timelines; ``more`` is ``before`` of the next page."""
        return self._ask(wire.ListLeases(before=before, progress=True), wire.LeasePage)

    def _listed(self, request: wire.ListLeases) -> wire.LeasePage:
        """All pages of a list, as one."""
        pages: list[wire.LeasePage] = []
        after: int | None = 0
        while after is not None:
            page = self._ask(msgspec.structs.replace(request, after=after), wire.LeasePage)
            pages.append(page)
            after = _next(page.more, sum(len(one.records) for one in pages), self._as_uid is not None)
        return wire.LeasePage(
            records=tuple(record for one in pages for record in one.records),
            more=None,
            progress=tuple(booting for one in pages for booting in one.progress),
            used=tuple(used for one in pages for used in one.used),
        )

    def reports(self, job_id: int) -> list[NodeReport]:
        """The nodes' reports to a job's owner, of all generations of the job."""
        found: list[NodeReport] = []
        after: int | None = 0
        while after is not None:
            page = self._ask(wire.ListReports(after=after, job_id=job_id), wire.ReportPage)
            found.extend(page.reports)
            after = page.more
        return found

    def status(self) -> status_messages.Status:
        """Version, clock, database and counts of vhpcd."""
        return self._ask(wire.AskStatus(), status_messages.Status)

    def trouble(self) -> status_messages.Trouble:
        """Alarms, devices in quarantine and the fabric; UserError for users who are no operators."""
        return self._ask(status_messages.AskTrouble(), status_messages.Trouble)

    def fence(self, node: str) -> wire.Fenced:
        """Report that a node is off; UserError when nothing waits for it."""
        return self._ask(wire.Fence(node=node), wire.Fenced)

    def clear(self, generations: Sequence[Generation], wait_s: float) -> None:
        """Remove tombstones after a check of the fabric.

        Raises:
            UserError: a generation has none, or a node still holds it.
            FabricError: also when a port has the key.
        """
        names = tuple(str(generation) for generation in generations)
        self._ask(wire.ClearKey(generations=names), wire.Done, wait_s)

    def tell_fabric(self, *, force: bool, wait_s: float) -> None:
        """Have vhpcd configure the fabric again; FabricError when that fails."""
        self._ask(wire.TellFabric(force=force), wire.Done, wait_s)

    def _with_timelines(
        self, records: Sequence[wire_types.RecordWire], job_id: int | None
    ) -> list[LeaseRecord]:
        lines = self._timelines(job_id) if records else {}
        return [record.unpack(tuple(lines.get(record.lease.generation, ()))) for record in records]

    def _timelines(self, job_id: int | None) -> dict[str, Sequence[Timeline]]:
        found: dict[str, list[Timeline]] = {}
        after: int | None = 0
        while after is not None:
            page = self._ask(wire.ListTimelines(after=after, job_id=job_id), wire.TimelinePage)
            for line in page.timelines:
                found.setdefault(line.generation, []).append(line.unpack())
            after = page.more
        return {generation: sorted(lines, key=lambda line: line.node) for generation, lines in found.items()}


def _next(more: int | None, found: int, limited: bool) -> int | None:
    """Where the next page begins; users wait before they ask for it, so that vhpcd does not refuse it."""
    if more is not None and (limited or os.geteuid()) and found > UNPACED:
        time.sleep(PACE_S)
    return more


def _acknowledge(ack: AcknowledgementFields) -> wire.Acknowledge:
    return wire.Acknowledge(
        generation=str(ack.generation),
        node=ack.node,
        clean=ack.clean,
        note=ack.note,
        stages=ack.timeline.stages if ack.timeline else None,
    )


def _report(usage: NodeUsage) -> usage_messages.ReportUsage:
    return usage_messages.ReportUsage(generation=str(usage.generation), node=usage.node, guests=usage.guests)
