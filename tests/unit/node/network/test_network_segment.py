# SPDX-License-Identifier: Apache-2.0
"""The segment of a job between real network namespaces: what arrives, and what does not."""

from __future__ import annotations

import os
import socket
import struct

import pytest
from network_lab import (
    ALL,
    ARP,
    IPV6,
    PAYLOAD,
    PORT,
    QUIET_S,
    TEST,
    VNI,
    Cluster,
    Guest,
    Host,
    Pair,
    arp_request,
    build,
    first_node,
    injected,
    inside,
    ip,
    lease_of,
    neighbour_solicitation,
    ours,
    real_cluster,
    real_pair,
    second_node,
    usable,
    vxlan,
)

from vhpc_slurm.errors import FabricError
from vhpc_slurm.node.network import firewall, plan, segment

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())

cluster = real_cluster
n1 = first_node
n2 = second_node
pair = real_pair


# --- what arrives -----------------------------------------------------------------------------------


def test_unicast_arrives_both_ways_up_to_the_whole_mtu(pair: Pair) -> None:
    for source, target in ((pair.one, pair.two), (pair.two, pair.one)):
        source.send(target.mac, TEST, PAYLOAD)
        assert target.heard(ours) == [target.mac + source.mac + TEST.to_bytes(2, "big") + PAYLOAD]
        source.send(target.mac, TEST, PAYLOAD.ljust(1450, b"x"))
        (frame,) = target.heard(ours)
        assert len(frame) == 1464


def test_the_bridge_answers_for_guests_of_other_nodes(pair: Pair) -> None:
    pair.one.send(ALL, ARP, arp_request(pair.one, pair.two.ipv4))
    (answer,) = pair.one.heard(lambda frame: frame[12:14] == b"\x08\x06")
    assert answer[20:22] == b"\x00\x02"
    assert (answer[22:28], answer[28:32]) == (pair.two.mac, pair.two.ipv4)
    group = b"\x33\x33\xff" + pair.two.ipv6[-3:]
    pair.one.send(group, IPV6, neighbour_solicitation(pair.one, pair.two.ipv6))
    (advert,) = pair.one.heard(lambda frame: frame[12:14] == b"\x86\xdd" and frame[54] == 136)
    assert advert[62:78] == pair.two.ipv6
    assert pair.two.mac in advert[78:]
    assert pair.two.heard(lambda frame: frame[12:14] in (b"\x08\x06", b"\x86\xdd"), QUIET_S) == []


def test_traffic_between_guests_of_one_node_stays_on_the_node(n1: Host, n2: Host) -> None:
    lease = lease_of(1, VNI, "n1", "n2", each=2)
    for host in (n1, n2):
        build(host, lease)
    here = [Guest(n1, lease, index) for index in (0, 1)]
    there = [Guest(n2, lease, index) for index in (0, 1)]
    try:
        here[0].send(ALL, ARP, arp_request(here[0], here[1].ipv4))
        assert here[1].heard(lambda frame: frame[12:14] == b"\x08\x06")
        here[0].send(here[1].mac, TEST, PAYLOAD)
        assert here[1].heard(ours)
        here[0].send(ALL, TEST, PAYLOAD)
        assert here[1].heard(ours)
        for guest in there:
            assert guest.heard(ours, QUIET_S) == []
        here[1].send(there[0].mac, TEST, PAYLOAD)
        assert there[0].heard(ours)
    finally:
        for guest in (*here, *there):
            guest.close()


@pytest.mark.promise("attack.udp-port")
def test_a_user_who_takes_the_port_drains_no_node(n1: Host) -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    with inside(n1.namespace):
        os.seteuid(65534)
        try:
            taker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        finally:
            os.seteuid(0)
        with taker:
            taker.bind(("", PORT))
            with pytest.raises(FabricError, match=rf"UDP port {PORT} of this node is in use.* uid 65534 "):
                build(n1, lease)
        segment.release(lease.generation, VNI)
    build(n1, lease)


