# SPDX-License-Identifier: Apache-2.0
"""The network of a job on a node: the devices of its segment, and their firewall."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Generation, GuestInterface, Lease, NodePlan, NodeSegment, RunningGuest, Tunnel
from vhpc_slurm.node import finding
from vhpc_slurm.node.checked import CheckResult, error, ok, warn
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.peers import give_ssh_keys
from vhpc_slurm.node.network import cluster, firewall, forwarding, owned, plan, probe, segment
from vhpc_slurm.node.resource.network import GuestNetwork, Key, Seen, when_probed
from vhpc_slurm.node.store import membership
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

NAME = "vhpc0"
"""Name of the interface in guests, which programs can select."""
NODELIST_MAX = 120_000
"""Bytes of VHPC_NODELIST; a longer list is left out, as Linux takes no variable of more than 128 KiB."""
log = logging.getLogger("vhpc")


class TunnelData(Record, frozen=True):
    """A tunnel in the entry of a network, without its keys."""

    port: int
    address: str


class NetworkData(Record, frozen=True, omit_defaults=True):
    """The entry of a job's network, from which its firewall can be made again.

    In a cluster the job's file (``membership``) has the other members, whose nodes the firewall accepts too.

    Attributes:
        vni, port, local, tunnel: of the segment.
        peers: underlay addresses of the job's other nodes.
        left: nodes that Slurm has taken from the job.
    """

    vni: int
    port: int
    local: str
    peers: tuple[str, ...]
    tunnel: TunnelData | None = None
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: NodeSegment, peers: Sequence[str]) -> NetworkData:
        """The entry of a segment."""
        through = None if found.tunnel is None else TunnelData(found.tunnel.port, found.tunnel.address)
        return cls(found.vni, found.port, found.local, tuple(peers), through)

    def segment(self) -> NodeSegment:
        """The segment, without the MTU of the guests' interfaces."""
        bridge, vxlan = plan.bridge_name(self.vni), plan.vxlan_name(self.vni)
        through = None
        if self.tunnel is not None:
            through = Tunnel(plan.tunnel_name(self.vni), self.tunnel.port, self.tunnel.address)
        return NodeSegment(self.vni, self.port, self.local, bridge, vxlan, through)


