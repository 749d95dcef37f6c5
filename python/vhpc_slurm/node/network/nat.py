# SPDX-License-Identifier: Apache-2.0
"""What guests with nat may reach: passt's command, and the packet filter for its packets.

passt cannot filter by destination, so nftables does. The filter recognizes passt's
packets by the group of the process that made their socket (``meta skgid``): passt runs
with the job user's uid and with a gid of its own, the number of its guest's QEMU uid.
No other process can have this gid: no group has it, the user cannot change to it, and
neither can passt, which has no capabilities. So it does not matter what else the user
runs on the node, or what a guest makes of its passt.

The kernel loses the group when a socket is closed; what it sends then belongs to a
connection whose first packet has passed the filter.

IPv4 only: packets of other protocols are dropped.

Sources: nft(8), passt(1), net/netfilter/nft_meta.c (nft_meta_get_eval_skugid).
"""
# Decision: The packet filter recognizes passt by its gid

from __future__ import annotations

import grp
import logging
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, collapse_addresses
from pathlib import Path

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, Lease, NatInterface
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, owned, tools
from vhpc_slurm.record import Record

log = logging.getLogger("vhpc")
MAC, GATEWAY_MAC = "02:76:68:70:63:02", "02:76:68:70:63:01"
MTU = 65520
"""passt forwards the payload of frames, so the MTU of networks outside does not matter."""
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""The second has the servers behind systemd-resolved, whose own address is the node's loopback."""
MAX_DNS = 3
"""Name servers that glibc uses (resolv.conf(5))."""
TABLE = "vhpcnat_"
_TABLE = re.compile(rf"{TABLE}(?P<generation>.+)_g(?P<index>[0-9]{{1,2}})\Z", re.ASCII)


class Rules(Record, frozen=True):
    """IPv4 networks and addresses, as text: DNS servers, exceptions from ``deny``, and what is dropped.

    ``port`` is the UDP port of segments, to which no guest may send.
    """

    dns: tuple[str, ...]
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    port: int


def interface(config: Network) -> NatInterface:
    """The interface of each guest on this node; all have the same addresses."""
    inner = IPv4Network(config.nat_ipv4)
    return NatInterface(MAC, f"{inner[2]}/{inner.prefixlen}", str(inner[1]), MTU, resolvers(config))


def command(config: Network, found: NatInterface, path: Path) -> list[str]:
    """passt's command line; it ends when QEMU closes the connection.

    It answers no DHCP, DNS or NDP (the agent configures the guest), maps no address to the
    node's loopback, and listens on no port.
    """
    address, _, bits = found.ipv4.partition("/")
    return [
        config.passt,
        *("--foreground", "--quiet", "--one-off"),
        *("--vhost-user", "--socket", str(path)),
        *("--ipv4-only", "--address", address, "--netmask", bits, "--gateway", found.gateway),
        *("--mac-addr", GATEWAY_MAC, "--mtu", str(found.mtu)),
        *("--no-dhcp", "--no-dhcpv6", "--no-ndp", "--no-ra", "--no-map-gw"),
        *("--no-dhcp-dns", "--no-dhcp-search", "--tcp-ports", "none", "--udp-ports", "none"),
    ]


def rules(config: Config, lease: Lease, dns: tuple[str, ...]) -> Rules:
    """What the guests of a job may reach from this node, with these DNS servers.

    Raises:
        NodeError: this node's networks or vhpcd's address cannot be found out.
    """
    network = config.network
    nodes = () if lease.segment is None else lease.segment.underlay
    denied = [*network.nat_deny, *_on_link(), *nodes, *_controllers(config.controller.hosts)]
    return Rules(dns, network.nat_allow, _merged(denied), network.port)


def _merged(networks: Iterable[str]) -> tuple[str, ...]:
    """Without overlaps, which a set of nftables does not take; addresses of IPv6 are left out."""
    found = (IPv4Network(text) for text in networks if ":" not in text)
    return tuple(str(one) for one in collapse_addresses(found))


def _on_link() -> list[str]:
    """Networks that this node is directly connected to: destinations of routes without a gateway."""
    routes = tools.query("ip", "-4", "route", "show", "table", "all")
    return [
        str(one["dst"])
        for one in routes
        if one.get("type", "unicast") == "unicast"
        and one.get("dst", "default") != "default"
        and not {"gateway", "via", "nexthops"} & one.keys()
    ]


def _controllers(hosts: Iterable[str]) -> list[str]:
    return [address for host in hosts for address in _controller(host)]


def _controller(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror as err:
        if err.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)) and _has_ipv6(host):
            return []
        raise NodeError(
            f"cannot resolve {host}, the host of vhpcd, which guests with nat must not reach",
            str(err),
            "see controller.host and controller.backup_hosts in vhpc.toml(5)",
        ) from err
    return [str(address[0]) for *_, address in found]


