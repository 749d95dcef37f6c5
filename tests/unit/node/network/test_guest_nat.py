# SPDX-License-Identifier: Apache-2.0
"""nat: which jobs have it, what its packet filter drops in a real kernel, and what is left of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from boot_rig import Agent, BootRig, boot_layout, connect, prepared, run
from controller_lab import allocation, identity, request
from network_lab import Cluster, Host, inside, ip, lease_of, network_findings, real_cluster, usable
from segment_site import Site, replace_network

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, NatInterface
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest import passt
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, nat, owned, tools
from vhpc_slurm.node.resource import registry
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())
layout = boot_layout
cluster = real_cluster
BOTH = replace_network(allowed=("none", "job", "nat"), default="none")
GENERATION = Generation(42, 0, "0123abcd")
GID = 4_100_003
RULES = nat.Rules(
    dns=("192.0.2.3",), allow=("198.51.100.7/32",), deny=("192.0.2.0/24", "198.51.100.0/24"), port=98
)


# --- who has it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "has_segment", "has_nat"),
    [
        (None, False, False),
        ("none", False, False),
        ("job", True, False),
        ("nat", False, True),
        ("job,nat", True, True),
    ],
)
def test_the_lease_has_the_networks_of_the_request(
    tmp_path: Path, asked: str | None, has_segment: bool, has_nat: bool
) -> None:
    lease = Site(tmp_path / "db", BOTH).open(1, "n1", network=asked)
    assert (lease.segment is not None, lease.nat) == (has_segment, has_nat)
    body = msgspec.json.decode(msgspec.json.encode(LeaseWire.pack(lease)))
    assert msgspec.convert(body, LeaseWire).unpack() == lease
    del body["nat"]
    assert msgspec.convert(body, LeaseWire).unpack() == replace(lease, nat=False), "a record of before"


@pytest.mark.parametrize("asked", ["nat", "job,nat"])
def test_nat_that_the_site_does_not_allow_is_refused(tmp_path: Path, asked: str) -> None:
    site = Site(tmp_path / "db", replace_network(allowed=("none", "job")))
    record = site.service.open(request(1, network=asked), allocation("n1"), identity(0))
    assert f"--vhpc-network={asked} is not allowed here" in record.lease.refusal
    assert not record.lease.nat


def test_resolvers_of_the_nodes_loopback_are_not_given_to_guests(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("search x\nnameserver 127.0.0.53\nnameserver ::1\nnameserver fd00::1\n")
    second.write_text("nameserver 192.0.2.1\nnameserver 192.0.2.1\nnameserver 192.0.2.2 # x\nnameserver\n")
    assert nat.resolvers(Network(), (first, second)) == ("192.0.2.1", "192.0.2.2")
    assert nat.resolvers(Network(), (tmp_path / "none", first)) == ()
    assert nat.resolvers(Network(nat_dns=("192.0.2.9",)), (second,)) == ("192.0.2.9",)


@pytest.mark.promise("nat.refuse", "attack.nat-socket")
def test_a_gid_of_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nat.check_gid(GID)
    with pytest.raises(NodeError, match="gid 1 is that of group daemon"):
        nat.check_gid(1)


# --- the packet filter --------------------------------------------------------------------------------

# Runs with a gid; prints which of ADDRESS:PORT answered by TCP, by UDP.
ASK = """
import os, socket, sys
gid, targets = int(sys.argv[1]), sys.argv[2:]
os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(2001, 2001, 2001)
for target in targets:
    address, port = target.rsplit(":", 1)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for name, kind in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
        with socket.socket(family, kind) as sock:
            sock.settimeout(0.5)
            try:
                if name == "tcp": sock.connect((address, int(port)))
                sock.sendto(b"x", (address, int(port)))
                if sock.recv(1): print(name, target)
            except OSError: pass
"""
ANSWER = """
import os, socket, threading
def serve(family, kind, port):
    sock = socket.socket(family, kind)
    if family == socket.AF_INET6: sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", port))
    if kind == socket.SOCK_STREAM: sock.listen(8)
    os.write(1, b"ready" + bytes([10]))
    while True:
        if kind == socket.SOCK_DGRAM:
            data, peer = sock.recvfrom(10)
            sock.sendto(b"y", peer)
        else:
            found, _ = sock.accept()
            found.send(b"y"); found.close()
threads = [threading.Thread(target=serve, args=(family, kind, port))
           for family in (socket.AF_INET, socket.AF_INET6)
           for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) for port in (53, 99)]
