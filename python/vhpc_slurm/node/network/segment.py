# SPDX-License-Identifier: Apache-2.0
"""The devices of a job's segment on one node: made, checked, found, and removed.

The bridge learns nothing and floods nothing over the underlay: it knows every guest
from the lease, and answers ARP and neighbour solicitations for guests of other nodes
itself (``neigh_suppress``). Its ports are ``locked``: a frame whose source address has
no static entry on that port is dropped, so a guest can have no address but its own.
The bridge has no address, and the firewall keeps the node off it.

If the segment is encrypted, the VXLAN device is bound to the WireGuard interface
(``tunnel``): the kernel removes it together with that interface.

A segment that floods passes broadcast and multicast frames of its guests on to all
other nodes of the job: the VXLAN device has one entry for the address 0 per node, and
sends a copy to each. Unknown unicast addresses stay dropped, and ports locked. A node
never sends what it has received to another node.

Every device has the generation as its alias, so that one without a journal is known.

Sources: bridge(8), ip-link(8), net/bridge/br_input.c (BR_PORT_LOCKED), br_arp_nd_proxy.c.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address

from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.model import Generation, GuestInterface, Lease, NodePlan, NodeSegment
from vhpc_slurm.node.network import entries, firewall, plan, tools, tunnel, udp_port
from vhpc_slurm.node.network.entries import Command

LEAST_MTU = 1280

CLOSED = ("learning", "off", "flood", "off", "mcast_flood", "off", "mcast_router", "0", "locked", "on")
"""Settings of every port.  Unknown destinations are dropped, and so are sources without an entry."""


def underlay_mtu(segment: NodeSegment) -> int:
    """MTU that the underlay leaves for guests: that of this node's interface, less VXLAN and WireGuard.

    Raises:
        NodeError: no interface of this node has the address, or its MTU is too small.
    """
    found = tools.query("ip", "address", "show", "to", segment.local, "up")
    if not found:
        raise NodeError(
            f"this node does not have the underlay address {segment.local}",
            "vhpcd has it for this node, from Slurm's NodeAddr or from network.underlay",
            "see: ip address; network.underlay in vhpc.toml(5)",
        )
    version = ip_address(segment.local).version
    left = min(int(one["mtu"]) for one in found)
    left -= plan.OVERHEAD[version] if segment.tunnel is None else tunnel.OVERHEAD[version]
    if left < LEAST_MTU:
        raise NodeError(
            f"interface {found[0]['ifname']} leaves guests an MTU of {left}", f"IPv6 needs {LEAST_MTU}"
        )
    return left


def build(lease: Lease, node: NodePlan, mtu: int, *, trusted_underlay: bool) -> None:
    """Make the firewall and the devices of a node's guests; the caller has announced them in the journal.

    Args:
        lease: of the job.
        node: the plan of this node.
        mtu: of the guests' interfaces.
        trusted_underlay: go on where there is no nftables; an encrypted segment needs it in any case.

    Raises:
        FabricError: something of another job has the VNI here, another program has the UDP port, or vhpcd
            sent no keys for the tunnels.
        NodeError: this node cannot do it.
    """
    segment = node.segment
    assert segment is not None
    generation = lease.generation
    others = {alias for _, alias in found(segment.vni)}
    if others:
        raise FabricError(
            f"VNI {segment.vni} is still in use on {node.node}",
            f"interfaces of {', '.join(sorted(others)) or 'an unknown generation'} have it",
            "run there: vhpc reconcile",
        )
    peers = plan.peers(lease, node.node)
    if firewall.available():
        firewall.apply(generation, segment, peers)
    elif segment.tunnel is not None or not trusted_underlay:
        raise NodeError(
            "job networks need nftables",
            "without it any host or user that can send UDP to this node can send frames to guests",
            "apt install nftables; or see network.trusted_underlay in vhpc.toml(5)",
        )
    interfaces = [guest.interface for guest in node.guests if guest.interface is not None]
    if segment.tunnel is not None:
        around_us = tunnel.peers(lease, node.node)
        tunnel.make(generation, segment.tunnel, tunnel.keys(lease), around_us, mtu)
    make_devices(generation, segment, interfaces, mtu)
    around = tuple(plan.neighbours(lease, node.node))
    tools.batch("bridge", (*_forwarding(segment, around), *_flooding(segment, peers)))
    with udp_port.opening(segment.port):
        tools.batch("ip", (*_resolution(segment, around), *_up(segment, interfaces)))


def make_devices(
    generation: Generation, segment: NodeSegment, interfaces: Sequence[GuestInterface], mtu: int
) -> None:
    """Make bridge, VXLAN device and taps, with locked ports; they are down, and know no guest.

    Raises:
        NodeError: the kernel refuses, or does not know a setting.
    """
    tools.batch("ip", _devices(generation, segment, interfaces, mtu))
    _set_sysctls(segment, interfaces)
    tools.batch("bridge", _ports(segment, interfaces))
    _check_ports(segment, interfaces)


def _devices(
    generation: Generation, segment: NodeSegment, interfaces: Sequence[GuestInterface], mtu: int
) -> Iterator[Command]:
    """The devices, down.  ``user root``: a tap without an owner could be opened by every user."""
    label = ("alias", str(generation), "addrgenmode", "none", "mtu", str(mtu))
    # a device that is bound to the WireGuard interface never sends to another one
    through: Command = ("local", segment.local)
    if segment.tunnel is not None:
        through = ("local", segment.tunnel.address, "dev", segment.tunnel.name)
    yield (
        *("link", "add", "name", segment.bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0"),
        *("mcast_snooping", "0"),
    )
    yield ("link", "set", "dev", segment.bridge, *label)
    yield (
        *("link", "add", "name", segment.vxlan, "type", "vxlan", "id", str(segment.vni)),
        *(*through, "dstport", str(segment.port), "nolearning", "ttl", "64"),
    )
    yield ("link", "set", "dev", segment.vxlan, "master", segment.bridge, *label)
    for one in interfaces:
        several = ("multi_queue",) if one.queues > 1 else ()
        yield ("tuntap", "add", "dev", one.tap, "mode", "tap", "user", "0", *several)
        yield ("link", "set", "dev", one.tap, "master", segment.bridge, *label)


def _set_sysctls(segment: NodeSegment, interfaces: Sequence[GuestInterface]) -> None:
    """Keep the node's own IP stack out; IPv6 is on at the bridge only, which has no neighbours without it."""
    if not (tools.SYSCTL / "ipv6").is_dir():
        raise NodeError("job networks need IPv6 in this node's kernel", "it is off", "see ipv6.disable")
    values = {
        f"ipv4/conf/{segment.bridge}/arp_ignore": "8",
        f"ipv4/conf/{segment.bridge}/rp_filter": "1",
        f"ipv4/conf/{segment.bridge}/forwarding": "0",
        f"ipv6/conf/{segment.bridge}/disable_ipv6": "0",
        f"ipv6/conf/{segment.bridge}/accept_ra": "0",
        f"ipv6/conf/{segment.bridge}/forwarding": "0",
    }
    for name in (segment.vxlan, *(one.tap for one in interfaces)):
        values[f"ipv6/conf/{name}/disable_ipv6"] = "1"
    tools.set_sysctls(values)


