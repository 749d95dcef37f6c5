# SPDX-License-Identifier: Apache-2.0
"""The guests of a cluster's other members, as a job's segment on one node knows them.

Frames to a guest of another member leave through this job's VXLAN device with the VNI of that member: each
entry of the device names it (``vni`` in bridge(8)). The other node delivers them to that member's bridge.
Between members on one node the kernel does so itself, as the destination is its own address. So nothing on
a node is shared between members, and when a member ends, its VNI leads nowhere.

The state of the kernel is compared with what is wanted, and only the difference is applied. Entries of the
job's own guests have other MAC addresses (they contain the VNI) and stay as they are.

Sources: bridge(8), ip-neighbour(8); drivers/net/vxlan/vxlan_core.c (encap_bypass_if_local).
"""
# Decision: Members of a cluster send with the VNI of the receiver

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from vhpc_slurm.model import ClusterMember
from vhpc_slurm.node.network import entries, plan, tools
from vhpc_slurm.node.network.entries import Command
from vhpc_slurm.record import Record


class Entries(Record, frozen=True):
    """Entries for guests of other members.

    Attributes:
        remote: of the VXLAN device: (MAC address, underlay address, VNI).
        ports: MAC addresses that the bridge has behind the VXLAN device.
        neighbours: of the bridge: (IP address, MAC address).
    """

    remote: frozenset[tuple[str, str, int]] = frozenset()
    ports: frozenset[str] = frozenset()
    neighbours: frozenset[tuple[str, str]] = frozenset()


class LivingGuest(NamedTuple):
    """A guest that is not gone: its rank, its name in the cluster, its IPv4 and IPv6 address."""

    rank: int
    name: str
    addresses: tuple[str, str]
    guest: plan.Member


def living(member: ClusterMember) -> Iterator[LivingGuest]:
    """The guests of a member, by rank, as those of all members know them.  Pure."""
    for rank, guest in enumerate(plan.members(member)):
        if rank not in member.gone:
            name = f"{guest.hostname}-j{member.generation.job_id}"
            yield LivingGuest(rank, name, plan.addresses(member.segment, rank), guest)


def wanted(others: Collection[ClusterMember]) -> Entries:
    """The entries that a segment needs.  Pure."""
    remote: set[tuple[str, str, int]] = set()
    neighbours: set[tuple[str, str]] = set()
    for member in others:
        segment = member.segment
        for one in living(member):
            mac = plan.mac(segment.mac_vni or segment.vni, one.rank)
            remote.add((mac, segment.underlay[one.guest.place], segment.vni))
            neighbours.update((address, mac) for address in one.addresses)
    return Entries(frozenset(remote), frozenset(mac for mac, _, _ in remote), frozenset(neighbours))


def present(
    own: ClusterMember, forwarding: Sequence[dict[str, Any]], neighbours: Sequence[dict[str, Any]]
) -> Entries:
    """The entries that the kernel has for guests of other members.  Pure.

    Args:
        own: the job itself, whose guests' entries are left out.
        forwarding: of the VXLAN device, as ``bridge -json fdb show`` prints them.
        neighbours: of the bridge, as ``ip -json neighbour show`` prints them.
    """
    segment = own.segment
    ours = {plan.mac(segment.mac_vni or segment.vni, rank) for rank in range(len(plan.members(own)))}
    theirs = [one for one in forwarding if one.get("state") == "static" and one["mac"] not in ours]
    return Entries(
        frozenset(
            (one["mac"], one["dst"], int(one.get("vni", segment.vni))) for one in theirs if "dst" in one
        ),
        frozenset(one["mac"] for one in theirs if "dst" not in one),
        frozenset(
            (one["dst"], one["lladdr"])
            for one in neighbours
            if "PERMANENT" in one.get("state", ()) and one.get("lladdr", "") not in {"", *ours}
        ),
    )


def peers(others: Collection[ClusterMember], local: str) -> tuple[str, ...]:
    """Underlay addresses of the other members' nodes with living guests, but this one.  Pure.

    ``local`` is this node's: between members on one node no packet is sent.
    """
    found = {one.segment.underlay[place] for one in others for place in one.living_places}
    return tuple(sorted(found - {local}))


def member_peers(others: Collection[ClusterMember]) -> list[plan.Peer]:
    """The first living guest of each other member, in the order of ``others``.  Pure."""
    first = (next(living(member), None) for member in others)
    return [plan.Peer(one.name, one.guest.node, one.addresses) for one in first if one is not None]


def follow(own: ClusterMember, others: Collection[ClusterMember]) -> None:
    """Make the segment know exactly these other members.

    Raises:
        NodeError: the kernel cannot be asked, or refuses; what was done until then stays.
    """
    bridge, vxlan = plan.bridge_name(own.segment.vni), plan.vxlan_name(own.segment.vni)
    forwarding = tools.query("bridge", "fdb", "show", "dev", vxlan)
    there = present(own, forwarding, tools.query("ip", "neighbour", "show", "dev", bridge))
    needed = wanted(others)
    tools.batch("bridge", _forwarding(vxlan, there, needed))
    tools.batch("ip", _resolution(bridge, there, needed))


def _forwarding(vxlan: str, there: Entries, needed: Entries) -> Iterator[Command]:
    """Wrong entries are removed first: a MAC address has one entry."""
    for mac, address, vni in sorted(there.remote - needed.remote):
        yield entries.remove_remote(vxlan, mac, address, vni)
    for mac in sorted(there.ports - needed.ports):
        yield entries.remove_port(vxlan, mac)
    for mac, address, vni in sorted(needed.remote - there.remote):
        yield entries.add_remote(vxlan, mac, address, vni)
    for mac in sorted(needed.ports - there.ports):
        yield entries.add_port(vxlan, mac)


def _resolution(bridge: str, there: Entries, needed: Entries) -> Iterator[Command]:
    for address, _ in sorted(there.neighbours - needed.neighbours):
        yield entries.remove_neighbour(bridge, address)
    for address, mac in sorted(needed.neighbours - there.neighbours):
        yield entries.add_neighbour(bridge, address, mac)
