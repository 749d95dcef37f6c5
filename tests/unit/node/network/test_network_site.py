# SPDX-License-Identifier: Apache-2.0
"""Guests on a bridge of the site, in real network namespaces: what passes their ports, and what is left."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from boot_rig import Agent, BootRig, boot_layout, connect, prepared, run
from network_lab import (
    IFF_MULTI_QUEUE,
    IFF_NO_PI,
    IFF_TAP,
    PAYLOAD,
    QUIET_S,
    TUNSETIFF,
    Cluster,
    Host,
    inside,
    ip,
    network_findings,
    real_cluster,
    usable,
)
from segment_site import Site, replace_network

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Generation, SiteInterface, SitePort
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import owned, site, tools
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.resource import site as bridged
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())
layout = boot_layout
cluster = real_cluster
GENERATION = Generation(42, 0, "0123abcd")
BRIDGE = "br-site"
NODE, PEER = "198.51.100.11", "198.51.100.200"
SITE = {
    "allowed": ("none", "job", "nat", "site"),
    "site_bridge": BRIDGE,
    "site_ipv4": "198.51.100.0/24",
    "site_gateway": PEER,
}
EVERYBODY = b"\xff" * 6


def mac(ipv4: str) -> bytes:
    """The address that docs/network.md defines."""
    return b"\x0a\x76" + socket.inet_aton(ipv4)


class Port:
    """A guest's end of a tap on the bridge, or the peer's interface: frames go in and come out."""

    def __init__(self, name: str, ipv4: str) -> None:
        self.mac, self.ipv4 = mac(ipv4), socket.inet_aton(ipv4)
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(
            self.fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_MULTI_QUEUE)
        )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            ports = {one["ifname"]: one for one in json.loads(tools.run("bridge", "-j", "link", "show"))}
            if ports[name]["state"] == "forwarding":
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} does not forward")

    def packet(self, to: bytes, *, source: bytes = b"", ipv4: bytes = b"", port: int = 4000) -> bytes:
        """A UDP datagram in a frame, to the limited broadcast address."""
        body = struct.pack("!HHHH", port, 4000, 8 + len(PAYLOAD), 0) + PAYLOAD
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, 17, 0)
        head += (ipv4 or self.ipv4) + b"\xff" * 4
        total = sum(struct.unpack("!10H", head))
        total = (total & 0xFFFF) + (total >> 16)
        head = head[:10] + struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + head[12:]
        return to + (source or self.mac) + b"\x08\0" + head + body

    def send(self, frame: bytes) -> None:
        os.write(self.fd, frame)

    def arp(self, claimed: bytes, source: bytes = b"") -> bytes:
        own = source or self.mac
        body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + own + claimed + b"\xff" * 6 + claimed
        return EVERYBODY + self.mac + b"\x08\x06" + body + PAYLOAD

    def heard(self, seconds: float = QUIET_S) -> list[bytes]:
        found, until = [], time.monotonic() + seconds
        while select.select([self.fd], [], [], max(0.0, until - time.monotonic()))[0]:
            frame = os.read(self.fd, 65536)
            found += [frame] if PAYLOAD in frame else []
        return found


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Host]:
    """The test itself is on this node, whose bridge has an address of the node and a port of a peer."""
    found = cluster.nodes["n1"]
    with inside(found.namespace):
        ip("link", "add", "name", BRIDGE, "type", "bridge", "mcast_snooping", "0")
        ip("address", "add", f"{NODE}/24", "dev", BRIDGE)
        ip("tuntap", "add", "dev", "uplink", "mode", "tap", "multi_queue")
        ip("link", "set", "dev", "uplink", "master", BRIDGE, "address", "02:00:00:00:00:01", "up")
        ip("link", "set", "dev", BRIDGE, "up")
        yield found
        for ref, _ in process.marked(str(GENERATION)):
            process.end(ref)
        for name, _ in list(site.taps()):
            ip("link", "delete", "dev", name)
        ip("link", "delete", "dev", "uplink")
        ip("link", "delete", "dev", BRIDGE)
        tools.run("nft", "flush", "ruleset")


def guest(slot: int, *, isolated: bool = True) -> Port:
    ipv4 = f"198.51.100.2{slot}"
    found = SitePort(f"vhpcs{slot}", mac(ipv4).hex(":"), f"{ipv4}/24", 1500)
    site.make(GENERATION, slot, SiteInterface(BRIDGE, 2, PEER), found, isolated=isolated)
    return Port(found.tap, ipv4)


def bridge_state() -> str:
    shown = tools.query("ip", "address", "show", "dev", BRIDGE)[0]
    four = [one for one in shown["addr_info"] if one["family"] == "inet"]
    return json.dumps([shown["address"], shown["mtu"], four])


@pytest.mark.promise("site.source", "attack.site-address")
def test_a_guest_reaches_its_peer_with_its_own_address_only(node: Host) -> None:
    peer = Port("uplink", PEER)
    before = bridge_state()
    one = guest(0)
    assert bridge_state() == before, "the bridge keeps its addresses and its MTU"
    good = one.packet(peer.mac)
    one.send(good)
    one.send(one.arp(one.ipv4))
    assert peer.heard() == [good, one.arp(one.ipv4)]
    back = peer.packet(one.mac)
    peer.send(back)
    assert one.heard() == [back]
    gateway, other = socket.inet_aton(PEER), b"\x0a\x76" + socket.inet_aton("198.51.100.29")
    ipv6_head = struct.pack("!IHBB", 6 << 28, len(PAYLOAD), 59, 64) + bytes(15) + b"\1" + bytes(15) + b"\2"
    wrong = {
        "MAC address": one.packet(peer.mac, source=other),
        "MAC address of the peer": one.packet(EVERYBODY, source=peer.mac),
        "IPv4 address": one.packet(peer.mac, ipv4=gateway),
        "ARP for the gateway": one.arp(gateway),
        "ARP with another MAC address": one.arp(one.ipv4, source=other),
        "IPv6": EVERYBODY + one.mac + b"\x86\xdd" + ipv6_head + PAYLOAD,
        "DHCP server": one.packet(EVERYBODY, port=67),
        "VLAN": good[:12] + b"\x81\0\0\x05" + good[12:],
        "VLAN with priority only": good[:12] + b"\x81\0\xe0\0" + good[12:],
        "service VLAN": good[:12] + b"\x88\xa8\0\x05" + good[12:],
        "another protocol": EVERYBODY + one.mac + b"\x88\xb5" + PAYLOAD,
    }
    for what, frame in wrong.items():
        one.send(frame)
        assert peer.heard(0.2) == [], what
    # the control: without the filter and the lock they arrive
    site.release(GENERATION, 0, "")
    tools.run("bridge", "link", "set", "dev", "vhpcs0", "locked", "off")
    for what, frame in wrong.items():
        one.send(frame)
        assert peer.heard(0.2), what
    os.close(one.fd)
    os.close(peer.fd)


@pytest.mark.promise("site.source")
def test_a_flush_of_the_rules_opens_nothing(node: Host) -> None:
    peer, one = Port("uplink", PEER), guest(0)
    tools.run("nft", "flush", "ruleset")
    one.send(one.packet(peer.mac, ipv4=socket.inet_aton(PEER)))
    one.send(one.packet(peer.mac, source=mac("198.51.100.29")))
    assert peer.heard() == []
    os.close(one.fd)
    os.close(peer.fd)


@pytest.mark.promise("site.source", "attack.site-guest")
@pytest.mark.parametrize("isolated", [True, False])
def test_guests_of_a_node_meet_only_if_the_site_lets_them(node: Host, isolated: bool) -> None:
    one, two, peer = guest(0, isolated=isolated), guest(1, isolated=isolated), Port("uplink", PEER)
    for target in (two.mac, EVERYBODY):
        one.send(one.packet(target))
    assert len(two.heard()) == (0 if isolated else 2)
    assert len(peer.heard()) == 1, "the broadcast"
    for port in (one, two, peer):
        os.close(port.fd)


@pytest.mark.promise("site.source", "attack.site-node")
def test_the_node_itself_does_not_answer_a_guest(node: Host) -> None:
    one = guest(0)
    target = socket.inet_aton(NODE)
    ask = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + one.mac + one.ipv4 + bytes(6) + target
    one.send(EVERYBODY + one.mac + b"\x08\x06" + ask)

    def answer() -> bool:
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            if select.select([one.fd], [], [], 0.1)[0] and os.read(one.fd, 65536)[28:32] == target:
                return True
        return False

    assert not answer()
    site.release(GENERATION, 0, "")
    one.send(EVERYBODY + one.mac + b"\x08\x06" + ask)
    assert answer(), "without the filter it answers"
    os.close(one.fd)


# --- a boot -------------------------------------------------------------------------------------------


def resolve(name: str, *_: object, **__: object) -> list[Any]:
    """The site's names, as a resolver has them."""
    known = {f"n1-guest{slot}": f"198.51.100.2{slot}" for slot in range(10)} | {"n2-guest0": "192.0.2.9"}
    known["n3-guest0"] = PEER
    if name not in known:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch, node: Host) -> Iterator[BootRig]:
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = msgspec.structs.replace(layout.config, network=Network(**SITE))  # type: ignore[arg-type]
    found = prepared(Layout(config), monkeypatch, guests=2, segment=None, site=True)
    yield found
    found.work.journal.close()


