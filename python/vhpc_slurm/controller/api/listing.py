# SPDX-License-Identifier: Apache-2.0
"""Lists of leases and timelines, in pages that fit into a message."""

from __future__ import annotations

import time
from typing import TypeVar

import msgspec

from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import checkpoint_messages, usage_messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.checkpointing import shown
from vhpc_slurm.controller.api.progress import Progress
from vhpc_slurm.controller.api.sofar import UsageSoFar
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.leases.layer import LeaseLayer
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Checkpoint, CheckpointTotal, LeaseRecord, NodeUsage, Viewer
from vhpc_slurm.model.usage import whole_of

PAGE = 100
"""Rows of a page at most."""
USER_PAGE = 25
"""The same for an ordinary user: starts of jobs wait for the database meanwhile."""

Item = TypeVar("Item")


async def leases(
    executor: LeaseExecutor, store: LeaseStore, request: wire.ListLeases, viewer: Viewer | None = None
) -> wire.LeasePage:
    """A page of leases; only those that ``viewer`` may see."""
    limit = _limit(viewer)
    rows = await executor.write(
        store.page,
        request.after,
        job_id=request.job_id,
        live=request.live,
        viewer=viewer,
        limit=limit,
        before=request.before,
    )
    page, more = fill([(serial, wire_types.RecordWire.pack(record)) for serial, record in rows], limit)
    return wire.LeasePage(records=page, more=more)


async def progress(
    executor: LeaseExecutor, store: LeaseStore, page: wire.LeasePage, known: Progress
) -> wire.LeasePage:
    """The page, with how far those of its jobs are that boot."""
    found, now = [], time.time()
    for packed in page.records:
        record = packed.unpack()
        if known.of(record, (), now) is None:
            continue  # it does not boot, whatever the database says
        done = await executor.write(store.reports.nodes, record.lease.generation)
        if (one := known.of(record, done, now)) is not None:
            found.append(one)
    return msgspec.structs.replace(page, progress=tuple(found))


async def used(
    executor: LeaseExecutor, store: LeaseStore, page: wire.LeasePage, known: UsageSoFar | None
) -> wire.LeasePage:
    """The page, with what those of its jobs have used whose nodes have reported it, as they do at the end.

    With ``known`` also running jobs until now.
    """
    found = []
    for packed in page.records:
        record = packed.unpack()
        generation = record.lease.generation
        reported, full = list[NodeUsage](), True
        while full:
            after = reported[-1].node if reported else ""
            rows = await executor.write(store.usage.page, generation, after, PAGE)
            reported.extend(rows)
            full = len(rows) == PAGE
        ended = {one.node for one in reported}
        running = [one for one in known.of(record) if one.node not in ended] if known else []
        reported.extend(NodeUsage(generation, one.node, one.guests) for one in running)
        if reported:
            whole = whole_of(reported)
            found.append(
                usage_messages.UsedWire(
                    generation=str(generation),
                    cpu_us=whole.cpu_us,
                    peak_bytes=whole.peak_bytes,
                    so_far_s=max((one.age_s for one in running), default=None),
                )
            )
    return msgspec.structs.replace(page, used=tuple(found))


async def timelines(
    executor: LeaseExecutor, store: LeaseStore, request: wire.ListTimelines, viewer: Viewer | None = None
) -> wire.TimelinePage:
    """A page of timelines."""
    limit = _limit(viewer)
    rows = await executor.write(
        store.timelines, request.after, job_id=request.job_id, viewer=viewer, limit=limit
    )
    packed = [
        (
            serial,
            wire_types.TimelineWire(generation=str(line.generation), node=line.node, stages=line.stages),
        )
        for serial, line in rows
    ]
    page, more = fill(packed, limit)
    return wire.TimelinePage(timelines=page, more=more)


