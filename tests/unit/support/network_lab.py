# SPDX-License-Identifier: Apache-2.0
"""Nodes for tests of job networks: real network namespaces on one switch, and guests that are taps."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from controller_lab import allocation, identity, request, wait_for

from pace import limit
from vhpc_slurm.model import (
    Generation,
    GuestInterface,
    GuestPaths,
    Lease,
    LeaseState,
    NodePlan,
    RunningGuest,
    RunningNode,
    Segment,
    guest_hostname,
)
from vhpc_slurm.node.finding import NodeFinding
from vhpc_slurm.node.network import firewall, plan, segment, tools
from vhpc_slurm.node.network.plan import addresses, mac
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.layout import Layout

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_MULTI_QUEUE = 0x400454CA, 0x0002, 0x1000, 0x0100
PORT = 7634
ARP, IPV6, TEST = 0x0806, 0x86DD, 0x88B5
"""EtherTypes; the last is IEEE's for local experiments."""
ALL = b"\xff" * 6
VNI = 5000
PAYLOAD = b"a frame of the test" + b"." * 40
QUIET_S = 0.4
_libc = ctypes.CDLL(None, use_errno=True)


def usable() -> str:
    """Why these tests cannot run here; empty when they can."""
    if os.geteuid() != 0:
        return "makes network namespaces: run as root"
    if absent := [name for name in ("ip", "bridge", "nft") if shutil.which(name) is None]:
        return f"needs {' '.join(absent)}: apt install iproute2 nftables"
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def network_findings(layout: Layout) -> list[NodeFinding]:
    """Findings about the networks of guests on this node."""
    return [found for network in registry.NETWORKS for found in network.orphans(layout)]


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, is in a network namespace."""
    with Path("/proc/thread-self/ns/net").open() as before, Path(f"/run/netns/{namespace}").open() as there:
        assert _libc.setns(there.fileno(), CLONE_NEWNET) == 0
        try:
            yield
        finally:
            assert _libc.setns(before.fileno(), CLONE_NEWNET) == 0


class Host:
    """A network namespace with one interface on the switch."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.namespace, self.address = name, f"vhpct{os.getpid()}{name}", address
        ip("netns", "add", self.namespace)
        with inside(self.namespace):
            ip("link", "set", "lo", "up")

    def plug(self, switch: Host) -> None:
        ip(
            *("-n", self.namespace, "link", "add", "under0", "type", "veth", "peer", "name", self.name),
            *("netns", switch.namespace),
        )
        with inside(self.namespace):
            ip("address", "add", f"{self.address}/24", "dev", "under0")
            ip("-6", "address", "add", f"{self.ipv6}/64", "dev", "under0", "nodad")
            ip("link", "set", "under0", "up")
        with inside(switch.namespace):
            ip("link", "set", self.name, "master", "switch", "up")

    @property
    def ipv6(self) -> str:
        """Of the underlay, with the same last number."""
        return f"2001:db8::{self.address.rpartition('.')[2]}"

    def run(self, *argv: str, data: str = "") -> str:
        with inside(self.namespace):
            done = subprocess.run(argv, input=data, check=True, capture_output=True, text=True)
        return done.stdout

    def send(self, frame: bytes, vni: int, to: str, *, uid: int = 0, port: int = PORT) -> None:
        """Send a frame as VXLAN from an ordinary socket of a user of this host."""
        family = socket.AF_INET6 if ":" in to else socket.AF_INET
        child = os.fork()
        if child == 0:
            try:
                with inside(self.namespace):
                    os.setgroups([])
                    os.setresuid(uid, uid, uid)
                    with socket.socket(family, socket.SOCK_DGRAM) as sock:
                        try:
                            sock.sendto(vxlan(frame, vni), (to, port))
                        except PermissionError:
                            os._exit(1)  # what a filter of outgoing packets makes of it
                        os._exit(0)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] in (0, 1 << 8)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)


class Cluster:
    """A switch, two nodes, and a third host that is in no job."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        try:
            self.switch = switch = self._add("sw", "")
            with inside(switch.namespace):
                ip("link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
                ip("link", "set", "switch", "up")
            self.nodes = {
                name: self._add(name, f"192.0.2.{number}") for number, name in ((1, "n1"), (2, "n2"))
            }
            self.third = self._add("h3", "192.0.2.3")
            for host in (*self.nodes.values(), self.third):
                host.plug(switch)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, address: str) -> Host:
        host = Host(name, address)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def lease_of(
    job_id: int,
    vni: int,
    *nodes: str,
    each: int = 1,
    mtu: int = 0,
    version: int = 4,
    tunnel_port: int = 0,
    flood: bool = False,
) -> Lease:
    """A lease whose nodes n1, n2 … have the addresses of the cluster's."""
    prefix = "192.0.2." if version == 4 else "2001:db8::"
    underlay = tuple(prefix + node.removeprefix("n") for node in nodes)
    return Lease(
        Generation(job_id, 0, f"{job_id:08x}"),
        LeaseState.READY,
        request(job_id, guests_per_node=each, network="job"),
        allocation(*nodes),
        identity(),
        segment=Segment(vni, "10.200.0.0/16", "fd76:6870:6300::/64", PORT, mtu, underlay, tunnel_port, flood),
    )


def plan_of(lease: Lease, node: str, vcpus: int = 2) -> NodePlan:
    """The part of a node's plan that the network needs."""
    guests = []
    for index in range(lease.request.guests_per_node):
        found = plan.interface(lease, node, index, vcpus)
        assert found is not None
        hostname = guest_hostname(node, index, lease.request.guests_per_node)
        guests.append(_Guest(index, hostname, found))
    return NodePlan(
        generation=lease.generation,
        node=node,
        guests=tuple(guests),  # type: ignore[arg-type]
        job_memory_mib=0,
        reserve_mib=0,
        segment=plan.node_segment(lease, node),
    )