GROUPS = (ALL, b"\x33\x33\0\0\0\xfb", b"\x01\0\x5e\0\0\xfb")
"""Broadcast, and multicast of IPv6 and IPv4: both groups of mDNS (RFC 6762)."""


@pytest.mark.promise("net.multicast")
@pytest.mark.parametrize("version", [4, 6])
def test_multicast_reaches_all_guests_of_a_job_that_asked(n1: Host, n2: Host, version: int) -> None:
    pair, other = Pair(n1, n2, version=version, flood=True), Pair(n1, n2, 2, VNI + 2, flood=True)
    try:
        for source, target in ((pair.one, pair.two), (pair.two, pair.one)):
            for group in GROUPS:
                source.send(group, TEST, PAYLOAD)
                assert target.heard(ours) == [group + source.mac + TEST.to_bytes(2, "big") + PAYLOAD]
                assert source.heard(ours, QUIET_S) == [], "it does not come back"
        for guest in (other.one, other.two):
            assert guest.heard(ours, QUIET_S) == [], "another job hears nothing"
        other.one.send(ALL, TEST, PAYLOAD)
        assert other.two.heard(ours)
    finally:
        for found in (pair, other):
            found.one.close()
            found.two.close()


@pytest.mark.promise("net.multicast", "attack.multicast")
def test_with_multicast_ports_stay_locked(n1: Host, n2: Host) -> None:
    pair = Pair(n1, n2, flood=True)
    try:
        for source in (b"\x06\0\0\0\0\x77", pair.two.mac, b"\x02\0\0\0\0\x01"):
            for group in GROUPS:
                pair.one.send(group, TEST, PAYLOAD, source=source)
        pair.one.send(b"\x06\0\0\0\0\x77", TEST, PAYLOAD)
        assert pair.two.heard(ours, QUIET_S) == []
        pair.one.send(ALL, ARP, arp_request(pair.one, socket.inet_aton(n2.address)))
        assert pair.one.heard(lambda frame: frame[12:14] == b"\x08\x06", QUIET_S) == [], "no node answers"
    finally:
        pair.one.close()
        pair.two.close()


@pytest.mark.promise("net.multicast")
def test_an_outsider_cannot_inject_multicast(n1: Host, n2: Host, cluster: Cluster) -> None:
    pair = Pair(n1, n2, flood=True)
    try:
        frame = ALL + pair.one.mac + TEST.to_bytes(2, "big") + PAYLOAD
        cluster.third.send(frame, VNI, n2.address)
        n2.send(frame, VNI, n2.address, uid=65534)
        assert pair.two.heard(ours, QUIET_S) == []
        n1.send(frame, VNI, n2.address, uid=0)
        assert pair.two.heard(ours), "what the node sends arrives"
    finally:
        pair.one.close()
        pair.two.close()


# --- what a guest cannot do ---------------------------------------------------------------------------


@pytest.mark.promise("net.source")
def test_nothing_is_flooded_to_other_nodes(pair: Pair) -> None:
    for target in (ALL, b"\x33\x33\0\0\0\x01", b"\x01\0\x5e\0\0\x01", b"\x06\0\0\0\0\x77"):
        pair.one.send(target, TEST, PAYLOAD)
    assert pair.two.heard(ours, QUIET_S) == []


@pytest.mark.promise("net.source", "attack.guest-address")
def test_a_frame_with_a_foreign_source_is_dropped(pair: Pair) -> None:
    for source in (b"\x06\0\0\0\0\x77", pair.two.mac, b"\x02\0\0\0\0\x01"):
        pair.one.send(pair.two.mac, TEST, PAYLOAD, source=source)
    assert pair.two.heard(ours, QUIET_S) == []
    pair.one.send(pair.two.mac, TEST, PAYLOAD)
    assert pair.two.heard(ours), "its own address works as before"


