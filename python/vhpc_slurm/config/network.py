# SPDX-License-Identifier: Apache-2.0
"""The table [network] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Annotated, Literal, get_args

import msgspec

from vhpc_slurm.config.setting import documented

NetworkKind = Literal["none", "job", "nat", "site"]
NetworkChoice = Literal[
    "none",
    "job",
    "job,multicast",
    "nat",
    "job,nat",
    "job,multicast,nat",
    "site",
    "job,site",
    "job,multicast,site",
]
CHOICES: tuple[str, ...] = get_args(NetworkChoice)
"""Values of --vhpc-network, as the SPANK plugin passes them."""
PRIVATE = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "198.18.0.0/15",
)
"""Networks that are not on the Internet (RFC 6890), where sites have their own hosts."""
LEAST_NAT_ADDRESSES = 8
LAST_VNI = (1 << 24) - 1
"""RFC 7348: 24 bits."""
MAX_VNIS = 1 << 16
"""The most VNIs of a pool; choosing one may look at all of them."""
LEAST_MTU = 1280
"""RFC 8200: what IPv6 needs."""
LAST_PORT = 65535
VXLAN_PORT = 4789
"""IANA's port of VXLAN, which others on the node may use."""


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The network between the guests of a job: a VXLAN segment, in addition to the partition of [fabric]."""

    allowed: Annotated[
        tuple[NetworkKind, ...],
        documented(
            "values that users may choose with --vhpc-network: none (no network), job (one interface in each "
            "guest, on a segment that only the guests of this job use), nat (an interface in each guest "
            "that leads to other networks through passt), site (an interface in each guest on the bridge "
            "`site_bridge`); with job and nat, or job and site, also both. What job,multicast adds is "
            "limited by `multicast_guests`"
        ),
        msgspec.Meta(min_length=1),
    ] = ("none",)
    default: Annotated[
        NetworkChoice,
        documented(
            'value for jobs without --vhpc-network: one of `allowed`, or a list of them such as "job,nat"'
        ),
    ] = "none"
    vni_first: Annotated[int, documented("first VXLAN network identifier of the pool", ge=1, le=LAST_VNI)] = (
        100000
    )
    vni_last: Annotated[int, documented("last VXLAN network identifier of the pool", ge=1, le=LAST_VNI)] = (
        104095
    )
    vni_reserved: Annotated[
        tuple[int, ...], documented("identifiers in that range that are never allocated")
    ] = ()
    exhausted: Annotated[
        Literal["requeue", "refuse"],
        documented(
            "treatment of a job for which no identifier is free: requeue (Slurm starts it again later), "
            "or refuse (it fails with a message)"
        ),
    ] = "requeue"
    quarantine_s: Annotated[
        int,
        documented(
            "time in which an identifier is not used after all nodes have acknowledged, while vhpcd runs",
            ge=0,
            le=86400,
        ),
    ] = 60
    ipv4: Annotated[
        str,
        documented(
            "IPv4 network of the guests' addresses, the same in all jobs: guest number r, counted from 0, "
            "has address number r+1"
        ),
    ] = "10.200.0.0/16"
    ipv6: Annotated[
        str, documented("IPv6 network of the guests' addresses: a /64, with addresses as for `ipv4`")
    ] = "fd76:6870:6300::/64"
    underlay: Annotated[
        str,
        documented(
            "host name of a node's address on the network that carries the segments, such as "
            "\"{node}-ib\" with {node} for Slurm's name; empty: the node's NodeAddr. vhpcd resolves the name"
        ),
    ] = ""
    port: Annotated[
        int,
        documented(
            "UDP port of the segments on all nodes, which no other program may use; not 4789",
            ge=1024,
            le=65535,
        ),
    ] = 7634
    mtu: Annotated[
        int,
        documented(
            "MTU of guests' interfaces; 0: that of the node's underlay interface minus VXLAN's overhead; "
            "it must be the same on all nodes of a job, so set it if their interfaces differ",
            ge=0,
            le=65465,
        ),
    ] = 0
    ready_timeout_s: Annotated[
        int,
        documented(
            "how long a node waits, when its own guests of a job with a network are ready, for the guests of "
            "other nodes; then the job is requeued, and the message names the node that is not ready. "
            "PrologEpilogTimeout of slurm.conf must allow it",
            ge=1,
            le=600,
        ),
    ] = 120
    reach_timeout_s: Annotated[
        int,
        documented(
            "how long a guest repeats packets to another guest that is ready and does not answer; then the "
            "job is requeued, and the message names the two guests",
            ge=1,
            le=120,
        ),
    ] = 15
    multicast_guests: Annotated[
        int,
        documented(
            "largest number of guests of a job that may have --vhpc-network=job,multicast, with which nodes "
            "send a copy of each broadcast and multicast frame to each other node of the job; 0: no job may",
            ge=0,
            le=1024,
        ),
    ] = 32
    trusted_underlay: Annotated[
        bool,
        documented(
            "start job networks also on a node without nftables. VXLAN has no authentication: then any host "
            "or user that can send UDP to the node, including its own users, can send frames to the guests"
        ),
    ] = False
    accept_bridged: Annotated[
        bool,
        documented(
            "where br_netfilter sends the frames of bridges through the rules for routed packets "
            "(net.bridge.bridge-nf-call-iptables), nodes put one rule at the beginning of each chain of "
            "others with hook forward that may drop packets, such as Docker's: frames from a bridge of a "
            "job network to the same bridge are accepted. false: the site's own rules accept them"
        ),
    ] = True
    encryption: Annotated[
        Literal["none", "wireguard"],
        documented(
            "wireguard: frames between the nodes of a job are encrypted and authenticated with keys of this "
            "job. Every node needs wireguard-tools, nftables and a kernel with wireguard, vhpcd's host "
            "python3-cryptography; the MTU of guests is 80 bytes smaller"
        ),
    ] = "none"
    wireguard_port: Annotated[
        int,
        documented(
            "first UDP port of WireGuard: the job with identifier `vni_first` + n uses this port + n on its "
            "nodes. No other program may use these ports, and they should not be in "
            "net.ipv4.ip_local_port_range",
            ge=1024,
            le=65535,
        ),
    ] = 20480

    nat_allow: Annotated[
        tuple[str, ...],
        documented(
            "IPv4 networks that guests with nat may reach although they are in `nat_deny`, or belong to the "
            'site, or to the node itself, such as "192.0.2.10/32" of a license server'
        ),
    ] = ()
    nat_deny: Annotated[
        tuple[str, ...],
        documented(
            "IPv4 networks that guests with nat cannot reach. They never reach the node itself, the networks "
            "that it is directly connected to, underlay addresses of their job, and vhpcd's host, unless "
            "`nat_allow` has these"
        ),
    ] = PRIVATE
    nat_dns: Annotated[
        tuple[str, ...],
        documented(
            "IPv4 addresses of DNS servers for guests with nat, which they reach on port 53 in any case; "
            "empty: those in the node's resolv.conf"
        ),
    ] = ()
    nat_ipv4: Annotated[
        str,
        documented(
            "IPv4 network between each guest and its passt: the guest has address number 2, its gateway "
            "number 1. The guests cannot reach other hosts with addresses of this network"
        ),
    ] = "10.201.0.0/24"
    site_bridge: Annotated[
        str,
        documented(
            "bridge that the site has made on each node for guests with --vhpc-network=site, on a network "
            "that guests of all jobs share; vhpc adds and removes ports, and changes nothing else of it"
        ),
    ] = ""
    site_ipv4: Annotated[str, documented("IPv4 network of `site_bridge`, such as 192.0.2.0/24")] = ""
    site_gateway: Annotated[
        str, documented("IPv4 address of the gateway on that network: the guests' default route")
    ] = ""
    site_name: Annotated[
        str,
        documented(
            "host name of the address of a node's guest, with {node} for Slurm's name and {slot} for a "
            "number from 0, which no other guest of the node has at the time. The node resolves it"
        ),
    ] = "{node}-guest{slot}"
    site_guests: Annotated[
        int, documented("number of guests on a node that have such names", ge=1, le=1024)
    ] = 16
    site_dns: Annotated[
        tuple[str, ...],
        documented("IPv4 addresses of DNS servers for guests with site; empty: the image's resolv.conf"),
    ] = ()
    site_isolated: Annotated[
        bool,
        documented(
            "guests of the same node do not reach each other on `site_bridge` (isolated ports). Guests of "
            "different nodes do, unless the site's switches prevent it"
        ),
    ] = True
    passt: Annotated[
        str, documented("program of passt, version 2024_11_27 or newer (Debian 13); absolute path")
    ] = "/usr/bin/passt"

    def __post_init__(self) -> None:
        """ValueError, which names the key, when values do not fit together."""
        if missing := [part for part in self.kinds(self.default) if part not in self.allowed]:
            raise ValueError(f"default is {self.default}, but {missing[0]} is not in allowed")
        if "multicast" in self.default.split(",") and self.multicast_guests == 0:
            raise ValueError(f"default is {self.default}, but multicast_guests is 0")
        if self.port == VXLAN_PORT:
            raise ValueError("port is 4789, which other users of VXLAN have")
        if 0 < self.mtu < LEAST_MTU:
            raise ValueError(f"mtu is {self.mtu}: IPv6 needs {LEAST_MTU}")
        if not 0 <= self.vni_last - self.vni_first < MAX_VNIS:
            raise ValueError(f"vni_first to vni_last has to be a range of 1 to {MAX_VNIS} identifiers")
        if not any(vni not in self.vni_reserved for vni in range(self.vni_first, self.vni_last + 1)):
            raise ValueError("vni_reserved has all of the pool")
        self._check_encryption()
        if "{" in self.underlay.replace("{node}", "") or (self.underlay and "{node}" not in self.underlay):
            raise ValueError("underlay has to contain {node} and no other name in braces")
        try:
            bits = self.ipv4_network.prefixlen
        except ValueError as err:
            raise ValueError(f"ipv4: {err}") from err
        if not 8 <= bits <= 30:
            raise ValueError(f"ipv4 has a prefix of {bits} bits: 8 to 30 are expected")
        try:
            bits = self.ipv6_network.prefixlen
        except ValueError as err:
            raise ValueError(f"ipv6: {err}") from err
        if bits != 64:
            raise ValueError(f"ipv6 has a prefix of {bits} bits: 64 are expected")
        self._check_nat()
        if "site" in self.allowed:
            self._check_site()

    def _check_encryption(self) -> None:
        """ValueError, which names the key, when a value for WireGuard is not valid."""
        if self.encryption == "none":
            return
        if self.trusted_underlay:
            raise ValueError("trusted_underlay is for nodes without nftables, which encryption needs")
        last = self.wireguard_port + self.vni_last - self.vni_first
        if last > LAST_PORT:
            raise ValueError(
                f"wireguard_port is {self.wireguard_port}: {self.vni_last - self.vni_first + 1} identifiers "
                f"need as many ports, and the last would be {last}"
            )
        if self.wireguard_port <= self.port <= last:
            raise ValueError(
                f"port is {self.port}, which is one of those of WireGuard ({self.wireguard_port} to {last})"
            )

    def tunnel_port(self, vni: int) -> int:
        """UDP port of the tunnels of an identifier; 0 if segments are not encrypted."""
        return self.wireguard_port + vni - self.vni_first if self.encryption == "wireguard" else 0

    def _check_nat(self) -> None:
        """ValueError, which names the key, when a value for nat is not valid."""
        for key in ("nat_allow", "nat_deny"):
            for text in getattr(self, key):
                try:
                    IPv4Network(text)
                except ValueError as err:
                    raise ValueError(f"{key}: {err}") from err
        for text in self.nat_dns:
            try:
                address = IPv4Address(text)
            except ValueError as err:
                raise ValueError(f"nat_dns: {err}") from err
            if address.is_loopback or address.is_unspecified:
                raise ValueError(f"nat_dns: {text} is no address that guests can reach")
        try:
            inner = IPv4Network(self.nat_ipv4)
        except ValueError as err:
            raise ValueError(f"nat_ipv4: {err}") from err
        if inner.num_addresses < LEAST_NAT_ADDRESSES:
            raise ValueError(f"nat_ipv4 has a prefix of {inner.prefixlen} bits: at most 29 are expected")
        if inner.overlaps(self.ipv4_network):
            raise ValueError(f"nat_ipv4 overlaps ipv4 ({self.ipv4})")
        if not self.passt.startswith("/"):
            raise ValueError("passt has to be an absolute path")

    def _check_site(self) -> None:
        """ValueError, which names the key, when a value for the site's network is not valid."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", self.site_bridge):
            raise ValueError("site_bridge has to be the name of an interface when site is allowed")
        try:
            network = self.site_network
        except ValueError as err:
            raise ValueError(f"site_ipv4: {err}") from err
        for key, values in (("site_gateway", (self.site_gateway,)), ("site_dns", self.site_dns)):
            for text in values:
                try:
                    IPv4Address(text)
                except ValueError as err:
                    raise ValueError(f"{key}: {err}") from err
        if IPv4Address(self.site_gateway) not in network:
            raise ValueError(f"site_gateway {self.site_gateway} is not in site_ipv4 {network}")
        if network.overlaps(self.ipv4_network):
            raise ValueError(f"site_ipv4 overlaps ipv4 ({self.ipv4})")
        plain = self.site_name.replace("{node}", "n").replace("{slot}", "0")
        if "{node}" not in self.site_name or "{slot}" not in self.site_name or "{" in plain:
            raise ValueError("site_name has to contain {node} and {slot}, and no other name in braces")

    def parts(self, asked: str | None, implies_job: bool = False) -> tuple[str, ...]:
        """The words of a job's choice: ``none``, or some of ``job``, ``multicast``, ``nat`` and ``site``.

        ``asked`` is the value of --vhpc-network, None for a job without it. ``implies_job`` adds ``job``.
        """
        words = tuple((asked or self.default).split(","))
        if not implies_job or "job" in words:
            return words
        return ("job", *(word for word in words if word != "none"))

    def kinds(self, asked: str | None, implies_job: bool = False) -> tuple[str, ...]:
        """The networks of a job, as ``allowed`` names them: ``multicast`` is a property of ``job``."""
        return tuple(part for part in self.parts(asked, implies_job) if part != "multicast")

    def barrier_s(self, *, checked: bool) -> int:
        """Longest time that the ready barrier adds to a Prolog, in seconds; ``checked``: guests.check is set.

        The first node gives the others the time to find out which guests do not reach each other. In a
        cluster it gives the nodes of other members as long, and then its guests test other members.
        """
        wanted = checked or "job" in self.allowed
        return self.ready_timeout_s + 5 * max(10, self.reach_timeout_s) if wanted else 0

    @property
    def ipv4_network(self) -> IPv4Network:
        """``ipv4`` as a value."""
        return IPv4Network(self.ipv4)

    @property
    def ipv6_network(self) -> IPv6Network:
        """``ipv6`` as a value."""
        return IPv6Network(self.ipv6)

    @property
    def site_network(self) -> IPv4Network:
        """``site_ipv4`` as a value."""
        return IPv4Network(self.site_ipv4)

    @property
    def most_guests(self) -> int:
        """Guests that one job can have on its segment: each needs an IPv4 address and a MAC address."""
        return min(self.ipv4_network.num_addresses - 2, 1 << 16)