async def usage(
    executor: LeaseExecutor,
    store: LeaseStore,
    request: usage_messages.AskUsage,
    known: UsageSoFar,
    viewer: Viewer | None = None,
) -> usage_messages.UsagePage:
    """A page of the nodes' usage reports for a job's last generation; ``known`` has those of guests that run.

    Raises:
        UserError: there is no such job, or ``viewer`` may not see it.
    """

    def look() -> tuple[LeaseRecord | None, tuple[NodeUsage, ...], int]:
        newest = store.newest(request.job_id)
        if newest is None or not (viewer is None or viewer.sees(newest.lease.request)):
            return None, (), 0
        generation = newest.lease.generation
        rows = store.usage.page(generation, request.after, _limit(viewer))
        return newest, rows, store.usage.taken(generation)

    record, rows, taken = await executor.write(look)
    if record is None:
        raise UserError(
            f"vhpcd has no job {request.job_id}" + ("" if viewer is None else " of yours"),
            "the job had no guests, or it ended long ago",
            f"see: sacct -X -o AdminComment%500 -j {request.job_id}",
        )
    by_node: dict[str, usage_messages.NodeUsageWire | usage_messages.SoFarWire] = {}
    if request.so_far:
        by_node = {one.node: one for one in known.of(record) if one.node > request.after}
    by_node |= {row.node: usage_messages.NodeUsageWire(node=row.node, guests=row.guests) for row in rows}
    # Rows of the database end at the limit, so nodes behind as many are of a later page.
    numbered = list(enumerate(by_node[node] for node in sorted(by_node)))[: _limit(viewer)]
    page, more = fill(numbered, _limit(viewer))
    memory = [part.memory_mib for part in record.lease.allocation.nodes]
    return usage_messages.UsagePage(
        generation=str(record.lease.generation),
        user=record.lease.request.user,
        state=record.lease.state,
        nodes=len(memory),
        memory_mib=sum(memory) if all(memory) else 0,
        taken=taken,
        reported=tuple(one for one in page if isinstance(one, usage_messages.NodeUsageWire)),
        more=None if more is None else page[-1].node,
        so_far=tuple(one for one in page if isinstance(one, usage_messages.SoFarWire)),
    )


async def reports(
    executor: LeaseExecutor, store: LeaseStore, request: wire.ListReports, viewer: Viewer | None = None
) -> wire.ReportPage:
    """A page of reports of nodes."""
    limit = _limit(viewer)
    rows = await executor.write(
        store.reports.page, request.after, job_id=request.job_id, viewer=viewer, limit=limit
    )
    page, more = fill(list(rows), limit)
    return wire.ReportPage(reports=page, more=more)


async def checkpoints(
    executor: LeaseExecutor,
    leases: LeaseLayer,
    request: checkpoint_messages.ListCheckpoints,
    viewer: Viewer | None = None,
) -> checkpoint_messages.CheckpointPage:
    """A page of checkpoints."""
    store = leases.store
    limit = min(request.limit or PAGE, _limit(viewer))

    def read() -> list[tuple[int, Checkpoint]]:
        known = store.checkpoints.page(request.after, job_id=request.job_id, viewer=viewer, limit=limit)
        return [(one.serial, shown(store, one)) for one in known]

    page, more = fill(await executor.write(read), limit)
    totals: tuple[CheckpointTotal, ...] = ()
    if more is None and not request.limit:
        totals = await executor.write(leases.quota.totals, viewer)
    return checkpoint_messages.CheckpointPage(checkpoints=page, more=more, totals=totals)


def _limit(viewer: Viewer | None) -> int:
    return PAGE if viewer is None else USER_PAGE


def fill(rows: list[tuple[int, Item]], limit: int) -> tuple[tuple[Item, ...], int | None]:
    """As many rows as fit into a page (at least one), and where the next page begins; None at the end."""
    size = 0
    for count, (_, item) in enumerate(rows):
        size += len(msgspec.json.encode(item))
        if count and size > wire_types.PAGE_BYTES:
            return tuple(item for _, item in rows[:count]), rows[count - 1][0]
    return tuple(item for _, item in rows), rows[-1][0] if len(rows) >= limit else None
