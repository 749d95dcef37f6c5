# SPDX-License-Identifier: Apache-2.0
"""Encrypted segments for tests: made by the nodes' own code between real network namespaces, and captured."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from network_lab import (
    PAYLOAD,
    QUIET_S,
    TEST,
    VNI,
    Guest,
    Host,
    inside,
    lease_of,
    mtu_of,
    ours,
    plan_of,
    usable,
)

from vhpc_slurm.controller.leases import tunnel_keys
from vhpc_slurm.model import Lease, TunnelKeyPairs
from vhpc_slurm.node.network import firewall, segment, tools

TUNNEL_PORT = 20480
INNER = ("fd76:6870:6377:0:0:1388:0:1", "fd76:6870:6377:0:0:1388:0:2")
"""Addresses of the two nodes inside the tunnels, for VNI 5000 (0x1388)."""
MTU = {4: 1370, 6: 1350}
"""1500, less IP 20 or 40, UDP 8, WireGuard 32, and VXLAN over IPv6 70."""
ALL_PACKETS = 3  # ETH_P_ALL of linux/if_ether.h


def tunnels_usable() -> str:
    """Why these tests cannot run here; empty when they can."""
    if lacks := usable():
        return lacks
    made = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "type", "wireguard"], capture_output=True, check=False
    )
    if made.returncode != 0:
        return "this kernel has no wireguard: `make check-hw` runs these tests in a machine that has"
    return "" if tools.find("wg") else "apt install wireguard-tools"


def encrypted(node: str, pairs: TunnelKeyPairs, version: int = 4, vni: int = VNI) -> Lease:
    """The lease as one of the two nodes gets it."""
    lease = lease_of(1, vni, "n1", "n2", version=version, tunnel_port=TUNNEL_PORT, mtu=MTU[version])
    return replace(lease, tunnel=pairs.of(("n1", "n2").index(node)))


def create(host: Host, pairs: TunnelKeyPairs, version: int = 4, name: str = "") -> Lease:
    """A node's part of the segment, made by the node's own code in the host's namespace."""
    lease = encrypted(name or host.name, pairs, version)
    with inside(host.namespace):
        segment.build(lease, plan_of(lease, name or host.name), mtu_of(lease), trusted_underlay=False)
    return lease


class Encrypted:
    """Two guests of one job on two nodes."""

    def __init__(self, n1: Host, n2: Host, version: int = 4) -> None:
        self.hosts, self.pairs = (n1, n2), tunnel_keys.make(2)
        leases = [create(host, self.pairs, version) for host in self.hosts]
        self.lease = leases[0]
        self.one, self.two = (Guest(host, lease) for host, lease in zip(self.hosts, leases, strict=True))

    def injected(self) -> bytes:
        """A frame for the second guest that looks as if the first had sent it."""
        return self.two.mac + self.one.mac + TEST.to_bytes(2, "big") + PAYLOAD

    def exchange(self, length: int = 0) -> None:
        """Frames pass both ways; the first handshake may take a while in an emulated machine."""
        for source, target in ((self.one, self.two), (self.two, self.one)):
            source.send(target.mac, TEST, PAYLOAD.ljust(length, b"x"))
            (frame,) = target.heard(ours, 20.0)
            assert frame[14:] == PAYLOAD.ljust(length, b"x")

    def close(self) -> None:
        self.one.close()
        self.two.close()


@contextmanager
def capture(host: Host) -> Iterator[list[bytes]]:
    """All frames of a host's underlay interface, sent and received."""
    frames: list[bytes] = []
    with inside(host.namespace):
        # without a protocol it hears nothing until it is bound: with one it would hear other interfaces
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        sock.bind(("under0", ALL_PACKETS))
    with sock:
        yield frames
        time.sleep(QUIET_S)
        sock.setblocking(False)
        try:
            while True:
                frames.append(sock.recv(65536))
        except BlockingIOError:
            pass


def udp_ports(frames: list[bytes]) -> set[tuple[int, int]]:
    """Source and destination port of the UDP datagrams among frames."""
    found = set()
    for frame in frames:
        kind = frame[12:14]
        if kind == b"\x08\x00" and frame[23] == socket.IPPROTO_UDP:
            found.add(struct.unpack_from("!HH", frame, 14 + (frame[14] & 15) * 4))
        elif kind == b"\x86\xdd" and frame[20] == socket.IPPROTO_UDP:
            found.add(struct.unpack_from("!HH", frame, 54))
    return {(int(source), int(target)) for source, target in found}


def left(host: Host) -> list[str]:
    """All interfaces and tables of segments, and whatever else is of WireGuard."""
    with inside(host.namespace):
        tables = [str(generation) for generation in firewall.tables()]
        return [name for name, _ in segment.found()] + tables + host.run("wg", "show", "interfaces").split()