def running_of(lease: Lease, node: str) -> RunningNode:
    """The same guests, running."""
    found = plan_of(lease, node)
    return RunningNode(found, tuple(RunningGuest(guest, 0, mtu=mtu_of(lease)) for guest in found.guests))


def mtu_of(lease: Lease) -> int:
    assert lease.segment is not None
    return lease.segment.mtu or 1450


@dataclass(frozen=True)
class _Guest:
    index: int
    hostname: str
    interface: GuestInterface
    paths: GuestPaths = field(default_factory=GuestPaths)


class Guest:
    """A guest's end of a tap: frames go in and come out."""

    def __init__(self, host: Host, lease: Lease, index: int = 0) -> None:
        assert lease.segment is not None
        nodes = [part.node for part in lease.allocation.nodes]
        rank = nodes.index(host.name) * lease.request.guests_per_node + index
        self.mac = bytes.fromhex(mac(lease.segment.vni, rank).replace(":", ""))
        four, six = addresses(lease.segment, rank)
        self.ipv4, self.ipv6 = IPv4Address(four).packed, IPv6Address(six).packed
        with inside(host.namespace):
            self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            name = plan.tap_name(lease.segment.vni, index).encode()
            flags = IFF_TAP | IFF_NO_PI | IFF_MULTI_QUEUE
            fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH22x", name, flags))
        wait_for(lambda: self._forwards(host, name.decode()), "the port of the bridge does not forward")

    @staticmethod
    def _forwards(host: Host, name: str) -> bool:
        ports = json.loads(host.run("bridge", "-j", "link", "show"))
        return all(port["state"] == "forwarding" for port in ports if port["ifname"] == name)

    def send(self, to: bytes, kind: int, payload: bytes, *, source: bytes = b"") -> None:
        os.write(self.fd, to + (source or self.mac) + kind.to_bytes(2, "big") + payload)

    def heard(self, what: Callable[[bytes], bool], seconds: float = 30.0) -> list[bytes]:
        """Frames that fit, until one does or the time is over."""
        until = time.monotonic() + limit(seconds)
        while select.select([self.fd], [], [], max(0.0, until - time.monotonic()))[0]:
            frame = os.read(self.fd, 65536)
            if what(frame):
                return [frame]
        return []

    def close(self) -> None:
        os.close(self.fd)


def vxlan(frame: bytes, vni: int) -> bytes:
    """RFC 7348, section 5: flags, reserved, VNI, reserved."""
    return b"\x08\x00\x00\x00" + (vni << 8).to_bytes(4, "big") + frame


def arp_request(sender: Guest, target: bytes) -> bytes:
    """RFC 826 for IPv4 over Ethernet."""
    return struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + sender.mac + sender.ipv4 + b"\0" * 6 + target


def neighbour_solicitation(sender: Guest, target: bytes) -> bytes:
    """RFC 4861, section 4.3, in an IPv6 packet to the solicited-node group."""
    group = bytes.fromhex("ff0200000000000000000001ff") + target[-3:]
    body = struct.pack("!BBHI", 135, 0, 0, 0) + target + b"\x01\x01" + sender.mac
    pseudo = sender.ipv6 + group + struct.pack("!II", len(body), 58)
    total = sum(struct.unpack(f"!{len(pseudo + body) // 2}H", pseudo + body))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    body = body[:2] + struct.pack("!H", checksum) + body[4:]
    return struct.pack("!IHBB", 6 << 28, len(body), 58, 255) + sender.ipv6 + group + body


def build(host: Host, lease: Lease, *, trusted: bool = False) -> None:
    with inside(host.namespace):
        segment.build(lease, plan_of(lease, host.name), mtu_of(lease), trusted_underlay=trusted)


@pytest.fixture(name="cluster", scope="module")
def real_cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


@pytest.fixture(name="n1")
def first_node(cluster: Cluster) -> Iterator[Host]:
    yield cluster.nodes["n1"]
    _clear(cluster.nodes["n1"])


@pytest.fixture(name="n2")
def second_node(cluster: Cluster) -> Iterator[Host]:
    yield cluster.nodes["n2"]
    _clear(cluster.nodes["n2"])


def _clear(host: Host) -> None:
    with inside(host.namespace):
        segment.remove([name for name, _ in segment.found()])
        for generation in firewall.tables():  # the copies are not flushed
            firewall.remove(generation)
        tools.run("nft", "flush", "ruleset")


class Pair:
    """Two guests of one job on two nodes."""

    def __init__(
        self, n1: Host, n2: Host, job_id: int = 1, vni: int = VNI, version: int = 4, *, flood: bool = False
    ) -> None:
        self.lease = lease_of(job_id, vni, "n1", "n2", version=version, flood=flood)
        for host in (n1, n2):
            build(host, self.lease)
        self.one, self.two = Guest(n1, self.lease), Guest(n2, self.lease)
        self.vni = vni


@pytest.fixture(name="pair")
def real_pair(n1: Host, n2: Host) -> Iterator[Pair]:
    found = Pair(n1, n2)
    yield found
    found.one.close()
    found.two.close()


def ours(frame: bytes) -> bool:
    return PAYLOAD in frame


def injected(pair: Pair) -> bytes:
    """A frame for the second guest that looks as if the first had sent it."""
    return pair.two.mac + pair.one.mac + TEST.to_bytes(2, "big") + PAYLOAD