@pytest.mark.promise("attack.guest-address")
def test_a_guest_cannot_take_the_address_of_another(n1: Host) -> None:
    lease = lease_of(1, VNI, "n1", each=2)
    build(n1, lease)
    one, two = Guest(n1, lease, 0), Guest(n1, lease, 1)
    try:
        one.send(ALL, TEST, PAYLOAD, source=two.mac)  # an unlocked port would now be two's
        assert two.heard(ours, QUIET_S) == []
        one.send(two.mac, TEST, PAYLOAD)
        assert two.heard(ours)
    finally:
        one.close()
        two.close()


@pytest.mark.promise("net.source", "attack.bridge")
def test_the_node_itself_is_not_on_the_segment(pair: Pair, n1: Host) -> None:
    address = socket.inet_aton(n1.address)
    pair.one.send(ALL, ARP, arp_request(pair.one, address))
    assert pair.one.heard(lambda frame: frame[12:14] == b"\x08\x06", QUIET_S) == []
    counted = n1.run("nft", "list", "table", "bridge", firewall.table_name(pair.lease.generation))
    assert "packets 0" not in counted.split("chain output")[0], "the bridge's rule saw it"
    shown = n1.run("ip", "address", "show", "dev", plan.bridge_name(VNI))
    assert "inet" not in shown


@pytest.mark.promise("net.separate")
def test_two_jobs_with_the_same_addresses_do_not_meet(n1: Host, n2: Host) -> None:
    pairs = [Pair(n1, n2, job_id, VNI + job_id) for job_id in (1, 2)]
    try:
        first, second = pairs
        assert first.one.ipv4 == second.one.ipv4
        for target in (ALL, second.two.mac, second.one.mac):
            first.one.send(target, TEST, PAYLOAD)
        for guest in (second.one, second.two):
            assert guest.heard(ours, QUIET_S) == []
        for found in pairs:
            found.one.send(found.two.mac, TEST, PAYLOAD)
            assert found.two.heard(ours)
    finally:
        for found in pairs:
            found.one.close()
            found.two.close()


# --- what others cannot do ----------------------------------------------------------------------------


@pytest.mark.promise("net.foreign")
def test_a_host_outside_the_job_cannot_inject_frames(pair: Pair, cluster: Cluster, n2: Host) -> None:
    cluster.third.send(injected(pair), VNI, n2.address)
    cluster.third.send(injected(pair), VNI, n2.address, uid=65534)
    assert pair.two.heard(ours, QUIET_S) == []
    # without the filter it arrives: the test can fail
    n2.run("nft", "delete", "table", "inet", firewall.table_name(pair.lease.generation))
    cluster.third.send(injected(pair), VNI, n2.address)
    assert pair.two.heard(ours)


@pytest.mark.promise("net.foreign", "attack.vxlan")
def test_a_fragmented_packet_hides_no_vni(pair: Pair, cluster: Cluster, n2: Host) -> None:
    datagram = struct.pack("!HHHH", 40000, PORT, 8 + 8 + len(injected(pair)), 0) + vxlan(injected(pair), VNI)

    def send_fragments() -> None:
        with (
            inside(cluster.third.namespace),
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw,
        ):
            addresses = socket.inet_aton(cluster.third.address) + socket.inet_aton(n2.address)
            for offset, part in ((0, datagram[:8]), (1, datagram[8:])):  # in units of 8 bytes
                more = 0x2000 if offset == 0 else 0
                head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(part), 77, more | offset, 64, 17, 0)
                raw.sendto(head + addresses + part, (n2.address, 0))

    send_fragments()
    assert pair.two.heard(ours, QUIET_S) == []
    n2.run("nft", "delete", "table", "inet", firewall.table_name(pair.lease.generation))
    send_fragments()
    assert pair.two.heard(ours), "without the filter it is put together and arrives"


