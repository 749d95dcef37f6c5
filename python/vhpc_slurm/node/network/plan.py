# SPDX-License-Identifier: Apache-2.0
"""Names and addresses on a job's segment, all from the lease or the record of a cluster's member.  Pure.

Guest number *r* of the job, counted node by node from 0 (in a heterogeneous job over all
components on the segment, in their order), has the MAC address
``06:VV:VV:VV:RR:RR`` (the VNI and *r*; 06 is locally administered, unicast), and the
addresses number *r* + 1 of the two networks, in a cluster counted on from the member's first number. So every
node knows every address without asking, and an address of one segment exists in no other. A resumed guest
keeps the VNI in its MAC address, which is that of its first segment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import (
    ClusterMember,
    GuestInterface,
    Lease,
    NodeSegment,
    Segment,
    Tunnel,
    guest_hostname,
)
from vhpc_slurm.record import Record

MAX_QUEUES = 8
"""More cost memory and interrupt vectors, and gain nothing for the traffic of one guest."""
MAX_RANKS = 1 << 16
OVERHEAD = {4: 50, 6: 70}
"""Bytes that VXLAN adds, by IP version: outer IP, UDP 8, VXLAN 8, inner Ethernet 14 (RFC 7348)."""
TUNNEL_OVERHEAD = {4: 60, 6: 80}
"""Bytes that WireGuard adds, by IP version of the underlay: IP, UDP 8, data message 32."""
TUNNEL_NET = int(IPv6Address("fd76:6870:6377::"))
TUNNEL_BITS = 96
"""Addresses inside tunnels: this prefix of 64 bits, the VNI (32 bits), and the node's number from 1."""
PREFIX = "vhpc"
"""Of all names of interfaces; with a VNI of 8 digits and a guest of 2 they have 15 characters, the most."""
Joined = Lease | ClusterMember
"""A job with a segment, or another member of its cluster."""
_NAME = re.compile(rf"{PREFIX}(?:[bxw]([0-9]{{1,8}})|([0-9]{{1,8}})g[0-9]{{1,2}})\Z", re.ASCII)


class Neighbour(Record, frozen=True):
    """A guest on the segment: its addresses, its node, and that node's underlay address.

    ``via`` is empty for guests of this node, which have a ``tap``.
    """

    hostname: str
    mac: str
    ipv4: str
    ipv6: str
    via: str
    tap: str = ""
    node: str = ""


def bridge_name(vni: int) -> str:
    """Name of a segment's bridge on a node."""
    return f"{PREFIX}b{vni}"


def vxlan_name(vni: int) -> str:
    """Name of a segment's VXLAN device."""
    return f"{PREFIX}x{vni}"


def tunnel_name(vni: int) -> str:
    """Name of the WireGuard interface of a segment."""
    return f"{PREFIX}w{vni}"


def tap_name(vni: int, index: int) -> str:
    """Name of the tap of a node's guest number ``index``."""
    return f"{PREFIX}{vni}g{index}"


def vni_of(name: str) -> int | None:
    """The VNI that an interface is for by its name; None for interfaces that are not ours."""
    found = _NAME.match(name)
    return int(found[1] or found[2]) if found else None


def mac(vni: int, rank: int) -> str:
    """The MAC address of a guest; ValueError when a number does not fit."""
    if not (0 < vni < 1 << 24 and 0 <= rank < MAX_RANKS):
        raise ValueError(f"no MAC address has VNI {vni} and rank {rank}")
    return (0x06 << 40 | vni << 16 | rank).to_bytes(6, "big").hex(":")


def addresses(segment: Segment, rank: int) -> tuple[str, str]:
    """IPv4 and IPv6 address of a guest; IndexError when a network is too small."""
    number = segment.first + rank + 1
    return str(IPv4Network(segment.ipv4)[number]), str(IPv6Network(segment.ipv6)[number])


class Member(Record, frozen=True):
    """A guest on the segment: its node, its number on that node, the node's place among all nodes.

    ``slots`` is the number of its CPUs; guests of one node share the node's CPUs, and a rest that does
    not divide evenly is not counted.
    """

    hostname: str
    node: str
    index: int
    place: int
    slots: int