def nothing_left() -> bool:
    return not (list(site.taps()) or site.tables() or owned.existing())


@pytest.mark.promise("site.release")
def test_guests_get_slots_and_lose_them_with_their_job(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, peer := Agent())
    run(rig)
    assert peer.asked.count("ask") == 2
    entries = [entry.data for entry in rig.work.journal.held() if entry.kind == "site"]
    assert sorted((one["slot"], one["ipv4"]) for one in entries) == [
        (0, "198.51.100.20"),
        (1, "198.51.100.21"),
    ]
    for slot, text in enumerate(rig.hypervisor.domains):
        assert f'<mac address="{mac(f"198.51.100.2{slot}").hex(":")}"/>' in text
        assert f'<target dev="vhpcs{slot}" managed="no"/>' in text
        assert 'slot="0x1a"' in text, "no other device has this place"
    assert list(network_findings(rig.work.layout)) == []
    tools.run("nft", "flush", "ruleset")
    found = list(network_findings(rig.work.layout))
    assert [one.kind for one in found] == [Kind.FIREWALL] * 2
    for one in found:
        one.repair()
    for ref, _ in list(process.marked(str(GENERATION))):
        process.end(ref)
    for one in (found := list(network_findings(rig.work.layout))):
        one.repair()
    assert len(found) == 2
    assert list(network_findings(rig.work.layout)) == []
    held = [entry.kind for entry in rig.work.journal.held()]
    assert held.index("site") > held.index("domain"), "it is released after its domain"
    keep = tuple(kind for kind in held if kind != "site")
    assert registry.release_all(rig.work.layout, rig.work.journal, keep) == []
    assert nothing_left()


