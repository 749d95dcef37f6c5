# SPDX-License-Identifier: Apache-2.0
"""The packet filter of a job's segment on one node: nftables, one table of each family for a generation.

VXLAN has no authentication, and Linux receives it on all addresses of a host. So a
frame of this VNI is taken only from the underlay addresses of the generation's other
nodes (``inet`` input), only the kernel and root send to the port (``inet`` output: an
ordinary user's packet would have this node's address), and nothing that the node
forwards goes to the port (a container's packet would have this node's address too).
The VNI is at bits 32 to 55 of the VXLAN header, after 64 bits of UDP. Fragments cannot
hide it: IPv4 is reassembled before this hook, and IPv6 fragments are dropped.

An encrypted segment (``Tunnel``) has stricter rules: its frames are taken from the
WireGuard interface only and sent to it only, and nothing else passes this interface, so
that programs of the nodes cannot use it, and no frame leaves unencrypted.

The ``bridge`` table keeps the node itself off the segment: Linux answers on every
interface for all addresses of a host.

A third table, ``inet vhpc-port``, is the node's own and stays until the node is rebooted;
the ports that it protects are remembered in a folder, so that it can be made again.
A node that leaves a job (Slurm can take nodes from a running job) removes the tables of the
generation, while the other nodes accept its address until they have learnt that it left.

Sources: nft(8); RFC 7348, section 5; net/ipv4/ip_input.c (ip_local_deliver).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from ipaddress import ip_address
from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, NodeSegment, Tunnel
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import owned, tools
from vhpc_slurm.node.network.plan import PREFIX

TABLE = "vhpc_"
FAMILIES = ("inet", "bridge")
GUARD = "vhpc-port"
"""The node's own table; it is never removed."""


def table_name(generation: Generation) -> str:
    """Name of a generation's tables."""
    return f"{TABLE}{generation}"


def generation_of(table: str) -> Generation | None:
    """The generation whose table this is by its name."""
    try:
        return Generation.parse(table.removeprefix(TABLE)) if table.startswith(TABLE) else None
    except ValueError:
        return None


def render(generation: Generation, segment: NodeSegment, peers: Sequence[str], *, copy: bool = False) -> str:
    """Commands for ``nft -f``: the generation's tables, in place of those that may be there.  Pure.

    ``copy``: the commands for the tables that ``flush ruleset`` leaves in place (``owned``).
    """
    tunnel = segment.tunnel
    version = 6 if tunnel else ip_address(segment.local).version
    family, other, kind = ("ip", "ipv6", "ipv4_addr") if version == 4 else ("ip6", "ipv4", "ipv6_addr")
    name, frame = table_name(generation), f"udp dport {segment.port} @th,96,24 {segment.vni}"
    before, flag = remove_commands(generation), ""
    if copy:
        name, before, flag = owned.name_of(name), "", owned.FLAG
    arriving = f"""\
    {frame} meta nfproto {other} counter drop
    {frame} {family} saddr != @nodes counter drop"""
    leaving = forwarded = ""
    if tunnel:
        arriving, leaving, forwarded = _tunnelled(tunnel, frame)
    elements = f" elements = {{ {', '.join(sorted(set(peers)))} }};" if peers else ""
    return f"""\
{before}
table inet {name} {{ {flag}
  set nodes {{ type {kind};{elements} }}
  chain input {{
    type filter hook input priority -300; policy accept;
    udp dport {segment.port} exthdr frag exists counter drop
{arriving}
  }}
  chain output {{
    type filter hook output priority -300; policy accept;
    udp dport {segment.port} meta skuid != 0 counter drop{leaving}
  }}
  chain forward {{
    type filter hook forward priority -300; policy accept;
    iifname != "{PREFIX}b*" udp dport {segment.port} counter drop{forwarded}
  }}
}}
table bridge {name} {{ {flag}
  chain input {{
    type filter hook input priority -300; policy accept;
    iifname {{ "{segment.vxlan}", "{PREFIX}{segment.vni}g*" }} counter drop
  }}
  chain output {{
    type filter hook output priority -300; policy accept;
    oifname {{ "{segment.vxlan}", "{PREFIX}{segment.vni}g*" }} counter drop
  }}
}}
"""


def _tunnelled(tunnel: Tunnel, frame: str) -> tuple[str, str, str]:
    """Rules of the chains input, output and forward for an encrypted segment."""
    name = f'"{tunnel.name}"'
    arriving = f"""\
    iifname {name} meta nfproto ipv6 {frame} ip6 saddr @nodes accept
    iifname {name} counter drop
    {frame} counter drop"""
    leaving = f"""
    {frame} oifname != {name} counter drop
    oifname {name} {frame} accept
    oifname {name} counter drop"""
    forwarded = f"""
    iifname {name} counter drop
    oifname {name} counter drop"""
    return arriving, leaving, forwarded


