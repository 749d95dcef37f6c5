# SPDX-License-Identifier: Apache-2.0
"""Leases and timelines as JSON, for the protocol and for the database.

Nodes with equal allocations are written as one group: a job of a thousand nodes takes a
few kilobytes.
"""

from __future__ import annotations

from itertools import groupby

import msgspec

from vhpc_slurm.cpulist import format_cpu_list, parse_cpu_list
from vhpc_slurm.model import (
    Allocation,
    Generation,
    GresAllocation,
    ImageIdentity,
    JobRequest,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    NodeAllocation,
    Stage,
    Timeline,
)


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: an unknown field is an error, within one protocol version."""


class NodeGroup(Wire, frozen=True):
    """Consecutive nodes of an allocation that have the same part of it."""

    nodes: tuple[str, ...]
    cpu_ids: str
    memory_mib: int
    gres: tuple[GresAllocation, ...] = ()


class LeaseWire(Wire, frozen=True):
    """A lease, also as it is stored."""

    generation: str
    state: LeaseState
    request: JobRequest
    node_groups: tuple[NodeGroup, ...] = msgspec.field(name="layouts")
    image: ImageIdentity | None
    network: NetworkIdentity
    refusal: str = ""

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
        )


class RecordWire(Wire, frozen=True):
    """A lease with its times and acknowledgements; timelines have messages of their own."""

    lease: LeaseWire
    created: float
    updated: float
    acknowledged: tuple[str, ...]
    taken: tuple[str, ...]
    unclean: tuple[tuple[str, str], ...]

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
        )


class TimelineWire(Wire, frozen=True):
    """The stages of a generation on one node."""

    generation: str
    node: str
    stages: tuple[Stage, ...]

    def unpack(self) -> Timeline:
        """To the model's form."""
        return Timeline(Generation.parse(self.generation), self.node, self.stages)


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