for one in threads: one.start()
"""


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Host]:
    """n1, with servers on itself and on h3, which has addresses of the outside as well."""
    node, third = cluster.nodes["n1"], cluster.third
    with inside(third.namespace):
        for address in ("198.51.100.7/32", "198.51.100.8/32", "203.0.113.5/32"):
            ip("address", "add", address, "dev", "lo")
    with inside(node.namespace):
        ip("address", "add", "203.0.113.11/32", "dev", "lo")
        for network in ("198.51.100.0/24", "203.0.113.0/24"):
            ip("route", "add", network, "via", third.address)
    servers = []
    for host in (node, third):
        with inside(host.namespace):
            servers.append(
                subprocess.Popen([sys.executable, "-c", ANSWER], stdout=subprocess.PIPE, text=True)
            )
        out = servers[-1].stdout
        assert out is not None
        assert [out.readline() for _ in range(8)] == ["ready\n"] * 8
    yield node
    for server in servers:
        server.kill()
        server.communicate()


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Host]:
    """The test itself is on this node."""
    found = cluster.nodes["n1"]
    with inside(found.namespace):
        yield found
        for ref, _ in process.marked(str(GENERATION)):
            process.end(ref)
        tools.run("nft", "flush", "ruleset")


def asked(node: Host, gid: int, *targets: str) -> set[str]:
    """The targets that answer a process of this gid on the node."""
    return set(node.run(sys.executable, "-c", ASK, str(gid), *targets).splitlines())


def both(*targets: str) -> set[str]:
    return {f"{way} {target}" for way in ("tcp", "udp") for target in targets}


SITE = (
    *("192.0.2.3:99", "198.51.100.8:99", "192.0.2.1:99", "203.0.113.11:99", "127.0.0.1:99", "127.9.9.9:99"),
    *("192.0.2.1:53", "2001:db8::3:99", "2001:db8::1:99", "::1:99"),
)
OUTSIDE = ("203.0.113.5:99", "203.0.113.5:53", "198.51.100.7:99", "192.0.2.3:53")


@pytest.mark.promise("nat.deny", "nat.flush", "attack.nat-node")
def test_only_allowed_destinations_answer_the_gid_of_passt(site: Host, node: Host) -> None:
    assert asked(site, GID, *SITE, *OUTSIDE) == both(*SITE, *OUTSIDE), "the control, without a filter"
    nat.protect(GENERATION, 0, GID, RULES)
    assert asked(site, GID, *SITE, *OUTSIDE) == both(*OUTSIDE)
    assert asked(site, GID + 1, *SITE) == both(*SITE), "other processes of the same user"
    # a reload of the site's rules opens nothing
    nat.hold(GENERATION, 0, GID, RULES)
    tools.run("nft", "flush", "ruleset")
    assert nat.tables() == set()
    assert asked(site, GID, *SITE, *OUTSIDE) == both(*OUTSIDE)
    nat.release(GENERATION, 0)
    assert asked(site, GID, *SITE) == both(*SITE)


@pytest.mark.promise("nat.deny", "attack.nat-node")
def test_connected_networks_and_vhpcd_are_denied_by_default(site: Host, node: Host, tmp_path: Path) -> None:
    config = msgspec.convert(
        {"controller": {"host": "203.0.113.5"}, "network": {"nat_dns": ["198.51.100.7"]}}, Config
    )
    lease = lease_of(1, 5000, "n1", "n2")
    assert lease.segment is not None
    lease = replace(lease, segment=replace(lease.segment, underlay=("192.0.2.1", "198.51.100.8")))
    found = nat.rules(config, lease, nat.resolvers(config.network))
    assert {"192.0.2.0/24", "198.51.100.8/32", "203.0.113.5/32", "10.0.0.0/8"} <= set(found.deny)
    assert found.dns == ("198.51.100.7",)
    nat.protect(GENERATION, 0, GID, found)
    assert asked(site, GID, *SITE, *OUTSIDE) == both("198.51.100.7:99")  # it answers no DNS, on port 99 all
    config = msgspec.convert({"controller": {"host": "no.such.host.invalid"}}, Config)
    with pytest.raises(NodeError, match=r"cannot resolve no\.such\.host\.invalid"):
        nat.rules(config, lease, ())


def test_loopback_and_frames_of_segments_are_dropped_in_any_case(site: Host, node: Host) -> None:
    everything = replace(RULES, allow=("0.0.0.0/0",), port=99)
    nat.protect(GENERATION, 0, GID, everything)
    found = asked(site, GID, *SITE, *OUTSIDE)
    assert found == {
        f"tcp {one}" for one in (*SITE, *OUTSIDE) if one[:3] != "127" and one.count(":") == 1
    } | {
        "udp 192.0.2.1:53",
        "udp 203.0.113.5:53",
        "udp 192.0.2.3:53",
    }


@pytest.mark.promise("nat.refuse")
def test_without_nftables_nat_is_refused(node: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find", lambda _program: None)
    with pytest.raises(NodeError, match="nat needs nftables"):
        nat.protect(GENERATION, 0, GID, RULES)


# --- a boot -------------------------------------------------------------------------------------------


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch, node: Host) -> Iterator[BootRig]:
    found = prepared(layout, monkeypatch, guests=2, segment=None, nat=True)
    yield found
    found.work.journal.close()


@pytest.mark.promise("nat.release")
def test_a_boot_makes_the_filter_before_passt(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked.count("ask") == 2
    for index, text in enumerate(rig.hypervisor.domains):
        found = ET.fromstring(text).find("devices/interface[@type='vhostuser']")
        assert found is not None
        source = found.find("source")
        assert source is not None
        assert source.get("path") == rig.work.plan.guests[index].paths.nat_socket
    held = [entry.kind for entry in rig.work.journal.held()]
    assert held.index("nat") > held.index("domain"), "it is released after its domain"
    gids = [entry.data["gid"] for entry in rig.work.journal.held() if entry.kind == "nat"]
    uids = [entry.data["uid"] for entry in rig.work.journal.held() if entry.kind == "uid"]
    assert sorted(gids) == sorted(uids)
    assert nat.tables() == {(GENERATION, 0), (GENERATION, 1)}
    # a reload of the site's rules, then reconciliation
    tools.run("nft", "flush", "ruleset")
    findings = list(network_findings(rig.work.layout))
    assert [one.kind for one in findings] == [Kind.FIREWALL] * 2
    for one in findings:
        one.repair()
    assert list(network_findings(rig.work.layout)) == []
    for ref, _ in list(process.marked(str(GENERATION))):
        process.end(ref)
    findings = list(network_findings(rig.work.layout))
    assert ["keeps a copy of its table" in one.what for one in findings] == [True] * 2
    for one in findings:
        one.repair()
    assert list(network_findings(rig.work.layout)) == []
    assert f"meta skgid {gids[0]} " in tools.run("nft", "list", "ruleset")
    keep = tuple(kind for kind in held if kind != "nat")
    assert registry.release_all(rig.work.layout, rig.work.journal, keep) == []
    assert nat.tables() == set()
    assert not owned.existing()


@pytest.mark.promise("nat.release")
def test_a_table_without_a_journal_is_removed(layout: Layout, node: Host) -> None:
    nat.protect(GENERATION, 3, GID, RULES)
    (finding,) = network_findings(layout)
    assert finding.kind is Kind.ORPHAN_NETWORK
    finding.repair()
    assert nat.tables() == set()
    assert list(network_findings(layout)) == []


# --- passt --------------------------------------------------------------------------------------------


def spawn(path: Path, script: str) -> tuple[int, process.ProcessRef]:
    """A process in passt's place, with its ids."""
    code = f"import os, socket, time\nos.setgroups([]); os.setresgid({GID}, {GID}, {GID})\n"
    code += f"os.setresuid(2001, 2001, 2001)\npath = {str(path)!r}\n{script}"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    started = process.start_time(pid)
    assert started is not None
    return pid, process.ProcessRef(pid, started)