@pytest.mark.promise("net.foreign", "attack.vxlan-user")
def test_an_ordinary_user_of_the_jobs_node_cannot_inject_frames(pair: Pair, n1: Host, n2: Host) -> None:
    n1.send(injected(pair), VNI, n2.address, uid=65534)
    n2.send(injected(pair), VNI, n2.address, uid=65534)
    n2.send(injected(pair), VNI, "127.0.0.1", uid=65534)
    assert pair.two.heard(ours, QUIET_S) == []
    n1.send(injected(pair), VNI, n2.address, uid=0)  # root may: the packet itself is well formed
    assert pair.two.heard(ours)


@pytest.mark.promise("net.foreign", "attack.vxlan-user")
def test_a_container_behind_the_jobs_node_cannot_inject_frames(pair: Pair, n1: Host, n2: Host) -> None:
    container = Host("box", "")
    try:
        ip(
            *("-n", container.namespace, "link", "add", "eth0", "type", "veth"),
            *("peer", "name", "box0", "netns", n1.namespace),
        )
        with inside(container.namespace):
            ip("address", "add", "198.51.100.2/24", "dev", "eth0")
            ip("link", "set", "eth0", "up")
            ip("route", "add", "default", "via", "198.51.100.1")
        with inside(n1.namespace):
            ip("address", "add", "198.51.100.1/24", "dev", "box0")
            ip("link", "set", "box0", "up")
            with open("/proc/sys/net/ipv4/ip_forward", "w") as forward:  # noqa: PTH123
                forward.write("1")
        masquerade = "table ip box { chain p { type nat hook postrouting priority 100; ip saddr 198.51.100.2 "
        try:
            n1.run("nft", "-f", "-", data=f"{masquerade} masquerade; }}; }}\n")
        except Exception as err:  # a kernel without NAT
            pytest.skip(f"this kernel has no NAT for nftables: {err}")
        container.send(injected(pair), VNI, n2.address)
        assert pair.two.heard(ours, QUIET_S) == []
        for table in (firewall.table_name(pair.lease.generation), firewall.GUARD):
            n1.run("nft", "delete", "table", "inet", table)
        container.send(injected(pair), VNI, n2.address)
        assert pair.two.heard(ours), "without the filter it arrives with the node's own address"
    finally:
        container.close()


@pytest.mark.promise("attack.tap")
def test_an_ordinary_user_cannot_open_a_tap(pair: Pair, n1: Host) -> None:
    program = (
        "import fcntl, os, struct; os.setgroups([]); os.setresgid(65534, 65534, 65534);"
        "os.setresuid(65534, 65534, 65534); fd = os.open('/dev/net/tun', os.O_RDWR);"
        f"fcntl.ioctl(fd, 0x400454CA, struct.pack('16sH22x', b'{plan.tap_name(VNI, 0)}', 0x1102))"
    )
    with pytest.raises(Exception, match="non-zero exit status"):
        n1.run("python3", "-c", program)


def test_an_ipv6_underlay_carries_and_is_protected_as_well(n1: Host, n2: Host, cluster: Cluster) -> None:
    pair = Pair(n1, n2, version=6)
    fragmented = injected(pair).ljust(1400, b".")  # by its sender, whose interface takes less
    cluster.third.run("ip", "link", "set", "under0", "mtu", "1280")
    try:
        pair.one.send(pair.two.mac, TEST, PAYLOAD)
        assert pair.two.heard(ours)
        cluster.third.send(injected(pair), VNI, n2.ipv6)
        cluster.third.send(injected(pair), VNI, n2.address)
        cluster.third.send(fragmented, VNI, n2.ipv6)
        n1.send(injected(pair), VNI, n2.ipv6, uid=65534)
        assert pair.two.heard(ours, QUIET_S) == []
        n1.send(injected(pair), VNI, n2.ipv6, uid=0)
        assert pair.two.heard(ours)
        n2.run("nft", "delete", "table", "inet", firewall.table_name(pair.lease.generation))
        for frame in (injected(pair), fragmented):
            cluster.third.send(frame, VNI, n2.ipv6)
            assert pair.two.heard(ours), "without the filter it arrives"
    finally:
        cluster.third.run("ip", "link", "set", "under0", "mtu", "1500")
        pair.one.close()
        pair.two.close()
