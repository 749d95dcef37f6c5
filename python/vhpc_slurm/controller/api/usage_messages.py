# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol about what generations have used; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import Wire
from vhpc_slurm.model import MAX_GUESTS_PER_NODE, GuestUsage, LeaseState


class ReportUsage(Wire, frozen=True, tag="used"):
    """A node: what a generation has used in its guests."""

    generation: str
    node: str
    guests: Annotated[tuple[GuestUsage, ...], msgspec.Meta(max_length=MAX_GUESTS_PER_NODE)]


class AskUsage(Wire, frozen=True, tag="usage"):
    """The owner of a job, or an operator: what nodes after ``after`` have reported of its last generation."""

    job_id: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    after: str = ""


class UsageKept(Wire, frozen=True, tag="used"):
    """To ReportUsage; ``complete``: all nodes that took the lease have reported."""

    complete: bool


class NodeUsageWire(Wire, frozen=True):
    """What a generation has used in the guests of a node."""

    node: str
    guests: tuple[GuestUsage, ...]


class UsedWire(Wire, frozen=True):
    """What all programs of a generation have used, as far as its guests have figures."""

    generation: str
    cpu_us: int | None
    peak_bytes: int | None


class UsagePage(Wire, frozen=True, tag="usage"):
    """To AskUsage.

    Attributes:
        generation: the last one of the job.
        user: its owner.
        state: of its lease.
        nodes: number of its nodes.
        memory_mib: of the job on all of its nodes; 0: not known.
        taken: number of nodes that took the lease, and so may have had guests.
        reported: a page of what they report.
        more: the next ``after``, None at the end.
    """

    generation: str
    user: str
    state: LeaseState
    nodes: int
    memory_mib: int
    taken: int
    reported: tuple[NodeUsageWire, ...]
    more: str | None