def members(lease: Joined) -> tuple[Member, ...]:
    """All guests on the job's segment, also of other components, by rank."""
    found: list[Member] = []
    place = 0
    for part in lease.parts:
        each = part.guests_per_node
        for node, cpus in zip(part.nodes, part.cpus, strict=True):
            slots_ = max(1, cpus // each)
            found += (
                Member(guest_hostname(node, index, each), node, index, place, slots_) for index in range(each)
            )
            place += 1
    return tuple(found)


def _rank(guests: Sequence[Member], node: str, index: int) -> int:
    """The rank of a node's guest."""
    return [(one.node, one.index) for one in guests].index((node, index))


def names(lease: Lease) -> tuple[tuple[str, str], ...]:
    """(hostname, address) of all guests of the job, by rank: first all of IPv4, then all of IPv6."""
    segment = lease.segment
    if segment is None:
        return ()
    guests = members(lease)
    found = [addresses(segment, rank) for rank in range(len(guests))]
    return tuple(
        (guest.hostname, pair[family]) for family in (0, 1) for guest, pair in zip(guests, found, strict=True)
    )


def node_segment(lease: Joined, node: str) -> NodeSegment | None:
    """What one node has of the segment; None where the job has none."""
    segment = lease.segment
    if segment is None:
        return None
    place, vni = lease.segment_nodes.index(node), segment.vni
    local, tunnel = segment.underlay[place], None
    if is_encrypted(lease):
        tunnel = Tunnel(tunnel_name(vni), segment.tunnel_port, tunnel_address(vni, place))
    return NodeSegment(
        vni, segment.port, local, bridge_name(vni), vxlan_name(vni), tunnel, segment.flood, segment.mtu
    )


def is_encrypted(lease: Joined) -> bool:
    """Whether frames between the nodes of a job go through WireGuard; a job of one node has none."""
    return lease.segment is not None and lease.segment.tunnel_port > 0 and len(lease.segment_nodes) > 1


def tunnel_address(vni: int, place: int) -> str:
    """The address inside the tunnels of the node at a place of ``Lease.segment_nodes``."""
    return str(IPv6Address(TUNNEL_NET | vni << 128 - TUNNEL_BITS | place + 1))


def transport(lease: Joined) -> tuple[str, ...]:
    """Addresses that VXLAN sends to, of all nodes: those inside the tunnels, else the underlay's."""
    segment = lease.segment
    assert segment is not None
    if not is_encrypted(lease):
        return segment.underlay
    return tuple(tunnel_address(segment.vni, place) for place in range(len(segment.underlay)))


def interface(lease: Lease, node: str, index: int, vcpus: int) -> GuestInterface | None:
    """The interface of a guest; None where the job has no segment."""
    segment = lease.segment
    if segment is None:
        return None
    rank = _rank(members(lease), node, index)
    ipv4, ipv6 = addresses(segment, rank)
    bits4, bits6 = IPv4Network(segment.ipv4).prefixlen, IPv6Network(segment.ipv6).prefixlen
    return GuestInterface(
        tap=tap_name(segment.vni, index),
        mac=mac(segment.mac_vni or segment.vni, rank),
        queues=min(vcpus, MAX_QUEUES),
        ipv4=f"{ipv4}/{bits4}",
        ipv6=f"{ipv6}/{bits6}",
    )


def neighbours(lease: Joined, node: str) -> Iterator[Neighbour]:
    """All guests on the segment, as ``node`` reaches them."""
    segment = lease.segment
    if segment is None:
        return
    outer = transport(lease)
    for rank, guest in enumerate(members(lease)):
        here = guest.node == node
        ipv4, ipv6 = addresses(segment, rank)
        yield Neighbour(
            guest.hostname,
            mac(segment.mac_vni or segment.vni, rank),
            ipv4,
            ipv6,
            "" if here else outer[guest.place],
            tap_name(segment.vni, guest.index) if here else "",
            guest.node,
        )


def slots(lease: Lease, left: Collection[str] = ()) -> tuple[tuple[str, int], ...]:
    """Hostname and number of CPUs of each guest, by rank, without those of nodes that have left."""
    return tuple((guest.hostname, guest.slots) for guest in members(lease) if guest.node not in left)


class Peer(Record, frozen=True):
    """A guest that another one tests before the job starts: IPv4 and IPv6 address, and its node."""

    hostname: str
    node: str
    addresses: tuple[str, str]


def reach_targets(lease: Lease, node: str, index: int) -> tuple[Peer, ...]:
    """Guests that a guest tests before the job starts: the next rank and rank 0.

    So each guest tests at most two others, whatever the size of the job; together the
    tests form a ring and a star.
    """
    segment = lease.segment
    if segment is None:
        return ()
    guests = members(lease)
    own = _rank(guests, node, index)
    ranks = dict.fromkeys(((own + 1) % len(guests), 0))
    return tuple(
        Peer(guests[rank].hostname, guests[rank].node, addresses(segment, rank))
        for rank in ranks
        if rank != own
    )


def peers(lease: Joined, node: str, left: Collection[str] = ()) -> tuple[str, ...]:
    """Addresses from which this node gets the segment's frames: of nodes that have not left the job.

    Raises:
        FabricError: they are of different IP versions, which one VXLAN device cannot have.
    """
    assert lease.segment is not None
    underlay = lease.segment.underlay
    if len({ip_address(address).version for address in underlay}) > 1:
        raise FabricError(
            f"the nodes of {lease.generation} have underlay addresses of both IPv4 and IPv6",
            ", ".join(underlay[:4]),
            "see network.underlay in vhpc.toml(5)",
        )
    away = {node, *left}
    found = zip(lease.segment_nodes, transport(lease), strict=True)
    return tuple(address for name, address in found if name not in away)
