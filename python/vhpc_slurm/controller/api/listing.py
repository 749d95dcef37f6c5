# SPDX-License-Identifier: Apache-2.0
"""Lists of leases and timelines, in pages that fit into a message."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases.executor import LeaseExecutor
from vhpc_slurm.controller.store.port import LeaseStore

PAGE = 100
"""Rows of a page at most."""

Item = TypeVar("Item")


async def leases(executor: LeaseExecutor, store: LeaseStore, request: wire.ListLeases) -> wire.LeasePage:
    """A page of leases."""
    rows = await executor.write(
        store.page, request.after, job_id=request.job_id, live=request.live, limit=PAGE
    )
    page, more = _fill([(serial, wire_types.RecordWire.pack(record)) for serial, record in rows])
    return wire.LeasePage(records=page, more=more)


async def timelines(
    executor: LeaseExecutor, store: LeaseStore, request: wire.ListTimelines
) -> wire.TimelinePage:
    """A page of timelines."""
    rows = await executor.write(store.timelines, request.after, job_id=request.job_id, limit=PAGE)
    packed = [
        (
            serial,
            wire_types.TimelineWire(generation=str(line.generation), node=line.node, stages=line.stages),
        )
        for serial, line in rows
    ]
    page, more = _fill(packed)
    return wire.TimelinePage(timelines=page, more=more)


def _fill(rows: list[tuple[int, Item]]) -> tuple[tuple[Item, ...], int | None]:
    """As many rows as fit into a page (at least one), and where the next page begins; None at the end."""
    size = 0
    for count, (_, item) in enumerate(rows):
        size += len(msgspec.json.encode(item))
        if count and size > wire.PAGE_BYTES:
            return tuple(item for _, item in rows[:count]), rows[count - 1][0]
    return tuple(item for _, item in rows), rows[-1][0] if len(rows) >= PAGE else None
