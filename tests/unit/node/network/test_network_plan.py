# SPDX-License-Identifier: Apache-2.0
"""Names and addresses on a segment, and the firewall's text, without a kernel."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import force_setattr
from network_lab import lease_of, plan_of

from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.network import firewall, plan, tools

VNIS = st.integers(1, (1 << 24) - 1)


@given(VNIS, st.integers(0, 63))
def test_names_are_the_kernels_and_say_their_vni(vni: int, index: int) -> None:
    names = {plan.bridge_name(vni), plan.vxlan_name(vni), plan.tunnel_name(vni), plan.tap_name(vni, index)}
    assert len(names) == 4
    for name in names:
        assert len(name) <= 15
        assert plan.vni_of(name) == vni


@pytest.mark.parametrize(
    "name", ["vhpc", "vhpcb", "vhpcbx", "vhpcb1x", "vhpc5000", "vhpc5000g", "vhpc1g100", "eth0", "vhpcb1\n"]
)
def test_interfaces_of_others_are_not_ours(name: str) -> None:
    assert plan.vni_of(name) is None


def test_addresses_follow_from_vni_and_rank() -> None:
    lease = lease_of(1, 0xABCDEF, "n1", "n2", each=3)
    found = plan_of(lease, "n2", vcpus=12).guests[1].interface
    assert found is not None
    assert (found.mac, found.tap, found.queues) == ("06:ab:cd:ef:00:04", "vhpc11259375g1", 8)
    assert (found.ipv4, found.ipv6) == ("10.200.0.5/16", "fd76:6870:6300::5/64")
    assert plan.names(lease)[4] == ("n2-g1", "10.200.0.5")
    assert plan.names(lease)[10] == ("n2-g1", "fd76:6870:6300::5")
    for vni, rank in ((0, 0), (1 << 24, 0), (1, 1 << 16), (1, -1)):
        with pytest.raises(ValueError, match="no MAC address"):
            plan.mac(vni, rank)


@given(VNIS, st.integers(1, 4), st.integers(1, 4))
def test_all_nodes_have_the_same_addresses_of_each_guest(vni: int, count: int, each: int) -> None:
    nodes = [f"n{number}" for number in range(1, count + 1)]
    lease = lease_of(1, vni, *nodes, each=each)
    seen = {}
    for node in nodes:
        found = tuple(plan.neighbours(lease, node))
        assert len({one.mac for one in found}) == count * each
        seen[node] = {(one.hostname, one.mac, one.ipv4, one.ipv6) for one in found}
        own = [one for one in found if not one.via]
        interfaces = [guest.interface for guest in plan_of(lease, node).guests]
        assert [(one.tap, one.mac) for one in own] == [(one.tap, one.mac) for one in interfaces if one]
        for one, mine in zip(own, interfaces, strict=True):
            assert mine is not None
            assert ip_interface(mine.ipv4).ip == ip_address(one.ipv4)
            assert ip_interface(mine.ipv6).ip == ip_address(one.ipv6)
        local = plan.node_segment(lease, node)
        assert local is not None
        assert local.local not in plan.peers(lease, node)
        assert {one.via for one in found if one.via} == set(plan.peers(lease, node))
    assert len({frozenset(found) for found in seen.values()}) == 1


def test_nodes_with_addresses_of_both_kinds_are_refused() -> None:
    lease = lease_of(1, 5000, "n1", "n2")
    assert lease.segment is not None
    force_setattr(lease.segment, "underlay", ("192.0.2.1", "fd00::2"))
    with pytest.raises(FabricError, match="both IPv4 and IPv6"):
        plan.peers(lease, "n1")


def test_a_job_without_a_segment_has_no_network() -> None:
    lease = lease_of(1, 5000, "n1")
    force_setattr(lease, "segment", None)
    assert plan.names(lease) == ()
    assert plan.node_segment(lease, "n1") is None
    assert plan.interface(lease, "n1", 0, 1) is None
    assert list(plan.neighbours(lease, "n1")) == []


def test_tables_are_named_by_their_generation() -> None:
    generation = Generation(7, 1, "0123abcd")
    assert firewall.generation_of(firewall.table_name(generation)) == generation
    for other in ("vhpc_", "vhpc_7.1", "filter", "vhpc_7.1.0123abcd.x"):
        assert firewall.generation_of(other) is None


def test_the_filter_of_an_ipv6_underlay_is_in_ipv6() -> None:
    lease = lease_of(1, 5000, "n1", "n2")
    assert lease.segment is not None
    force_setattr(lease.segment, "underlay", ("fd00::1", "fd00::2"))
    segment = plan.node_segment(lease, "n1")
    assert segment is not None
    text = firewall.render(lease.generation, segment, plan.peers(lease, "n1"))
    assert "type ipv6_addr; elements = { fd00::2 };" in text
    assert "ip6 saddr != @nodes" in text
    assert "meta nfproto ipv4" in text


def test_invalid_words_of_a_batch_are_refused() -> None:
    for word in ("a b", "a\n", "", "$(x)", "a;b"):
        with pytest.raises(ValueError, match="not a command for a batch"):
            tools.batch("ip", [("link", "show", word)])


def test_a_failed_batch_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NodeError, match=r"ip failed: link show dev absent0.*absent0"):
        tools.batch("ip", [("link", "show", "dev", "lo"), ("link", "show", "dev", "absent0")])
    monkeypatch.setattr(tools, "WHERE", "/nowhere")
    with pytest.raises(NodeError, match=r"nft is not installed.*apt install nftables"):
        tools.run("nft", "list", "tables")


def test_a_resumed_guest_keeps_its_mac_address() -> None:
    lease = lease_of(1, 0xABCDEF, "n1", "n2", each=3)
    assert lease.segment is not None
    lease = replace(lease, segment=replace(lease.segment, mac_vni=0x010203))
    found = plan_of(lease, "n2", vcpus=12).guests[1].interface
    assert found is not None
    assert (found.mac, found.tap) == ("06:01:02:03:00:04", "vhpc11259375g1")
    assert [one.mac for one in plan.neighbours(lease, "n1")][4] == found.mac
