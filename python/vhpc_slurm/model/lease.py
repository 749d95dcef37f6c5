# SPDX-License-Identifier: Apache-2.0
"""A lease and what nodes report about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vhpc_slurm.model.image import ImageIdentity
from vhpc_slurm.model.job import Allocation, Generation, JobRequest

ALARM = "alarm: "
"""Prefix of a node's note about a job that an operator has to see although the node works."""


class LeaseState(StrEnum):
    """Life of a lease.  READY is written last; REFUSED carries a user's error."""

    RESERVED = "reserved"
    READY = "ready"
    REFUSED = "refused"
    ENDING = "ending"
    RELEASED = "released"


@dataclass(frozen=True)
class NetworkIdentity:
    """The job's own network partition; ``kind`` is ``none`` if the job has no partition.

    With ``ib`` the job's guest number *i*, counted node by node, has the rank ``first_rank``
    + *i*, and ``vfs`` ports on each of ``rails`` rails, whose GUIDs follow from
    these numbers (``fabric.keys.port_guid``), or are in ``port_guids``, a row of
    words for each guest, where nodes do not set them; ``in_guests`` says that these
    reach the guests.  ``site_keys`` are entries that all ports of the job have
    beside its own key and the default one, from partitions of the site's.

    ``addresses`` are (hostname, IPv4 address) of guests on IP over InfiniBand, in a
    network of ``prefix`` bits.

    With ``ethernet`` the Ethernet functions of the guests are on ``vlan``, with
    ``vxlan`` each guest has one virtio interface on ``vni``; their addresses
    follow from these numbers as well (``fabric.numbers.mac``).
    """

    kind: str = "none"
    pkey: int | None = None
    vlan: int | None = None
    vni: int | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    first_rank: int = 0
    rails: int = 0
    vfs: int = 0
    port_guids: tuple[tuple[str, ...], ...] = ()
    in_guests: bool = False
    site_keys: tuple[int, ...] = ()
    prefix: int = 0


@dataclass(frozen=True)
class Lease:
    """What a generation holds: decided once, the same for all its nodes."""

    generation: Generation
    state: LeaseState
    request: JobRequest
    allocation: Allocation
    image: ImageIdentity | None
    network: NetworkIdentity = field(default_factory=NetworkIdentity)
    refusal: str = ""


@dataclass(frozen=True)
class Stage:
    """One stage of a boot or a teardown on one node; times are seconds since the epoch."""

    name: str
    began: float
    ended: float
    detail: str = ""


@dataclass(frozen=True)
class Timeline:
    """What happened on one node of a generation, in order."""

    generation: Generation
    node: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Alarm:
    """What went wrong with a job on a node that is well; ``time`` in seconds since the epoch."""

    job_id: int
    node: str
    time: float
    what: str


@dataclass(frozen=True)
class LeaseRecord:
    """A lease as the controller keeps it and shows it to operators.

    ``taken`` are the nodes that fetched the lease to act on it: only these can
    hold something of it.  ``acknowledged`` are the nodes that said they hold
    nothing, ``unclean`` those that could not, each with its note.
    """

    lease: Lease
    created: float
    updated: float
    acknowledged: tuple[str, ...]
    timelines: tuple[Timeline, ...] = ()
    taken: tuple[str, ...] = ()
    unclean: tuple[tuple[str, str], ...] = ()
