# SPDX-License-Identifier: Apache-2.0
"""Guests on a bridge of the site: their addresses, their taps, and the packet filter of each tap.

The site makes the bridge, and gives each node names with addresses for its guests. A guest
has the address of a slot of its node, and a MAC address that follows from it: ``0a:76`` and
the four bytes of the IPv4 address. Its tap is ``locked``, so the bridge drops frames with
another source MAC. The filter drops what has another IPv4 address, is neither IPv4 nor ARP,
has a VLAN tag or comes from a DHCP server, and all between guests and the node itself.

vhpc changes nothing of the bridge. A tap has a high MAC address, since a bridge may take
the lowest one of its ports (net/bridge/br_stp_if.c).

Sources: bridge(8), nft(8), br_input.c (BR_PORT_LOCKED), br_forward.c (BR_ISOLATED).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import IPv4Address

from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import FabricError, NodeError, TeardownError
from vhpc_slurm.model import Generation, SiteInterface, SitePort
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, nat, owned, tools

TABLE = "vhpcsite_"
FAMILIES = ("bridge",)
MAX_QUEUES = 8
_TAP = re.compile(r"vhpcs([0-9]{1,4})\Z", re.ASCII)
_TABLE = re.compile(rf"{TABLE}(?P<generation>.+)_g(?P<index>[0-9]{{1,2}})\Z", re.ASCII)


def interface(config: Network, vcpus: int) -> SiteInterface:
    """The interface of a guest; its port is made when the guest has a slot."""
    servers = config.site_dns[: nat.MAX_DNS]
    return SiteInterface(config.site_bridge, min(vcpus, MAX_QUEUES), config.site_gateway, servers)


def tap_name(slot: int) -> str:
    """Name of the tap of a slot."""
    return f"vhpcs{slot}"


def free_slot(config: Network, used: Collection[int]) -> int:
    """The lowest slot that no guest of this node has.

    Raises:
        FabricError: all are in use; the job is requeued, since guests of other jobs have them.
    """
    for slot in range(config.site_guests):
        if slot not in used:
            return slot
    raise FabricError(
        "no address on the site's network is free for a guest of this node",
        f"all {config.site_guests} are in use",
        "see network.site_guests in vhpc.toml(5)",
    )


def address(config: Network, node: str, slot: int) -> str:
    """The IPv4 address of a slot, by the name that the site has for it.

    Raises:
        NodeError: the name has no address, or none of the site's network.
    """
    name = config.site_name.replace("{node}", node).replace("{slot}", str(slot))
    hint = "see network.site_name in vhpc.toml(5)"
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as err:
        raise NodeError(
            f"{name}, the name of a guest's address, has no IPv4 address", str(err), hint
        ) from err
    network = config.site_network
    value = IPv4Address(str(found[0][4][0]))
    if value not in network or value in (network[0], network[-1], IPv4Address(config.site_gateway)):
        raise NodeError(f"{name} has the address {value}", f"it is not one of a guest in {network}", hint)
    return str(value)


def mac(ipv4: str) -> str:
    """MAC address of the guest with an IPv4 address (locally administered)."""
    return (b"\x0a\x76" + IPv4Address(ipv4).packed).hex(":")


def bridge_mtu(bridge: str) -> int:
    """MTU of the site's bridge.

    Raises:
        NodeError: this node does not have it, or it is down.
    """
    for one in tools.query("ip", "link", "show", "type", "bridge"):
        if one["ifname"] == bridge:
            if "UP" in one["flags"]:
                return int(one["mtu"])
            raise NodeError(f"bridge {bridge} of this node is down", "", f"ip link set dev {bridge} up")
    raise NodeError(
        f"this node has no bridge {bridge}",
        "network.site_bridge names it for guests with --vhpc-network=site",
        "create it, and connect it to the site's network for guests",
    )


def make(
    generation: Generation, index: int, found: SiteInterface, port: SitePort, *, isolated: bool
) -> process.ProcessRef:
    """Make the filter and the tap of a guest, which the caller has announced; the filter's process.

    Raises:
        NodeError: the kernel refuses, or does not know a setting.
    """
    if not firewall.available():
        raise NodeError(
            "the site's network for guests needs nftables",
            "without it guests could have any address",
            "apt install nftables",
        )
    protect(generation, index, port)
    holder = hold(generation, index, port)
    several = ("multi_queue",) if found.queues > 1 else ()
    own = "fe:76" + port.mac[5:]
    tools.batch(
        "ip",
        (
            ("tuntap", "add", "dev", port.tap, "mode", "tap", "user", "0", *several),
            ("link", "set", "dev", port.tap, "alias", str(generation), "address", own),
            ("link", "set", "dev", port.tap, "addrgenmode", "none", "mtu", str(port.mtu)),
        ),
    )
    sysctl = tools.SYSCTL / f"ipv6/conf/{port.tap}/disable_ipv6"
    with suppress(OSError):  # a kernel without IPv6
        sysctl.write_text("1")
    alone = "on" if isolated else "off"
    settings = ("learning", "off", "flood", "off", "mcast_router", "0", "locked", "on", "isolated", alone)
    tools.batch("ip", (("link", "set", "dev", port.tap, "master", found.bridge),))
    tools.batch(
        "bridge",
        (
            ("link", "set", "dev", port.tap, *settings),
            ("fdb", "add", port.mac, "dev", port.tap, "master", "static"),
        ),
    )
    shown = {one["ifname"]: one for one in tools.query("bridge", "link", "show")}.get(port.tap, {})
    if shown.get("locked") is not True or shown.get("isolated", False) is not isolated:
        raise NodeError(
            f"the kernel did not lock bridge port {port.tap}", "it needs Linux 5.18 and iproute2 5.18"
        )
    tools.batch("ip", (("link", "set", "dev", port.tap, "up"),))
    return holder


def table_name(generation: Generation, index: int) -> str:
    """Name of a guest's table."""
    return f"{TABLE}{generation}_g{index}"