def _ports(segment: NodeSegment, interfaces: Sequence[GuestInterface]) -> Iterator[Command]:
    """Guests hear broadcasts of each other on the same node; on other nodes only on a segment that floods."""
    other = "on" if segment.flood else "off"
    local = "on" if segment.flood or len(interfaces) > 1 else "off"
    yield ("link", "set", "dev", segment.vxlan, *_port(other), "neigh_suppress", "on")
    for one in interfaces:
        yield ("link", "set", "dev", one.tap, *_port(local))


def _port(flood: str) -> Iterator[str]:
    """Settings of a port to which broadcast and multicast frames go (``on``) or not."""
    settings = dict(zip(CLOSED[::2], CLOSED[1::2], strict=True))
    settings |= {"mcast_flood": flood, "bcast_flood": flood}
    return (word for pair in settings.items() for word in pair)


def _check_ports(segment: NodeSegment, interfaces: Sequence[GuestInterface]) -> None:
    """NodeError unless the kernel has what was set: one that does not know a setting ignores it."""
    ports = {one["ifname"]: one for one in tools.query("bridge", "link", "show")}
    for name in (segment.vxlan, *(one.tap for one in interfaces)):
        port = ports.get(name, {})
        if not (port.get("locked") is True and port.get("learning") is False and port.get("flood") is False):
            raise NodeError(
                f"the kernel did not lock bridge port {name}",
                "job networks need Linux 5.18 or newer, and iproute2 5.18",
            )


def _forwarding(segment: NodeSegment, around: Sequence[plan.Neighbour]) -> Iterator[Command]:
    for one in around:
        yield entries.add_port(one.tap or segment.vxlan, one.mac)
        if one.via:
            yield entries.add_remote(segment.vxlan, one.mac, one.via)


def _flooding(segment: NodeSegment, peers: Sequence[str]) -> Iterator[Command]:
    """The nodes that get a copy of each broadcast and multicast frame."""
    for peer in peers if segment.flood else ():
        yield ("fdb", "append", "00:00:00:00:00:00", "dev", segment.vxlan, "self", "permanent", "dst", peer)