def render_guard(ports: Collection[int]) -> str:
    """Commands for ``nft -f``: only the kernel and root send to these ports from now on, and to earlier ones.

    Pure.  The node's own table may be there already: its rules are replaced, its ports stay.
    """
    return f"""\
add table inet {GUARD}
add set inet {GUARD} ports {{ type inet_service; }}
add element inet {GUARD} ports {{ {", ".join(map(str, sorted(ports)))} }}
add chain inet {GUARD} output {{ type filter hook output priority -300; policy accept; }}
add chain inet {GUARD} forward {{ type filter hook forward priority -300; policy accept; }}
flush chain inet {GUARD} output
flush chain inet {GUARD} forward
add rule inet {GUARD} output udp dport @ports meta skuid != 0 counter drop
add rule inet {GUARD} forward iifname != "{PREFIX}b*" udp dport @ports counter drop
"""


def remove_commands(generation: Generation) -> str:
    """Commands that remove the tables, whether they are there or not (``add`` makes what is absent)."""
    name = table_name(generation)
    return "\n".join(f"add table {family} {name}\ndelete table {family} {name}" for family in FAMILIES)


def available() -> bool:
    """Whether this node has nftables at all; an ``nft`` that fails is an error, not an absence."""
    return tools.find("nft") is not None


def apply(generation: Generation, segment: NodeSegment, peers: Sequence[str]) -> None:
    """Make the tables, all or none; NodeError when nftables refuses."""
    text = render_guard([segment.port]) + render(generation, segment, peers)
    tools.run("nft", "-f", "-", data=text)


def remember(folder: Path, port: int) -> None:
    """Keep a port for ``remembered``; call it before the node sends to this port.

    Raises:
        NodeError: the file cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / str(port)).touch(mode=0o600)
    except OSError as err:
        raise NodeError(f"cannot make a file in {folder}", str(err)) from err


def remembered(folder: Path) -> frozenset[int]:
    """The ports that the node's own table must protect until the next reboot."""
    try:
        return frozenset(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return frozenset()


def guards(ports: Collection[int]) -> bool:
    """Whether the node's own table is there, with both rules and these ports.

    Raises:
        NodeError: nftables cannot be asked.
    """
    if ("inet", GUARD) not in tools.tables():
        return False
    text = tools.run("nft", "list", "table", "inet", GUARD)
    elements = re.search(r"elements = {([^}]*)}", text)
    there = {int(word) for word in re.findall(r"[0-9]+", elements[1])} if elements else set()
    rules = [line for line in text.splitlines() if "@ports" in line and "drop" in line]
    return len(rules) == 2 and there >= set(ports)


def guard(ports: Collection[int]) -> None:
    """Make the node's own table, or what it lacks; NodeError when nftables refuses."""
    tools.run("nft", "-f", "-", data=render_guard(ports))


def hold(generation: Generation, segment: NodeSegment, peers: Sequence[str]) -> process.ProcessRef:
    """Make the copies of the tables that ``flush ruleset`` leaves in place; the process that has them.

    Raises:
        NodeError: nftables refuses.
    """
    with holding(generation, segment, peers) as ref:
        return ref


def replace(generation: Generation, segment: NodeSegment, peers: Sequence[str]) -> process.ProcessRef:
    """Make the tables and their copies, also in place of others; the process that has the copies.

    Raises:
        NodeError: nftables refuses.
    """
    apply(generation, segment, peers)
    return hold(generation, segment, peers)


def holding(
    generation: Generation, segment: NodeSegment, peers: Sequence[str]
) -> AbstractContextManager[process.ProcessRef]:
    """As ``hold``, while the caller makes the devices: the copies are there when the block ends."""
    commands = render(generation, segment, peers, copy=True)
    return owned.holding(generation, table_name(generation), FAMILIES, commands)


def remove(generation: Generation) -> None:
    """Remove the tables and their copies; one that is absent is no error.

    Raises:
        NodeError: they cannot be removed.
        TeardownError: the process that has the copies does not end.
    """
    if available():
        owned.end(generation, table_name(generation))
        tools.run("nft", "-f", "-", data=remove_commands(generation) + "\n")


def tables() -> dict[Generation, frozenset[str]]:
    """Generations that have tables in the kernel, with the families.

    Raises:
        NodeError: nftables cannot be asked.
    """
    found: dict[Generation, frozenset[str]] = {}
    for family, name in tools.tables():
        generation = generation_of(name)
        if generation is not None:
            found[generation] = found.get(generation, frozenset()) | {family}
    return found
