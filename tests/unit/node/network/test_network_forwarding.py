# SPDX-License-Identifier: Apache-2.0
"""br_netfilter and chains of others that drop, as Docker's FORWARD: guests reach each other."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from controller_lab import wait_for
from network_lab import (
    PAYLOAD,
    QUIET_S,
    Guest,
    Host,
    Pair,
    first_node,
    inside,
    ours,
    real_cluster,
    real_pair,
    second_node,
    usable,
)

from vhpc_slurm.cli.host.checks import Level
from vhpc_slurm.node.network import forwarding
from vhpc_slurm.node.resource import job_network

SYSCTLS = Path("/proc/sys/net/bridge")

pytestmark = [
    pytest.mark.promise("net.forwarding"),
    pytest.mark.skipif(bool(usable()), reason=usable()),
    pytest.mark.skipif(not SYSCTLS.is_dir(), reason="needs br_netfilter: modprobe br_netfilter"),
]

cluster = real_cluster
n1 = first_node
n2 = second_node
pair = real_pair

# `iptables -P FORWARD DROP` of iptables-nft, and the same for IPv6; a rule of a firewall in inet
DROPS = """
add table ip filter
add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }
add table ip6 filter
add chain ip6 filter FORWARD { type filter hook forward priority 0; policy drop; }
add table inet site
add chain inet site forward { type filter hook forward priority 10; policy accept; }
add rule inet site forward counter drop
"""


COUNT = """
add table netdev count
add chain netdev count arriving { type filter hook ingress device c2 priority 0; }
add rule netdev count arriving ip protocol udp counter
"""


@pytest.fixture
def filtered(n1: Host, n2: Host, pair: Pair) -> Iterator[Pair]:
    """Both nodes have such rules, and br_netfilter is on there."""
    for host in (n1, n2):
        host.run("nft", "-f", "-", data=DROPS)
        _switch(host, "1")
    yield pair
    for host in (n1, n2):
        _switch(host, "0")


def _switch(host: Host, value: str) -> None:
    with inside(host.namespace):
        for name in ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables"):
            (SYSCTLS / name).write_text(value)


def _udp4(sender: Guest, to: Guest) -> bytes:
    """RFC 791, 768: a packet to the discard port; the checksum of UDP is optional."""
    udp = struct.pack("!HHHH", 40000, 9, 8 + len(PAYLOAD), 0) + PAYLOAD
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0) + sender.ipv4 + to.ipv4
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    return head[:10] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + head[12:] + udp


def _udp6(sender: Guest, to: Guest) -> bytes:
    """RFC 8200; no host checks this next header (RFC 3692: for experiments)."""
    return struct.pack("!IHBB", 6 << 28, len(PAYLOAD), 253, 64) + sender.ipv6 + to.ipv6 + PAYLOAD


def _arrives(pair: Pair, seconds: float = 30.0) -> list[bool]:
    """Whether an IPv4 and an IPv6 packet arrive at the other node."""
    found = []
    for kind, packet in ((0x0800, _udp4), (0x86DD, _udp6)):
        pair.one.send(pair.two.mac, kind, packet(pair.one, pair.two))
        found.append(bool(pair.two.heard(ours, seconds)))
    return found


def test_chains_of_others_do_not_cut_a_job_network(filtered: Pair, n1: Host, n2: Host) -> None:
    assert _arrives(filtered, QUIET_S) == [False, False], (
        "br_netfilter has no effect here, so this proves nothing"
    )
    for host in (n1, n2):
        with inside(host.namespace):
            assert len(forwarding.lacking()) == 3
            forwarding.accept()
            assert forwarding.lacking() == ()
    assert _arrives(filtered) == [True, True]
    before = n1.run("nft", "list", "ruleset").count(forwarding.COMMENT)
    with inside(n1.namespace):
        forwarding.accept()
    assert n1.run("nft", "list", "ruleset").count(forwarding.COMMENT) == before == 3


def test_the_rule_accepts_nothing_else(n1: Host) -> None:
    """Frames of containers, on another bridge of the node, and what the node routes."""
    sock = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('198.51.100.2', 9))"
    for name in ("c1", "c2"):
        n1.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p")
    n1.run("ip", "link", "add", "docker0", "type", "bridge")
    try:
        n1.run("sysctl", "-qw", *(f"net.ipv6.conf.{name}.disable_ipv6=1" for name in ("c1", "c2", "docker0")))
        for name in ("c1p", "c2p"):
            n1.run("ip", "link", "set", name, "master", "docker0", "up")
        for name in ("c1", "c2", "docker0"):
            n1.run("ip", "link", "set", name, "up")
        n1.run("ip", "address", "add", "198.51.100.1/24", "dev", "c1")
        n1.run("ip", "neighbour", "add", "198.51.100.2", "lladdr", "02:00:00:00:00:02", "dev", "c1")
        n1.run("nft", "-f", "-", data=COUNT)

        def arrives() -> bool:
            n1.run("python3", "-c", sock)
            return _received(n1) > 0

        wait_for(arrives, "the bridge forwards nothing, so this proves nothing")
        n1.run("nft", "-f", "-", data=DROPS)
        _switch(n1, "1")
        with inside(n1.namespace):
            forwarding.accept()
        before = _received(n1)
        for _ in range(5):
            n1.run("python3", "-c", sock)
        assert _received(n1) == before
    finally:
        _switch(n1, "0")
        for name in ("c1", "c2", "docker0"):
            n1.run("ip", "link", "del", name)


def _received(host: Host) -> int:
    """UDP packets that have arrived at c2."""
    shown = host.run("nft", "list", "chain", "netdev", "count", "arriving")
    return int(shown.partition("packets ")[2].split()[0])


def test_doctor_names_the_chain_that_drops(n1: Host) -> None:
    with inside(n1.namespace):
        assert job_network.bridge_netfilter(accepts=False).level is Level.OK
    _switch(n1, "1")
    try:
        with inside(n1.namespace):
            found = job_network.bridge_netfilter(accepts=False)
            assert (found.level, "no chain of others" in found.what) == (Level.OK, True)
            n1.run("nft", "-f", "-", data=DROPS)
            found = job_network.bridge_netfilter(accepts=False)
            assert found.level is Level.WARN
            assert found.what.endswith("ip filter FORWARD, ip6 filter FORWARD, inet site forward")
            assert 'iifname "vhpcb*" oifname "vhpcb*"' in found.hint
            assert job_network.bridge_netfilter(accepts=True).level is Level.OK
            forwarding.accept()
            assert job_network.bridge_netfilter(accepts=False).level is Level.OK
    finally:
        _switch(n1, "0")


def test_without_br_netfilter_chains_of_others_stay(n1: Host) -> None:
    _switch(n1, "0")
    n1.run("nft", "-f", "-", data=DROPS)
    before = n1.run("nft", "list", "ruleset")
    with inside(n1.namespace):
        forwarding.accept()
    assert n1.run("nft", "list", "ruleset") == before