@pytest.fixture
def folder(layout: Layout) -> Path:
    layout.job(42).mkdir(parents=True)
    layout.job(42).parent.parent.chmod(0o711)
    for one in (layout.job(42), *layout.job(42).parents):
        if str(one).startswith("/tmp/vb-"):
            one.chmod(0o711)
    found = layout.job(42) / "nat"
    passt.make_directory(found, GID)
    return found


LISTEN = (
    "sock = socket.socket(socket.AF_UNIX); sock.bind(path); time.sleep(0.2); sock.listen(1); time.sleep(60)"
)


@pytest.mark.promise("nat.user", "attack.nat-socket")
def test_only_qemu_can_connect_to_passt(folder: Path) -> None:
    path = folder / "socket"
    pid, ref = spawn(path, LISTEN)
    try:
        passt.hand_over(path, ref, 2001, GID, 20.0)
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (GID, 0o600)
        assert (folder.stat().st_uid, folder.stat().st_gid, folder.stat().st_mode & 0o777) == (0, 0, 0o711)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_passt_that_ends_or_does_not_listen_is_an_error(folder: Path) -> None:
    path = folder / "socket"
    pid, ref = spawn(path, "")
    with pytest.raises(NodeError, match="passt ended when it was started"):
        passt.hand_over(path, ref, 2001, GID, 20.0)
    os.waitpid(pid, 0)
    pid, ref = spawn(path, "time.sleep(60)")
    with pytest.raises(NodeError, match="passt does not listen"):
        passt.hand_over(path, ref, 2001, GID, 0.3)
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_the_guest_gets_its_addresses() -> None:
    found = nat.interface(Network(nat_ipv4="10.9.8.0/29"))
    assert (found.ipv4, found.gateway) == ("10.9.8.2/29", "10.9.8.1")
    words = nat.command(Network(), found, Path("/run/x"))
    assert words[words.index("--address") + 1] == "10.9.8.2"
    assert isinstance(found, NatInterface)
    assert {"--no-map-gw", "--ipv4-only", "--one-off"} <= set(words)
    assert (words[words.index("--tcp-ports") + 1], words[words.index("--udp-ports") + 1]) == ("none", "none")


def test_tables_of_segments_and_of_nat_are_distinct(node: Host) -> None:
    nat.protect(GENERATION, 0, GID, RULES)
    assert firewall.tables() == {}
    assert nat.tables() == {(GENERATION, 0)}
