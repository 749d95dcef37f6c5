# SPDX-License-Identifier: Apache-2.0
"""An encrypted segment between real network namespaces: what is on the wire, what arrives, what is left."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from network_lab import (
    PAYLOAD,
    PORT,
    QUIET_S,
    TEST,
    VNI,
    Cluster,
    Guest,
    Host,
    first_node,
    inside,
    ip,
    lease_of,
    mtu_of,
    network_findings,
    ours,
    plan_of,
    real_cluster,
    second_node,
    vxlan,
)
from tunnel_lab import (
    INNER,
    MTU,
    TUNNEL_PORT,
    Encrypted,
    capture,
    create,
    encrypted,
    left,
    tunnels_usable,
    udp_ports,
)

from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases import tunnel_keys
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import TunnelKeyPairs
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.network import firewall, probe, segment, tools
from vhpc_slurm.node.resource.job_network import NetworkData
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.skipif(bool(tunnels_usable()), reason=tunnels_usable())
cluster = real_cluster
n1 = first_node
n2 = second_node


@pytest.fixture
def pair(n1: Host, n2: Host) -> Iterator[Encrypted]:
    found = Encrypted(n1, n2)
    yield found
    found.close()


# --- what is on the wire ------------------------------------------------------------------------------


@pytest.mark.promise("net.wireguard", "attack.underlay")
@pytest.mark.parametrize("version", [4, 6])
def test_the_underlay_carries_only_wireguard(n1: Host, n2: Host, version: int) -> None:
    pair = Encrypted(n1, n2, version)
    try:
        with capture(n1) as sent, capture(n2) as received:
            pair.exchange()
            pair.exchange(MTU[version])
        for frames in (sent, received):
            assert udp_ports(frames) == {(TUNNEL_PORT, TUNNEL_PORT)}
            assert not any(PAYLOAD[:16] in frame for frame in frames)
            assert max(len(frame) for frame in frames) == 1514, (
                "full frames use the whole MTU of the underlay"
            )
    finally:
        pair.close()


def test_an_unencrypted_segment_shows_frames_to_the_same_capture(n1: Host, n2: Host) -> None:
    leases = [lease_of(1, VNI, "n1", "n2") for _ in (n1, n2)]
    for host, lease in zip((n1, n2), leases, strict=True):
        with inside(host.namespace):
            segment.build(lease, plan_of(lease, host.name), mtu_of(lease), trusted_underlay=False)
    one, two = Guest(n1, leases[0]), Guest(n2, leases[1])
    try:
        with capture(n1) as frames:
            one.send(two.mac, TEST, PAYLOAD)
            assert two.heard(ours, 5.0)
        assert any(PAYLOAD in frame for frame in frames), "or the test above would show nothing"
        assert PORT in {target for _, target in udp_ports(frames)}
    finally:
        one.close()
        two.close()


def test_the_mtu_in_a_tunnel_is_that_of_the_manual(n1: Host) -> None:
    for version, room in MTU.items():
        lease = encrypted("n1", tunnel_keys.make(2), version)
        found = plan_of(lease, "n1").segment
        assert found is not None
        with inside(n1.namespace):
            assert segment.underlay_mtu(found) == room


@pytest.mark.promise("net.wireguard")
def test_without_its_tunnel_a_segment_sends_nothing(pair: Encrypted, n1: Host) -> None:
    pair.exchange()
    with inside(n1.namespace):
        # a default route; frames could leave over it if they were not bound to the tunnel
        ip("-6", "route", "add", "default", "via", "2001:db8::2", "dev", "under0")
        try:
            ip("link", "set", f"vhpcw{VNI}", "down")
            with capture(n1) as frames:
                pair.one.send(pair.two.mac, TEST, PAYLOAD)
            assert not any(PAYLOAD[:16] in frame for frame in frames)
            ip("link", "delete", f"vhpcw{VNI}")
            assert [name for name, _ in segment.found()] == [f"vhpcb{VNI}", f"vhpc{VNI}g0"]
        finally:
            ip("-6", "route", "delete", "default")


# --- what does not arrive -------------------------------------------------------------------------------


@pytest.mark.promise("attack.underlay")
def test_plain_frames_and_those_of_other_hosts_are_dropped(
    pair: Encrypted, cluster: Cluster, n1: Host, n2: Host
) -> None:
    pair.exchange()
    third = cluster.third
    third.run("ip", "-6", "route", "add", INNER[1], "via", n2.ipv6, "dev", "under0")
    try:
        for to in (n2.address, n2.ipv6, INNER[1]):
            third.send(pair.injected(), VNI, to)
            n1.send(pair.injected(), VNI, to, uid=1000)
        for to in (n2.address, n2.ipv6):
            n1.send(pair.injected(), VNI, to)  # also of root on a node of the job, outside of the tunnel
        _spoof(third, n1.address, n2.address, vxlan(pair.injected(), VNI))
        assert pair.two.heard(ours, 2.0) == []
        assert _drops(n2, "input") == 4, "those of the third host have arrived at n2, and were dropped there"
        assert _drops(n1, "output") >= 5
    finally:
        third.run("ip", "-6", "route", "delete", INNER[1])
    pair.exchange()


def _spoof(host: Host, source: str, target: str, payload: bytes) -> None:
    """Send a UDP datagram with the address of another host."""
    with inside(host.namespace), socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        datagram = struct.pack("!HHHH", 40000, PORT, 8 + len(payload), 0) + payload
        addresses = socket.inet_aton(source) + socket.inet_aton(target)
        header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), 1, 0, 64, socket.IPPROTO_UDP, 0)
        sock.sendto(header + addresses + datagram, (target, 0))


def _drops(host: Host, chain: str) -> int:
    """Packets that the rules of a chain have dropped."""
    found = json.loads(host.run("nft", "-j", "list", "ruleset"))["nftables"]
    rules = [one["rule"] for one in found if "rule" in one and one["rule"]["family"] == "inet"]
    counters = [
        part["counter"]["packets"]
        for rule in rules
        if rule["chain"] == chain
        for part in rule["expr"]
        if "counter" in part
    ]
    return sum(counters)


@pytest.mark.promise("attack.underlay")
def test_a_host_without_the_keys_gets_no_tunnel(n1: Host, n2: Host, cluster: Cluster) -> None:
    pair = Encrypted(n1, n2)
    try:
        n1.run("ip", "link", "set", "under0", "down")  # its place is taken by a host with its address
        third = cluster.third
        third.run("ip", "address", "add", f"{n1.address}/24", "dev", "under0")
        wrong = TunnelKeyPairs(tunnel_keys.make(2).private_keys, pair.pairs.public_keys)
        lease = create(third, wrong, name="n1")
        impostor = copy.copy(third)
        impostor.name = "n1"
        stranger = Guest(impostor, lease)
        stranger.send(pair.two.mac, TEST, PAYLOAD)
        assert pair.two.heard(ours, 3.0) == []
        stranger.close()
        with inside(third.namespace):
            segment.release(lease.generation, VNI)
        third.run("ip", "address", "delete", f"{n1.address}/24", "dev", "under0")
        n1.run("ip", "link", "set", "under0", "up")
        assert left(third) == []
        third.run("ip", "neighbour", "flush", "all")
        for host in (n1, n2):
            host.run("ip", "neighbour", "flush", "all")
        pair.exchange()
    finally:
        pair.close()


@pytest.mark.promise("attack.tunnel")
def test_programs_of_nodes_cannot_use_the_tunnel(pair: Encrypted, n1: Host, n2: Host) -> None:
    pair.exchange()
    with inside(n2.namespace):
        sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        sock.bind((INNER[1], 9999))
    with sock:
        sock.settimeout(QUIET_S)
        for uid in (0, 1000):
            n1.send(b"", 0, INNER[1], uid=uid, port=9999)
            with pytest.raises(TimeoutError):
                sock.recv(100)
        with inside(n2.namespace), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as own:
            own.sendto(b"x", (INNER[1], 9999))
        assert sock.recv(100) == b"x", "the socket works"


# --- keys -------------------------------------------------------------------------------------------------


@pytest.mark.promise("attack.tunnel-key")
def test_private_keys_are_on_no_command_line(n1: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = tools.run, list[str]()

    def recording(*words: str, **how: Any) -> str:
        said.extend((*words, *how.get("shown", ())))
        return real(*words, **how)

    pairs = tunnel_keys.make(2)
    monkeypatch.setattr(tools, "run", recording)
    lease = create(n1, pairs)
    assert pairs.private_keys[0] not in " ".join(said) + repr(lease) + repr(pairs)
    assert n1.run("wg", "show", f"vhpcw{VNI}", "private-key").strip() == pairs.private_keys[0]
    assert n1.run("wg", "show", f"vhpcw{VNI}", "public-key").strip() == pairs.public_keys[0]


def test_a_port_of_another_program_is_a_clear_error(n1: Host) -> None:
    with inside(n1.namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", TUNNEL_PORT))
        with pytest.raises(FabricError, match=rf"UDP port {TUNNEL_PORT} of this node is in use.*uid 0"):
            create(n1, tunnel_keys.make(2))
        segment.release(lease_of(1, VNI, "n1").generation, VNI)
    assert left(n1) == []


# --- what is left -------------------------------------------------------------------------------------------


def test_a_node_that_has_left_the_job_is_not_a_peer(pair: Encrypted, n1: Host) -> None:
    pair.exchange()
    with inside(n1.namespace):
        for _ in range(2):
            segment.forget(encrypted("n1", pair.pairs), "n1", {"n2"})
    assert n1.run("wg", "show", "vhpcw5000", "peers") == ""
    pair.two.send(pair.one.mac, TEST, PAYLOAD)
    assert pair.one.heard(ours, QUIET_S) == []


@pytest.mark.promise("net.wireguard-killed")
def test_a_release_leaves_nothing_and_can_be_repeated(pair: Encrypted, n1: Host, n2: Host) -> None:
    pair.exchange()
    for host in (n1, n2):
        with inside(host.namespace):
            for _ in range(2):
                segment.release(pair.lease.generation, VNI)
        assert left(host) == []
        assert INNER[0][:14] not in host.run("ip", "-6", "address") + host.run("ip", "-6", "route")


def _layout(folder: Path) -> Layout:
    paths = {name: str(folder / name) for name in ("state", "run", "log")}
    return Layout(msgspec.convert({"paths": paths}, Config))


def _killed_at(host: Host, pairs: TunnelKeyPairs, step: int, *, half: bool) -> bool:
    """Make a node's segment in a process that SIGKILL ends before command ``step``, or half of its batch.

    Returns whether the process has ended before that.
    """
    child = os.fork()
    if child == 0:
        real, calls = tools.run, 0

        def failing(*words: str, **how: Any) -> str:
            nonlocal calls
            calls += 1
            if calls == step:
                lines = how.get("data", "").splitlines()
                if half and words[0] in ("ip", "bridge") and lines:
                    real(*words, data="\n".join(lines[: len(lines) // 2]) + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **how)

        try:
            tools.run = failing
            create(host, pairs)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.mark.promise("net.wireguard-killed")
@pytest.mark.parametrize("half", [False, True])
def test_kill_9_at_any_step_and_reconciliation_leave_nothing(n1: Host, tmp_path: Path, half: bool) -> None:
    layout, pairs, step, most = _layout(tmp_path), tunnel_keys.make(2), 0, 0
    while True:
        step += 1
        done = _killed_at(n1, pairs, step, half=half)
        most = max(most, len(left(n1)))
        with inside(n1.namespace):
            for one in network_findings(layout):
                assert one.kind is Kind.ORPHAN_NETWORK
                one.repair()
        assert left(n1) == [], f"after command {step}"
        if done:
            break
    assert step > 10
    assert most >= 6, "bridge, VXLAN device, tap, WireGuard interface twice, tables"


def test_a_lost_firewall_is_made_again_from_the_journal(n1: Host, tmp_path: Path) -> None:
    layout, pairs = _layout(tmp_path), tunnel_keys.make(2)
    lease = encrypted("n1", pairs)
    found = plan_of(lease, "n1").segment
    assert found is not None
    layout.journals.mkdir(parents=True)
    with closing(Journal(layout.journals, lease.generation)) as journal:
        journal.announce("network", f"network:{VNI}", NetworkData.of(found, (INNER[1],)))
        create(n1, pairs)
        with inside(n1.namespace):
            firewall.hold(lease.generation, found, (INNER[1],))
        before = sorted(n1.run("nft", "list", "ruleset").splitlines())
        assert any(f"vhpcw{VNI}" in line for line in before)
        n1.run("nft", "flush", "ruleset")
        with inside(n1.namespace):
            (lost,) = network_findings(layout)
            assert lost.kind is Kind.FIREWALL
            lost.repair()
            assert list(network_findings(layout)) == []
        assert sorted(n1.run("nft", "list", "ruleset").splitlines()) == before
        assert not any(
            key in path.read_text() for path in layout.journals.iterdir() for key in pairs.private_keys
        )


def test_a_trial_by_doctor_leaves_nothing(n1: Host) -> None:
    with inside(n1.namespace):
        probe.run("wireguard")
    assert left(n1) == []