def _has_ipv6(host: str) -> bool:
    with suppress(socket.gaierror):
        return bool(socket.getaddrinfo(host, None, family=socket.AF_INET6))
    return False


def resolvers(config: Network, files: Sequence[Path] = RESOLV_CONF) -> tuple[str, ...]:
    """Addresses of the guests' DNS servers; empty if the node has no server that guests can reach."""
    if config.nat_dns:
        return config.nat_dns[:MAX_DNS]
    for path in files:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        words = (line.split() for line in text.splitlines())
        named = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
        if found := [address for address in named if _is_reachable(address)]:
            return tuple(dict.fromkeys(found))[:MAX_DNS]
    log.warning(
        "guests with nat have no DNS: this node's resolv.conf names no IPv4 address, or only loopback"
    )
    return ()


def _is_reachable(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def check_gid(gid: int) -> None:
    """NodeError when a group has the gid that only passt may have."""
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return
    raise NodeError(
        f"gid {gid} is that of group {group.gr_name}",
        "vhpc uses the numbers of its uids also as gids, by which the packet filter recognizes passt",
        "change guests.uid_base, so that no group has a number of the range",
    )


# --- the packet filter ---------------------------------------------------------------------------


def table_name(generation: Generation, index: int) -> str:
    """Name of a guest's table."""
    return f"{TABLE}{generation}_g{index}"


def render(table: str, gid: int, what: Rules, *, copy: bool = False) -> str:
    """Commands for ``nft -f``: a guest's table, in place of one that may be there.  Pure.

    ``copy``: the commands for the table that ``flush ruleset`` leaves in place (``owned``).

    Frames of segments and the loopback are dropped whatever the site allows. What it allows
    comes next. A packet to an address of the node itself is then dropped, whatever the
    address is (``fib``).
    """
    lines = ["    ip daddr 127.0.0.0/8 counter drop", f"    udp dport {what.port} counter drop"]
    if what.dns:
        servers = ", ".join(sorted(set(what.dns)))
        lines.append(f"    ip daddr {{ {servers} }} meta l4proto {{ tcp, udp }} th dport 53 accept")
    if what.allow:
        lines.append(f"    ip daddr {{ {', '.join(_merged(what.allow))} }} accept")
    lines.append("    fib daddr type != unicast counter drop")
    lines.append('    oifname "lo" counter drop')
    if what.deny:
        lines.append(f"    ip daddr {{ {', '.join(_merged(what.deny))} }} counter drop")
    body = "\n".join(lines)
    before, name, flag = remove_command(table), table, ""
    if copy:
        before, name, flag = "", owned.name_of(table), owned.FLAG
    return f"""\
{before}
table inet {name} {{ {flag}
  chain output {{
    type filter hook output priority -300; policy accept;
    meta skgid {gid} goto guest
  }}
  chain guest {{
    meta nfproto != ipv4 counter drop
{body}
  }}
}}
"""


def remove_command(table: str) -> str:
    """Commands that remove a table, whether it is there or not."""
    return f"add table inet {table}\ndelete table inet {table}"


def protect(generation: Generation, index: int, gid: int, what: Rules) -> None:
    """Make a guest's table, before its passt is started.

    Raises:
        NodeError: there is no nftables, or it refuses.
    """
    if not firewall.available():
        raise NodeError(
            "nat needs nftables",
            "without it guests could reach this node's services and the site's own networks",
            "apt install nftables",
        )
    tools.run("nft", "-f", "-", data=render(table_name(generation, index), gid, what))


def hold(generation: Generation, index: int, gid: int, what: Rules) -> process.ProcessRef:
    """Make the copy of a guest's table that ``flush ruleset`` leaves in place; the process that has it.

    Raises:
        NodeError: nftables refuses.
    """
    table = table_name(generation, index)
    return owned.hold(generation, table, ("inet",), render(table, gid, what, copy=True))


def release(generation: Generation, index: int) -> None:
    """Remove a guest's table and its copy; one that is absent is no error.

    Raises:
        NodeError: it cannot be removed.
        TeardownError: the process that has the copy does not end.
    """
    if firewall.available():
        owned.end(generation, table_name(generation, index))
        tools.run("nft", "-f", "-", data=remove_command(table_name(generation, index)) + "\n")


def tables() -> set[tuple[Generation, int]]:
    """Guests that have a table in the kernel: generation and index.

    Raises:
        NodeError: nftables cannot be asked.
    """
    found = set()
    for _, name in tools.tables():
        if match := _TABLE.match(name):
            with suppress(ValueError):
                found.add((Generation.parse(match["generation"]), int(match["index"])))
    return found