def test_a_name_without_an_address_leaves_nothing(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, Agent())
    config = rig.work.layout.config
    wrong = msgspec.structs.replace(config.network, site_name="{node}-none{slot}")
    rig.change(layout=Layout(msgspec.structs.replace(config, network=wrong)))
    with pytest.raises(NodeError, match=r"n1-none0, the name of a guest's address, has no IPv4 address"):
        run(rig)
    (entry,) = [entry for entry in rig.work.journal.held() if entry.kind == "site"]
    assert (entry.data["slot"], entry.data["ipv4"]) == (0, "")
    assert list(network_findings(rig.work.layout)) == []
    keep = tuple(one.kind for one in rig.work.journal.held() if one.kind != "site")
    assert registry.release_all(rig.work.layout, rig.work.journal, keep) == []
    assert nothing_left()


@pytest.mark.promise("site.release")
def test_taps_and_tables_without_a_journal_are_removed(layout: Layout, node: Host) -> None:
    os.close(guest(3).fd)
    found = list(network_findings(layout))
    assert [one.kind for one in found] == [Kind.ORPHAN_NETWORK] * 2
    for one in found:
        one.repair()
    assert nothing_left()
    assert "br-site" in tools.run("ip", "link", "show", "type", "bridge")


@pytest.mark.promise("site.missing")
def test_a_missing_bridge_is_named(node: Host) -> None:
    config = Config(network=Network(**{**SITE, "site_bridge": "br-none"}))  # type: ignore[arg-type]
    with pytest.raises(NodeError, match="this node has no bridge br-none"):
        site.bridge_mtu("br-none")
    (found,) = [one for one in bridged.Site().check(config, "n1", root=False) if one.check == "site.bridge"]
    assert "this node has no bridge br-none" in str(found)
    ip("link", "set", "dev", BRIDGE, "down")
    with pytest.raises(NodeError, match="bridge br-site of this node is down"):
        site.bridge_mtu(BRIDGE)


# --- policy and settings --------------------------------------------------------------------------------


def test_only_a_site_that_allows_it_has_it(tmp_path: Path) -> None:
    allowed = Site(tmp_path / "a", replace_network(**SITE, default="none"))
    assert [allowed.open(1, network=word).site for word in ("site", "job,site")] == [True, True]
    assert not allowed.open(3).site
    refused = Site(tmp_path / "b", replace_network(default="none")).open(1, network="site")
    assert "--vhpc-network=site is not allowed here" in refused.refusal
    many = allowed.open(4, network="site", guests_per_node=17)
    assert many.refusal.startswith(
        "the site's network has 16 addresses for the guests of a node, the job has 17"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"site_bridge": ""}, "site_bridge has to be"),
        ({"site_bridge": "../x"}, "site_bridge has to be"),
        ({"site_ipv4": "x"}, "site_ipv4:"),
        ({"site_ipv4": "10.200.0.0/24"}, "is not in site_ipv4"),
        ({"site_gateway": ""}, "site_gateway:"),
        ({"site_dns": ("x",)}, "site_dns:"),
        ({"site_name": "{node}"}, "site_name has to contain"),
        ({"site_name": "{node}-{slot}-{x}"}, "site_name has to contain"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"network": {**SITE, **changes}}, Config)


def test_names_lead_to_addresses_of_the_sites_network(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Network(**SITE)  # type: ignore[arg-type]
    with pytest.raises(NodeError, match=r"no\.such\.host\.invalid-guest5, the name .* has no IPv4"):
        site.address(config, "no.such.host.invalid", 5)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert site.address(config, "n1", 3) == "198.51.100.23"
    for node, why in (("n2", "192.0.2.9"), ("n3", PEER)):
        with pytest.raises(NodeError, match=f"{node}-guest0 has the address {why}: it is not one of a guest"):
            site.address(config, node, 0)
    assert [site.free_slot(config, used) for used in ((), (0, 1), (1,))] == [0, 2, 0]
    with pytest.raises(FabricError, match="all 16 are in use"):
        site.free_slot(config, range(16))
