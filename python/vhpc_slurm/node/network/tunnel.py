# SPDX-License-Identifier: Apache-2.0
"""The WireGuard interface of an encrypted segment on one node.

Each node has a key pair of this generation, made by vhpcd, and knows the public keys of
the others. WireGuard takes a packet only if it was encrypted with a peer's key and has
that peer's address inside the tunnels (``allowed-ips``), so the source address of a
VXLAN frame is authenticated. The private key goes to wg(8) by its standard input, is
then in the kernel only, and is gone with the interface.

No keepalive is sent: two nodes whose guests do not talk exchange nothing.

Sources: wg(8); Donenfeld, WireGuard, NDSS 2017.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Generation, Lease, Tunnel, TunnelKeys
from vhpc_slurm.node.network import plan, tools, udp_port
from vhpc_slurm.record import Record

OVERHEAD = {version: bytes_ + plan.OVERHEAD[6] for version, bytes_ in plan.TUNNEL_OVERHEAD.items()}
"""Bytes that WireGuard and VXLAN over IPv6 in it add together, by IP version of the underlay."""
_KEY = re.compile(r"[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=\Z", re.ASCII)
"""32 bytes in base64."""


class Peer(Record, frozen=True):
    """Another node: its public key, the underlay address it listens on, its address inside the tunnels."""

    public_key: str
    endpoint: str
    address: str


def keys(lease: Lease) -> TunnelKeys:
    """The keys that vhpcd sent to this node.

    Raises:
        FabricError: there are none, or they are not valid; the message has none of them.
    """
    found = lease.tunnel
    if (
        found is None
        or len(found.public_keys) != len(lease.segment_nodes)
        or not all(_KEY.match(key) for key in (found.private_key, *found.public_keys))
    ):
        raise FabricError(
            f"vhpcd has sent no valid keys for the encrypted network of {lease.generation}",
            "the node does not create the network without encryption",
            "install one version of vhpc on all hosts",
        )
    return found


def peers(lease: Lease, node: str) -> tuple[Peer, ...]:
    """The job's other nodes; errors as ``keys``."""
    segment = lease.segment
    assert segment is not None
    found = zip(
        lease.segment_nodes, keys(lease).public_keys, segment.underlay, plan.transport(lease), strict=True
    )
    return tuple(Peer(*rest) for name, *rest in found if name != node)


def render(tunnel: Tunnel, found: TunnelKeys, around: Sequence[Peer]) -> str:
    """The configuration for ``wg setconf``; secret.  Pure."""
    lines = ["[Interface]", f"PrivateKey = {found.private_key}", f"ListenPort = {tunnel.port}"]
    for one in around:
        host = f"[{one.endpoint}]" if ":" in one.endpoint else one.endpoint
        lines += ["[Peer]", f"PublicKey = {one.public_key}", f"Endpoint = {host}:{tunnel.port}"]
        lines += [f"AllowedIPs = {one.address}/128"]
    return "\n".join(lines) + "\n"


def make(
    generation: Generation, tunnel: Tunnel, found: TunnelKeys, around: Sequence[Peer], guest_mtu: int
) -> None:
    """Make the interface, with its keys, its address and a route to the peers; it is up then.

    The firewall is there already: a packet of any program could use the interface otherwise.

    Raises:
        NodeError: the kernel has no WireGuard, or wg(8) is not installed.
        FabricError: another program has the port.
    """
    name, mtu = tunnel.name, guest_mtu + plan.OVERHEAD[6]
    label = ("alias", str(generation), "addrgenmode", "none", "mtu", str(mtu))
    tools.batch(
        "ip", [("link", "add", "name", name, "type", "wireguard"), ("link", "set", "dev", name, *label)]
    )
    sysctls = {"disable_ipv6": "0", "accept_ra": "0", "forwarding": "0"}
    tools.set_sysctls({f"ipv6/conf/{name}/{key}": value for key, value in sysctls.items()})
    tools.run("wg", "setconf", name, "/dev/stdin", data=render(tunnel, found, around))
    address = f"{tunnel.address}/{plan.TUNNEL_BITS}"
    with udp_port.opening(tunnel.port):
        tools.batch(
            "ip",
            [
                ("address", "add", address, "dev", name, "nodad"),
                ("link", "set", "dev", name, "up"),
            ],
        )