class JobNetwork(GuestNetwork):
    """What a node has of the network of a job; all guests of the node have it together."""

    kind = "network"
    families = firewall.FAMILIES
    unseen = Kind.ORPHAN_NETWORK

    def take(self, layout: Layout, journal: Journal, lease: Lease, node: NodePlan) -> int:
        """Make bridge, VXLAN device, taps and firewall; returns the MTU of the guests' interfaces.

        Raises:
            FabricError: something of another job has the VNI here, or the segment is not encrypted as
                this node's configuration demands.
            NodeError: this node cannot do it.
            Stopped: the job was ended meanwhile.
        """
        found, network = node.segment, layout.config.network
        assert found is not None
        if network.encryption == "wireguard" and len(lease.segment_nodes) > 1 and not found.tunnel:
            raise FabricError(
                f"the network of {lease.generation} is not encrypted",
                "network.encryption of this node is wireguard, that of vhpcd is not",
                "all hosts must have the same vhpc.toml; restart vhpcd after a change",
            )
        room = segment.underlay_mtu(found)
        if found.mtu > room:
            raise NodeError(
                f"network.mtu is {found.mtu}, and the underlay of {node.node} leaves {room}",
                "larger frames would be lost",
                "see network.mtu in vhpc.toml(5)",
            )
        mtu, peers = found.mtu or room, plan.peers(lease, node.node)
        journal.announce(self.kind, f"{self.kind}:{found.vni}", NetworkData.of(found, peers))
        with ExitStack() as held:
            if firewall.available():
                firewall.remember(layout.guarded_ports, found.port)
                held.enter_context(firewall.holding(lease.generation, found, peers))
            segment.build(lease, node, mtu, trusted_underlay=network.trusted_underlay)
        if network.accept_bridged:
            _pass_chains_of_others()
        return mtu

    def configure(self, lease: Lease, guest: RunningGuest, channel: GuestChannel, timeout_s: float) -> None:
        """Give the interface its name and addresses, and tell programs the job's guests."""
        interface = guest.plan.interface
        if interface is None:
            return
        when_probed(lambda: name_guests(lease, interface, guest.mtu, channel, timeout_s))
        if lease.ssh is None:
            return
        try:
            give_ssh_keys(channel, lease.ssh, lease.request.uid, lease.request.gid, timeout_s)
        except ChannelRefusedError as err:
            # the job can run without it: an older agent, or a program of the image that has port 22
            log.warning("no ssh to a guest of %s: %s", lease.generation, err.why)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Remove the devices and the firewall of the job's segment; its guests have ended."""
        del layout
        segment.release(generation, entry.read(NetworkData).vni)

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """As for each network; then what is wrong with the node's own table."""
        yield from super().orphans(layout)
        yield from _port(layout)

    def seen(self) -> Seen:
        """Interfaces, tables and their copies."""
        held = segment.held().items()
        interfaces = {name: str(generation or "") for generation, names in held for name in names}
        tables = {(generation, 0): families for generation, families in firewall.tables().items()}
        return Seen(interfaces, tables, owned.existing())

    def table(self, generation: Generation, index: int) -> str:
        """Name of the job's tables."""
        del index
        return firewall.table_name(generation)

    def protect(self, layout: Layout, generation: Generation, entry: Entry, *, copy: bool) -> None:
        """Make the tables again, or their copies, if the devices are there."""
        if generation in segment.held():
            make = firewall.hold if copy else firewall.apply
            found = entry.read(NetworkData)
            with membership.changing(layout, generation.job_id) as known:
                others = () if known is None else cluster.peers(known.others, found.local)
                make(generation, found.segment(), (*found.peers, *others))

    def unprotect(self, generation: Generation, index: int) -> None:
        """Remove the tables and their copies."""
        del index
        firewall.remove(generation)

    def _lost(self, layout: Layout, seen: Seen, key: Key, what: str) -> Iterator[NodeFinding]:
        """In a cluster a follower may just have made the tables anew: then they are looked at again."""
        found = list(super()._lost(layout, seen, key, what))
        if found and layout.membership(key[0].job_id).exists():
            with suppress(NodeError), membership.changing(layout, key[0].job_id):
                found = list(super()._lost(layout, self.seen(), key, what))
        yield from found

    def protected(self, seen: Seen, key: Key, entry: Entry) -> str:
        """The segment; a node without nftables has no tables."""
        there = str(key[0]) in seen.interfaces.values() and firewall.available()
        return f"VNI {entry.read(NetworkData).vni} of generation {key[0]}" if there else ""

    def stray_interfaces(
        self, layout: Layout, seen: Seen, known: Mapping[Key, Entry]
    ) -> Iterator[NodeFinding]:
        """Interfaces that no journal has, by generation."""
        by_generation: dict[str, list[str]] = {}
        for name, generation in seen.interfaces.items():
            if not _is_owned(known, generation, name):
                by_generation.setdefault(generation, []).append(name)
        for generation, names in by_generation.items():
            what = f"{', '.join(names)} of generation {generation or 'unknown'}, which has no journal"
            repair = partial(self._remove, layout, generation, names)
            yield NodeFinding(Kind.ORPHAN_NETWORK, f"network interfaces {what}", repair)

    def _remove(self, layout: Layout, generation: str, names: Sequence[str]) -> None:
        known = self.announced(layout)
        segment.remove([name for name in names if not _is_owned(known, generation, name)])

    def check(self, config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
        """Results where the site allows job networks; the kernel is tried by root only."""
        del node
        network = config.network
        if "job" not in network.allowed:
            return
        if not firewall.available():
            if network.trusted_underlay:
                yield warn(
                    "network.firewall",
                    "nftables is not installed: any host or user that can send UDP to this node can send "
                    "frames to guests, and guests may reach this node's own addresses",
                    "apt install nftables",
                )
            else:
                yield error(
                    "network.firewall",
                    "nftables is not installed: jobs with --vhpc-network=job fail here, and drain this node",
                    "apt install nftables",
                )
        if root:
            yield kernel()
            if network.encryption == "wireguard":
                yield wireguard()
        else:
            yield warn("network.kernel", "job networks were not tried", "run vhpc doctor as root")
        yield bridge_netfilter(network.accept_bridged)


def entry_of(entries: Sequence[Entry]) -> Entry:
    """The entry of the job's network in a journal.

    Raises:
        NodeError: there is none.
    """
    found = find_entry(entries)
    if found is None:
        raise NodeError("the job has no network on this node any more")
    return found


def find_entry(entries: Sequence[Entry]) -> Entry | None:
    """The entry of the job's network in a journal; None if there is none."""
    return next((entry for entry in entries if entry.kind == JobNetwork.kind), None)


def _pass_chains_of_others() -> None:
    """The ready barrier tells the user if frames do not arrive, so a refusal of nftables is no error here."""
    try:
        forwarding.accept()
    except NodeError as err:
        log.warning("rules of others may drop the frames of job networks: %s", err.line())


def name_guests(
    lease: Lease,
    interface: GuestInterface,
    mtu: int,
    channel: GuestChannel,
    timeout_s: float,
    left: Collection[str] = (),
) -> None:
    """Configure a guest's interface, and give it the names of all guests except those of nodes in ``left``.

    It can be repeated: an interface that is configured already keeps its addresses and connections.

    Raises:
        ChannelError: the guest does not do it.
    """
    slots = plan.slots(lease, left)
    names = tuple(name for name, _ in slots)
    nodelist = names if len(",".join(names)) <= NODELIST_MAX else ()
    channel.network(interface, mtu, NAME, nodelist, timeout_s, slots=slots)


def _port(layout: Layout) -> Iterator[NodeFinding]:
    """The node's own table, which protects nodes of jobs that this node has left."""
    ports = firewall.remembered(layout.guarded_ports) if firewall.available() else frozenset()
    if not ports:
        return
    repair = partial(firewall.guard, ports)
    try:
        if not firewall.guards(ports):
            what = f"this node has lost its nftables table {firewall.GUARD}"
            yield NodeFinding(Kind.FIREWALL, what, repair)
        lacking = forwarding.lacking() if layout.config.network.accept_bridged else ()
    except NodeError as err:
        yield finding.of_error(Kind.FIREWALL, err)
        return
    for chain in lacking:
        what = f"chain {chain} may drop frames of job networks, and has lost the rule that accepts them"
        yield NodeFinding(Kind.FIREWALL, what, forwarding.accept)


def _is_owned(known: Mapping[Key, Entry], generation: str, name: str) -> bool:
    """Whether a journal has an interface; one whose alias is not set yet is known by its VNI."""
    if generation:
        return generation in {str(one) for one, _ in known}
    return plan.vni_of(name) in {entry.read(NetworkData).vni for entry in known.values()}


def kernel() -> CheckResult:
    """Whether the kernel makes locked bridge ports, VXLAN, multiqueue taps and the firewall."""
    try:
        probe.run()
    except NodeError as err:
        return error(
            "network.kernel",
            f"this node cannot make a job network: {err.line()}",
            "it needs Linux 5.18 with bridge, vxlan, tun and nf_tables, and iproute2 5.18 and nftables",
        )
    return ok("network.kernel", "a test network was created in a separate namespace, and removed")


def wireguard() -> CheckResult:
    """Whether kernel and tools make an encrypted job network."""
    try:
        probe.run("wireguard")
    except NodeError as err:
        return error(
            "network.wireguard",
            f"network.encryption is wireguard, and this node cannot make such a network: {err.line()}",
            "it needs a kernel with wireguard, and wireguard-tools",
        )
    return ok(
        "network.wireguard", "an encrypted test network was created in a separate namespace, and removed"
    )


def bridge_netfilter(accepts: bool) -> CheckResult:
    """Whether rules of others for routed packets drop frames between guests, and which.

    ``accepts``: nodes put a rule of vhpc into these chains (``network.accept_bridged``).
    """
    name = "network.br_netfilter"
    families = forwarding.switched_on()
    if not families:
        return ok(name, "bridged frames do not pass the rules for routed packets")
    sysctls = [f"net.bridge.{forwarding.SWITCHES[family]}" for family in families]
    hint, first = f"sysctl -w {' '.join(f'{one}=0' for one in sysctls)}; or accept ", sysctls[0]
    if forwarding.legacy():
        what = f"{first} is on, and this node has rules of iptables-legacy, which may drop frames of guests"
        ours = f"-i {plan.PREFIX}b+ -o {plan.PREFIX}b+"
        return warn(name, what, f"{hint}{ours} at the beginning of FORWARD there")
    try:
        dropping = [one for one in forwarding.chains(families) if one.drops]
    except NodeError as err:
        return warn(name, f"{first} is on: {err.line()}", f"sysctl -w {first}=0")
    lacking = ", ".join(str(one) for one in dropping if not one.accepts)
    if lacking and not accepts:
        what = f"{first} is on, and a chain that may drop packets cuts job networks: {lacking}"
        ours = f'iifname "{plan.PREFIX}b*" oifname "{plan.PREFIX}b*"'
        return warn(name, what, f"{hint}{ours} at its beginning; or set network.accept_bridged")
    what = "no chain of others with hook forward drops packets"
    if lacking:
        what = f"the next job network puts a rule that accepts its frames into: {lacking}"
    elif dropping:
        what = f"a rule of vhpc accepts frames between guests in: {', '.join(map(str, dropping))}"
    return ok(name, f"{first} is on; {what}")