def _resolution(segment: NodeSegment, around: Sequence[plan.Neighbour]) -> Iterator[Command]:
    for one in around:
        if one.via:
            for address in (one.ipv4, one.ipv6):
                yield entries.add_neighbour(segment.bridge, address, one.mac)


def _up(segment: NodeSegment, interfaces: Sequence[GuestInterface]) -> Iterator[Command]:
    for name in (*(one.tap for one in interfaces), segment.vxlan, segment.bridge):
        yield ("link", "set", "dev", name, "up")


def forget(lease: Lease, node: str, left: Collection[str], others: Sequence[str] = ()) -> None:
    """Remove what this node has for guests of nodes that have left the job; what is absent is no error.

    Args:
        lease: of the job.
        node: this node.
        left: nodes of the lease that are no longer nodes of the job.
        others: underlay addresses of the other members of its cluster.

    Raises:
        NodeError: the kernel or nftables refuses.
    """
    segment = plan.node_segment(lease, node)
    assert segment is not None
    if firewall.available():
        peers = (*plan.peers(lease, node, left), *others)
        firewall.replace(lease.generation, segment, peers)
    gone = [one for one in plan.neighbours(lease, node) if one.node in left]
    macs, nodes = {one.mac for one in gone}, {one.via for one in gone}
    tools.batch("bridge", _forwarding_removal(segment, macs, nodes))
    tools.batch("ip", _resolution_removal(segment, macs))
    if segment.tunnel is not None and (closed := {via for via in nodes if via}):
        tunnel.forget(segment.tunnel, closed)


def _forwarding_removal(
    segment: NodeSegment, macs: Collection[str], nodes: Collection[str]
) -> Iterator[Command]:
    """Each guest has an entry in the bridge (``master``), and one in the VXLAN device (``dst``).

    With flooding, the VXLAN device has an entry for each node, too.  A bridge that knows VLANs
    shows an entry once more for each VLAN, and removes all of these at once.
    """
    found: set[Command] = set()
    for one in tools.query("bridge", "fdb", "show", "dev", segment.vxlan):
        if one["mac"] in macs or one.get("dst") in nodes:
            mac = str(one["mac"])
            via = one.get("dst")
            found.add(
                entries.remove_port(segment.vxlan, mac)
                if via is None
                else entries.remove_remote(segment.vxlan, mac, str(via))
            )
    yield from sorted(found)


def _resolution_removal(segment: NodeSegment, macs: Collection[str]) -> Iterator[Command]:
    for one in tools.query("ip", "neighbour", "show", "dev", segment.bridge):
        if one.get("lladdr") in macs:
            yield entries.remove_neighbour(segment.bridge, str(one["dst"]))


def found(vni: int | None = None) -> list[tuple[str, str]]:
    """(name, alias) of the interfaces with our names, of one VNI or of all; an alias may not be set yet.

    Raises:
        NodeError: the kernel cannot be asked.
    """
    links = ((str(one["ifname"]), str(one.get("ifalias", ""))) for one in tools.query("ip", "link", "show"))
    numbers = ((name, alias, plan.vni_of(name)) for name, alias in links)
    return [(name, alias) for name, alias, number in numbers if number is not None and vni in (None, number)]


def release(generation: Generation, vni: int) -> None:
    """Remove all that a generation has of its segment here; what is absent is no error.

    Raises:
        NodeError: the kernel cannot be asked, or refuses.
        TeardownError: something is left.
    """
    owners = ("", str(generation))
    remove([name for name, alias in found(vni) if alias in owners])
    firewall.remove(generation)
    left = [name for name, alias in found(vni) if alias in owners]
    if generation in firewall.tables():
        left.append("its nftables tables")
    if left:
        raise TeardownError(f"the network of {generation} is still there", ", ".join(left))


def remove(names: Sequence[str]) -> None:
    """Remove interfaces; one that is gone already is no error, but NodeError when the kernel refuses.

    WireGuard interfaces are last: the kernel removes the VXLAN device of one together with it.
    """
    for name in sorted(names, key=lambda name: name.startswith(plan.tunnel_name(0)[:-1])):
        try:
            tools.run("ip", "link", "delete", "dev", name)
        except NodeError:
            if name in {other for other, _ in found()}:
                raise


def held() -> dict[Generation | None, list[str]]:
    """Names of the interfaces of segments on this node, by generation; None where no alias was set yet.

    Interfaces with such a name and an alias of another form are not ours.

    Raises:
        NodeError: the kernel cannot be asked.
    """
    interfaces: dict[Generation | None, list[str]] = {}
    for name, alias in found():
        with suppress(ValueError):
            interfaces.setdefault(Generation.parse(alias) if alias else None, []).append(name)
    return interfaces
