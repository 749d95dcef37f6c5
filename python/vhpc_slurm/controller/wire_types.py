# SPDX-License-Identifier: Apache-2.0
"""Leases, timelines and the state of the ready barrier as JSON, for the protocol and the database.

Nodes with equal allocations are written as one group: a job of a thousand nodes takes a
few kilobytes.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Literal

import msgspec

from vhpc_slurm.cpulist import format_cpu_list, parse_cpu_list
from vhpc_slurm.model import (
    Allocation,
    ClusterPlace,
    Generation,
    GresAllocation,
    ImageIdentity,
    JobRequest,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    NodeAllocation,
    Resume,
    Segment,
    Stage,
    Timeline,
)

NodeState = Literal["waiting", "passed", "failed"]
"""Of a node before its job starts: its guests are set up, but not all guests that they test have answered;
all have answered; it gave up."""
PAGE_BYTES = 256 << 10
"""About how much JSON goes into one page of a list."""
JobId = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
Uid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Serial = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Number of a row, and where a page of a list begins; SQLite's integers have 64 bits."""


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: an unknown field is an error, within one protocol version."""


class NodeFailure(Wire, frozen=True):
    """Why a node gave up before its job started; ``kind`` as in errors.py."""

    node: str
    kind: str
    line: str


class ReadyState(Wire, frozen=True, tag="ready"):
    """The state of a generation's ready barrier, and the answer to ReportReady.

    Attributes:
        over: the generation is not the job's current one, or is ending: no node has to wait.
        missing: how many nodes have not passed.
        first_missing: the first of them, in the order of the allocation, if their names were asked for.
        reported: those of the nodes asked about that have reported that their guests are set up.
        failure: of a node that gave up.
        failed_starts: how many generations of the job have failed because of a network or a check of guests.
        unaware: how many nodes of the job's cluster have not taken the job into their network.
        first_unaware: the first of them, each with its job, if names were asked for.
    """

    over: bool
    missing: int = 0
    first_missing: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    failure: NodeFailure | None = None
    failed_starts: int = 0
    unaware: int = 0
    first_unaware: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether a node that waits for the others has to act."""
        return self.over or self.missing + self.unaware == 0 or self.failure is not None


class NodeGroup(Wire, frozen=True):
    """Consecutive nodes of an allocation that have the same part of it."""

    nodes: tuple[str, ...]
    cpu_ids: str
    memory_mib: int
    gres: tuple[GresAllocation, ...] = ()


class LeaseWire(Wire, frozen=True):
    """A lease, also as it is stored; ``resume`` has no key, and nothing about single guests."""

    generation: str
    state: LeaseState
    request: JobRequest
    node_groups: tuple[NodeGroup, ...] = msgspec.field(name="layouts")
    image: ImageIdentity | None
    network: NetworkIdentity
    refusal: str = ""
    segment: Segment | None = None
    nat: bool = False
    site: bool = False
    resume: Resume | None = None
    cluster: ClusterPlace | None = None

    @classmethod
    def pack(cls, lease: Lease) -> LeaseWire:
        """From the model's form."""
        return cls(
            generation=str(lease.generation),
            state=lease.state,
            request=lease.request,
            node_groups=pack_allocation(lease.allocation),
            image=lease.image,
            network=lease.network,
            refusal=lease.refusal,
            segment=lease.segment,
            nat=lease.nat,
            site=lease.site,
            resume=None if lease.resume is None else _public(lease.resume),
            cluster=lease.cluster,
        )

    def brief(self) -> LeaseWire:
        """Without what grows with the number of nodes: allocation, network, segment and checkpoint."""
        return msgspec.structs.replace(
            self, node_groups=(), network=NetworkIdentity(), segment=None, resume=None
        )

    def unpack(self) -> Lease:
        """To the model's form; ValueError when a generation or a CPU list is invalid."""
        return Lease(
            Generation.parse(self.generation),
            self.state,
            self.request,
            unpack_allocation(self.node_groups),
            self.image,
            self.network,
            self.refusal,
            self.segment,
            nat=self.nat,
            site=self.site,
            resume=self.resume,
            cluster=self.cluster,
        )


class RecordWire(Wire, frozen=True):
    """A lease with its times and acknowledgements; timelines have messages of their own."""

    lease: LeaseWire
    created: float
    updated: float
    acknowledged: tuple[str, ...]
    taken: tuple[str, ...]
    unclean: tuple[tuple[str, str], ...]
    told: tuple[tuple[str, str], ...] = ()

    @classmethod
    def pack(cls, record: LeaseRecord) -> RecordWire:
        """From the model's form."""
        return cls(
            lease=LeaseWire.pack(record.lease),
            created=record.created,
            updated=record.updated,
            acknowledged=record.acknowledged,
            taken=record.taken,
            unclean=record.unclean,
            told=record.told,
        )

    def unpack(self, timelines: tuple[Timeline, ...] = ()) -> LeaseRecord:
        """To the model's form."""
        return LeaseRecord(
            self.lease.unpack(),
            self.created,
            self.updated,
            self.acknowledged,
            timelines,
            self.taken,
            self.unclean,
            self.told,
        )


class ProgressWire(Wire, frozen=True):
    """How far the boot of a job is.

    Attributes:
        generation: of the job.
        nodes: how many it has.
        ready: how many nodes have ended their Prolog.
        doing: the nodes that have been longest in their stage, with it and its seconds.
    """

    generation: str
    nodes: int
    ready: int
    doing: tuple[tuple[str, str, float], ...] = ()


class TimelineWire(Wire, frozen=True):
    """The stages of a generation on one node."""

    generation: str
    node: str
    stages: tuple[Stage, ...]

    def unpack(self) -> Timeline:
        """To the model's form."""
        return Timeline(Generation.parse(self.generation), self.node, self.stages)


def _public(resume: Resume) -> Resume:
    """The part of it that every host may read, and that fits into a message for jobs of any size."""
    nodes = tuple(msgspec.structs.replace(one, guests=()) for one in resume.nodes)
    return msgspec.structs.replace(resume, nodes=nodes, key=b"")


def pack_allocation(allocation: Allocation) -> tuple[NodeGroup, ...]:
    """Merge consecutive nodes with equal allocations; keeps the order of nodes."""
    lists = {ids: format_cpu_list(ids) for ids in {part.cpu_ids for part in allocation.nodes}}
    return tuple(
        NodeGroup(
            nodes=tuple(part.node for part in parts),
            cpu_ids=lists[cpu_ids],
            memory_mib=memory_mib,
            gres=gres,
        )
        for (cpu_ids, memory_mib, gres), parts in groupby(
            allocation.nodes, lambda part: (part.cpu_ids, part.memory_mib, part.gres)
        )
    )


def unpack_allocation(node_groups: tuple[NodeGroup, ...]) -> Allocation:
    """The inverse of pack_allocation; ValueError when a CPU list is invalid."""
    ids = {text: parse_cpu_list(text) for text in {group.cpu_ids for group in node_groups}}
    return Allocation(
        tuple(
            NodeAllocation(node, ids[group.cpu_ids], group.memory_mib, group.gres)
            for group in node_groups
            for node in group.nodes
        )
    )
