# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol about what generations have used; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import JobId, Wire
from vhpc_slurm.model import GuestUsage, LeaseState
from vhpc_slurm.options import MAX_GUESTS_PER_NODE

MAX_GENERATIONS = 1024
"""Generations of a node in a report."""


class ReportUsage(Wire, frozen=True, tag="used"):
    """A node: what a generation has used in its guests."""

    generation: str
    node: str
    guests: Annotated[tuple[GuestUsage, ...], msgspec.Meta(max_length=MAX_GUESTS_PER_NODE)]


class GenerationUsage(Wire, frozen=True):
    """The usage of a generation in the guests of the reporting node."""

    generation: str
    guests: Annotated[tuple[GuestUsage, ...], msgspec.Meta(max_length=MAX_GUESTS_PER_NODE)]


class ReportUsageSoFar(Wire, frozen=True, tag="used-so-far"):
    """A node: what its generations have used until now, in place of what it has said before."""

    node: str
    used: Annotated[tuple[GenerationUsage, ...], msgspec.Meta(max_length=MAX_GENERATIONS)]


class AskUsage(Wire, frozen=True, tag="usage"):
    """The owner of a job, or an operator: what nodes after ``after`` have reported of its last generation.

    With ``so_far`` also what nodes have said of it that have not reported its end.
    """

    job_id: JobId
    after: str = ""
    so_far: bool = False


class UsageKept(Wire, frozen=True, tag="used"):
    """To ReportUsage; ``complete``: all nodes that took the lease have reported."""

    complete: bool


class NodeUsageWire(Wire, frozen=True):
    """The usage of a generation in the guests of a node."""

    node: str
    guests: tuple[GuestUsage, ...]


class SoFarWire(Wire, frozen=True):
    """The usage of a generation in the guests of a node, ``age_s`` seconds before the answer."""

    node: str
    age_s: float
    guests: tuple[GuestUsage, ...]


class UsedWire(Wire, frozen=True):
    """The usage of all programs of a generation, as far as its guests have figures.

    ``so_far_s``: seconds since the oldest figure was measured, if the end of a node is not among them.
    """

    generation: str
    cpu_us: int | None
    peak_bytes: int | None
    so_far_s: float | None = None


class UsagePage(Wire, frozen=True, tag="usage"):
    """To AskUsage.

    Attributes:
        generation: the last one of the job.
        user: its owner.
        state: of its lease.
        nodes: number of its nodes.
        memory_mib: of the job on all of its nodes; 0: not known.
        taken: number of nodes that took the lease, and so may have had guests.
        reported: a page of what they report at the end.
        more: the next ``after``, None at the end.
        so_far: of the nodes of this page that have not reported the end.
    """

    generation: str
    user: str
    state: LeaseState
    nodes: int
    memory_mib: int
    taken: int
    reported: tuple[NodeUsageWire, ...]
    more: str | None
    so_far: tuple[SoFarWire, ...] = ()
