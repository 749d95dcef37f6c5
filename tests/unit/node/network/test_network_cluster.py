# SPDX-License-Identifier: Apache-2.0
"""Members of a cluster between real network namespaces, on two nodes and on one: what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_lab import Part, member_lease, member_of
from network_lab import (
    ALL,
    ARP,
    IPV6,
    PAYLOAD,
    QUIET_S,
    TEST,
    Guest,
    Host,
    arp_request,
    first_node,
    inside,
    neighbour_solicitation,
    network_findings,
    ours,
    real_cluster,
    second_node,
    usable,
)

from vhpc_slurm.model import Lease
from vhpc_slurm.node.network import firewall, owned, plan, segment, tools

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())

cluster = real_cluster
n1 = first_node
n2 = second_node


class Site:
    """Three members: the first and the third are on n1, the second on n2."""

    def __init__(self, folder: Path, n1: Host, n2: Host, opened: ExitStack) -> None:
        self.folder, self.opened = folder, opened
        self.one = self.add(n1, member_lease(1, 5001, "n1", first=0))
        self.two = self.add(n2, member_lease(2, 5002, "n2", first=1, each=2))
        self.three = self.add(n1, member_lease(3, 5003, "n1", first=3))

    def add(self, host: Host, lease: Lease) -> Part:
        return self.opened.enter_context(closing(Part(host, lease, self.folder)))

    def meet(self) -> None:
        parts = (self.one, self.two, self.three)
        for part in parts:
            part.follow(*(member_of(other.lease) for other in parts if other is not part))


@pytest.fixture
def site(tmp_path: Path, n1: Host, n2: Host) -> Iterator[Site]:
    with ExitStack() as opened:
        yield Site(tmp_path, n1, n2, opened)


def arrives(source: Guest, target: Guest) -> bool:
    """Whether a guest finds another one by its IP addresses, and its frames arrive."""
    source.send(ALL, ARP, arp_request(source, target.ipv4))
    answers = source.heard(lambda frame: frame[12:14] == b"\x08\x06" and frame[28:32] == target.ipv4, QUIET_S)
    assert all(frame[22:28] == target.mac for frame in answers)
    source.send(target.mac, TEST, PAYLOAD.ljust(1450, b"x"))
    found = target.heard(lambda frame: ours(frame) and frame[6:12] == source.mac, QUIET_S)
    assert bool(answers) == bool(found)
    return bool(found)


@pytest.mark.promise("net.cluster")
def test_guests_of_all_members_reach_each_other(site: Site) -> None:
    apart = [site.one.guests[0], site.two.guests[0], site.three.guests[0]]
    pairs = [(one, two) for one in apart for two in apart if one is not two]
    assert not any(arrives(one, two) for one, two in pairs)
    site.meet()
    assert all(arrives(one, two) for one, two in pairs)
    assert arrives(site.one.guests[0], site.two.guests[1])


def test_ipv6_addresses_of_other_members_are_found(site: Site) -> None:
    site.meet()
    asking = site.one.guests[0]
    for target in (site.two.guests[1], site.three.guests[0]):
        asking.send(b"\x33\x33\xff" + target.ipv6[-3:], IPV6, neighbour_solicitation(asking, target.ipv6))
        (advert,) = asking.heard(lambda frame: frame[12:14] == b"\x86\xdd" and frame[54] == 136)
        assert advert[62:78] == target.ipv6
        assert target.mac in advert[78:]


@pytest.mark.promise("net.cluster")
def test_a_member_that_has_left_neither_sends_nor_receives(site: Site) -> None:
    before = site.one.state
    site.meet()
    assert site.one.state[2] == {"elements = { 192.0.2.2 }", "_ownedelements = { 192.0.2.2 }"}
    site.one.follow(member_of(site.three.lease), version=2)
    assert site.one.state[2] == set()
    one, two, three = (part.guests[0] for part in (site.one, site.two, site.three))
    one.send(two.mac, TEST, PAYLOAD)
    assert two.heard(ours, QUIET_S) == []
    two.send(one.mac, TEST, PAYLOAD)  # its own node has not heard of it yet
    assert one.heard(ours, QUIET_S) == []
    assert arrives(one, three)
    site.one.follow(version=3)
    assert site.one.state == before
    three.send(one.mac, TEST, PAYLOAD)  # of the same node
    assert one.heard(ours, QUIET_S) == []


def test_a_guest_that_has_ended_is_removed_alone(site: Site) -> None:
    site.meet()
    site.one.follow(member_of(site.two.lease, 0), member_of(site.three.lease), version=2)
    one = site.one.guests[0]
    assert not arrives(one, site.two.guests[0])
    assert arrives(one, site.two.guests[1])


@pytest.mark.promise("cluster.silent")
def test_a_silent_node_is_removed_and_comes_back(site: Site) -> None:
    site.meet()
    good = site.one.state
    site.one.follow(member_of(site.two.lease, 0, 1), member_of(site.three.lease), version=2)
    assert site.one.state[2] == set(), "the firewall does not accept frames from n2"
    assert not any("dst 192.0.2.2" in line for line in site.one.state[0])
    one, two, three = (part.guests[0] for part in (site.one, site.two, site.three))
    assert not arrives(one, two)
    two.send(one.mac, TEST, PAYLOAD)  # n2 cannot be told
    assert one.heard(ours, QUIET_S) == []
    assert arrives(one, three)
    site.one.follow(member_of(site.two.lease), member_of(site.three.lease), version=3)
    assert site.one.state == good
    assert arrives(two, one)


def test_what_is_there_already_is_not_touched(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.meet()
    sent: list[str] = []
    monkeypatch.setattr(firewall, "apply", lambda *_: sent.append("nft"))
    monkeypatch.setattr(tools, "batch", lambda program, commands: sent.extend((program, *map(str, commands))))
    site.one.follow(member_of(site.two.lease), member_of(site.three.lease), version=2)
    assert sent == ["bridge", "ip"], "no command"
    assert site.one.known.version == 2


def test_lost_and_foreign_entries_are_repaired(site: Site, n1: Host) -> None:
    site.meet()
    others = (member_of(site.two.lease), member_of(site.three.lease))
    good = site.one.state
    n1.run("bridge", "fdb", "del", site.two.guests[0].mac.hex(":"), "dev", "vhpcx5001", "master")
    n1.run("ip", "neighbour", "del", "10.200.0.2", "dev", "vhpcb5001")
    stale = "06:00:13:8f:00:00"
    n1.run(
        "bridge", "fdb", "add", stale, "dev", "vhpcx5001", "self", "static", "dst", "192.0.2.9", "vni", "5007"
    )
    assert site.one.state != good
    site.one.follow(*others)
    assert site.one.state == good


def test_entries_of_the_own_job_stay(site: Site, n1: Host, n2: Host) -> None:
    wide = member_lease(4, 5004, "n1", "n2", first=8)
    here, there = site.add(n1, wide), site.add(n2, wide)
    site.one.follow(member_of(wide))
    here.follow(member_of(site.one.lease), member_of(site.two.lease))
    there.follow(member_of(site.one.lease), member_of(site.two.lease))
    site.two.follow(member_of(wide))
    assert "elements = { 192.0.2.2 }" in here.state[2]
    assert arrives(here.guests[0], there.guests[0])
    assert arrives(site.one.guests[0], there.guests[0])
    assert arrives(site.two.guests[1], here.guests[0])
    here.follow(version=2)
    assert arrives(here.guests[0], there.guests[0])


def test_a_node_that_leaves_a_job_stays_for_other_members(site: Site, n1: Host, n2: Host) -> None:
    wide = member_lease(4, 5004, "n1", "n2", first=8)
    here, there = site.add(n1, wide), site.add(n2, wide)
    site.two.follow(member_of(wide))
    here.follow(member_of(site.two.lease))
    with inside(n1.namespace):
        segment.forget(wide, "n1", ("n2",), ("192.0.2.2",))
    here.journal.update("network:5004", peers=[], left=["n2"])
    for version in (2, 3):
        assert here.state[2] == {"elements = { 192.0.2.2 }", "_ownedelements = { 192.0.2.2 }"}
        assert arrives(here.guests[0], site.two.guests[1])
        assert not arrives(here.guests[0], there.guests[0])
        here.follow(member_of(site.two.lease), version=version)
    here.follow(version=4)
    assert here.state[2] == set()


def test_a_lost_firewall_is_made_with_all_members(site: Site, n1: Host) -> None:
    site.meet()
    good = site.one.state
    n1.run("nft", "delete", "table", "inet", f"vhpc_{site.one.lease.generation}")
    assert site.one.state != good
    with inside(n1.namespace):
        lost = [found for found in network_findings(site.one.layout) if "VNI 5001" in found.what]
        assert [found.kind for found in lost] == ["firewall"]
        lost[0].repair()
    assert site.one.state == good


def test_tables_that_a_follower_replaces_are_no_finding(
    site: Site, n1: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.meet()
    real, first = owned.existing, [frozenset[tuple[str, str]]()]
    monkeypatch.setattr(owned, "existing", lambda: first.pop() if first else real())
    with inside(n1.namespace):
        assert [found for found in network_findings(site.one.layout) if "VNI 5001" in found.what] == []
    assert first == [], "the copies were missing at the first look"


def test_numbers_go_on_from_the_first_of_the_member() -> None:
    lease = member_lease(2, 5002, "n1", "n2", first=300, each=2)
    assert lease.segment is not None
    assert plan.addresses(lease.segment, 0) == ("10.200.1.45", "fd76:6870:6300::12d")
    found = plan.interface(lease, "n2", 1, 1)
    assert found is not None
    assert (found.ipv4, found.mac) == ("10.200.1.48/16", "06:00:13:8a:00:03")
    assert [one.ipv4 for one in plan.neighbours(replace(member_of(lease), gone=(1,)), "n1")][
        3
    ] == "10.200.1.48"