def render(table: str, port: SitePort, *, copy: bool = False) -> str:
    """Commands for ``nft -f``: a guest's table, in place of one that may be there.  Pure.

    ``copy``: the commands for the table that ``flush ruleset`` leaves in place (``owned``).
    """
    before, name, flag = f"add table bridge {table}\ndelete table bridge {table}", table, ""
    if copy:
        before, name, flag = "", owned.name_of(table), owned.FLAG
    address_ = port.ipv4.partition("/")[0]
    return f"""\
{before}
table bridge {name} {{ {flag}
  chain prerouting {{
    type filter hook prerouting priority -300; policy accept;
    iifname "{port.tap}" goto guest
  }}
  chain guest {{
    ether saddr != {port.mac} counter drop
    vlan id 0-4095 counter drop
    ether type arp arp saddr ether {port.mac} arp saddr ip {{ {address_}, 0.0.0.0 }} accept
    ether type != ip counter drop
    ip saddr != {address_} counter drop
    udp sport 67 counter drop
  }}
  chain input {{
    type filter hook input priority -300; policy accept;
    iifname "{port.tap}" counter drop
  }}
  chain output {{
    type filter hook output priority -300; policy accept;
    oifname "{port.tap}" counter drop
  }}
}}
"""


def protect(generation: Generation, index: int, port: SitePort) -> None:
    """Make a guest's table; NodeError when nftables refuses."""
    tools.run("nft", "-f", "-", data=render(table_name(generation, index), port))


def hold(generation: Generation, index: int, port: SitePort) -> process.ProcessRef:
    """Make the copy of a guest's table that ``flush ruleset`` leaves in place; the process that has it."""
    table = table_name(generation, index)
    return owned.hold(generation, table, FAMILIES, render(table, port, copy=True))


def taps() -> Iterator[tuple[str, str]]:
    """(name, alias) of the taps of all guests on this node's site bridges; an alias may not be set yet."""
    for one in tools.query("ip", "link", "show", "type", "tun"):
        if _TAP.match(str(one["ifname"])):
            yield str(one["ifname"]), str(one.get("ifalias", ""))


def tables() -> set[tuple[Generation, int]]:
    """Guests that have a table in the kernel: generation and index."""
    found = set()
    for _, name in tools.tables():
        if match := _TABLE.match(name):
            with suppress(ValueError):
                found.add((Generation.parse(match["generation"]), int(match["index"])))
    return found


def release(generation: Generation, index: int, tap: str) -> None:
    """Remove a guest's tap, then its table and the copy; what is absent is no error.

    Raises:
        NodeError: the kernel cannot be asked, or refuses.
        TeardownError: the tap is left.
    """
    owners = ("", str(generation))
    if tap in {name for name, alias in taps() if alias in owners}:
        remove(tap)
    if firewall.available():
        table = table_name(generation, index)
        owned.end(generation, table)
        tools.run("nft", "-f", "-", data=f"add table bridge {table}\ndelete table bridge {table}\n")
    if tap in {name for name, alias in taps() if alias in owners}:
        raise TeardownError(f"interface {tap} of {generation} is still there", "")


def remove(tap: str) -> None:
    """Remove a tap; one that is gone already is no error, but NodeError when the kernel refuses."""
    try:
        tools.run("ip", "link", "delete", "dev", tap)
    except NodeError:
        if tap in dict(taps()):
            raise
