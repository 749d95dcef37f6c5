# SPDX-License-Identifier: Apache-2.0
"""Which jobs have a job network, and which VNI it gets.  Pure.

A VNI is held from the transaction that makes the lease until the lease is RELEASED,
that is until every node that took it has acknowledged; then it is in quarantine.
``lifecycle`` does that, since it is the only place that changes the state of a lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.store.segments import HeldSegment
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.keys import ExhaustedError
from vhpc_slurm.model import Allocation, JobRequest, Segment, SegmentPart


def _words(request: JobRequest, network: Network) -> tuple[str, ...]:
    return network.parts(request.network, request.implies_job_network)


def wanted(request: JobRequest, network: Network) -> bool:
    """Whether a job has a segment, if its request is not refused."""
    return "job" in _words(request, network)


def is_allowed(request: JobRequest, network: Network) -> bool:
    """Whether the site allows the networks that a job asks for; the default is always allowed."""
    implied = request.implies_job_network
    chosen = request.network is not None or implied
    return not chosen or set(network.kinds(request.network, implied)) <= set(network.allowed)


def flood_wanted(request: JobRequest, network: Network) -> bool:
    """Whether broadcast and multicast frames reach all guests of a job, if its request is not refused."""
    return "multicast" in _words(request, network)


def nat_wanted(request: JobRequest, network: Network) -> bool:
    """Whether the guests of a job reach other networks through passt, if its request is not refused."""
    return "nat" in _words(request, network)


def site_wanted(request: JobRequest, network: Network) -> bool:
    """Whether the guests of a job are on the site's bridge, if its request is not refused."""
    return "site" in _words(request, network)


def refusal(request: JobRequest, allocation: Allocation, network: Network, others: int = 0) -> str:
    """Why the job cannot have the network that it asks for, as one line for the user; empty when it can.

    ``others`` is the number of guests of the other components of a heterogeneous job.
    """
    if request.network is not None and not is_allowed(request, network):
        return (
            f"--vhpc-network={request.network[:40]} is not allowed here "
            f"(this site allows: {', '.join(network.allowed)})"
        )
    guests = len(allocation.nodes) * request.guests_per_node + others
    if wanted(request, network) and guests > network.most_guests:
        return (
            f"a job network here has room for {network.most_guests} guests, the job has {guests} "
            "(ask for fewer, or for --vhpc-network=none)"
        )
    if flood_wanted(request, network) and guests > network.multicast_guests:
        most = network.multicast_guests
        allowed = f"for at most {most} guests, the job has {guests}" if most else "for no job"
        return f"multicast on a job network is allowed here {allowed} (ask for --vhpc-network=job)"
    if site_wanted(request, network) and request.guests_per_node > network.site_guests:
        return (
            f"the site's network has {network.site_guests} addresses for the guests of a node, "
            f"the job has {request.guests_per_node} guests on each (ask for fewer)"
        )
    return ""


def mixed(nodes: Sequence[str], underlay: Mapping[str, str]) -> str:
    """Why nodes cannot be on one segment, as one line for the user; empty when they can.

    One VXLAN device sends over IPv4 or over IPv6.  Which of the two a node has does not change by
    itself, so a requeued job would meet the same nodes again, without limit.
    """
    first = {ip_address(underlay[node]).version: node for node in reversed(nodes) if node in underlay}
    if len(first) < 2:
        return ""
    return (
        f"nodes {first[4]} (IPv4, {underlay[first[4]]}) and {first[6]} (IPv6, {underlay[first[6]]}) cannot "
        "be on one job network (choose other nodes, or --vhpc-network=none; operators: see "
        "network.underlay in vhpc.toml(5))"
    )


def choose(network: Network, held: Iterable[HeldSegment], freed: Mapping[int, int]) -> int:
    """A free VNI: one that was never used, else the one that has been free for the longest time.

    Raises:
        ExhaustedError: none is free now.
    """
    taken = {one.vni: one.left_s for one in held}
    reserved = frozenset(network.vni_reserved)
    free = [
        vni
        for vni in range(network.vni_first, network.vni_last + 1)
        if vni not in taken and vni not in reserved
    ]
    if not free:
        resting = [left_s for left_s in taken.values() if left_s is not None]
        why = f"{len(taken) - len(resting)} are in use, {len(resting)} in quarantine"
        if resting:
            why += f" (the next for {min(resting):.0f} s)"
        raise ExhaustedError("no VNI for a job network is free", why, "see network.vni_last in vhpc.toml(5)")
    return min(free, key=lambda vni: (freed.get(vni, 0), vni))


def make(
    network: Network,
    vni: int,
    nodes: Sequence[str],
    underlay: Mapping[str, str],
    *,
    flood: bool = False,
    parts: tuple[SegmentPart, ...] = (),
) -> Segment:
    """The segment of a lease.

    Args:
        network: the site's settings.
        vni: that ``choose`` found.
        nodes: of the job.
        underlay: address of each node.
        flood: broadcast and multicast frames reach all guests.
        parts: the components of a heterogeneous job; ``nodes`` are those of all of them.

    Raises:
        FabricError: a node has no address.
    """
    if missing := [node for node in nodes if node not in underlay]:
        raise FabricError(
            f"vhpcd does not know the underlay address of {len(missing)} nodes, so the job has no network",
            f"the first is {missing[0]}",
            "see network.underlay in vhpc.toml(5), and: sinfo -N -O NodeAddr",
        )
    addresses = tuple(underlay[node] for node in nodes)
    return Segment(
        vni,
        network.ipv4,
        network.ipv6,
        network.port,
        network.mtu,
        addresses,
        tunnel_port=network.tunnel_port(vni),
        flood=flood,
        parts=parts,
    )
