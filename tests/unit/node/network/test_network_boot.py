# SPDX-License-Identifier: Apache-2.0
"""Job networks in a boot, its release, and reconciliation, in real network namespaces."""

from __future__ import annotations

import errno
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from boot_rig import Agent, BootRig, boot_layout, connect, prepared, run
from network_lab import Cluster, Host, inside, lease_of, network_findings, real_cluster, running_of, usable

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation, Segment
from vhpc_slurm.node.boot import agent
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, owned, plan, segment, tools
from vhpc_slurm.node.resource import network, registry
from vhpc_slurm.node.resource.job_network import JobNetwork
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())
layout = boot_layout
cluster = real_cluster
VNI = 5000
SEGMENT = Segment(VNI, "10.200.0.0/16", "fd76:6870:6300::/64", 7634, 0, ("192.0.2.1",))


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Host]:
    """The test itself is on this node."""
    found = cluster.nodes["n1"]
    with inside(found.namespace):
        yield found
        segment.remove([name for name, _ in segment.found()])
        for ref, _ in process.marked("42.0.0123abcd"):
            process.end(ref)
        tools.run("nft", "flush", "ruleset")


@pytest.fixture
def rig(layout: Layout, monkeypatch: pytest.MonkeyPatch, node: Host) -> Iterator[BootRig]:
    found = prepared(layout, monkeypatch, guests=2, segment=SEGMENT)
    yield found
    found.work.journal.close()


def nothing_left() -> bool:
    return segment.held() == {} and firewall.tables() == {} and not owned.existing()


def test_guests_get_the_taps_that_were_made_before_them(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Agent()
    connect(monkeypatch, peer)
    run(rig)
    assert peer.asked.count("network") == 2
    for index, xml in enumerate(rig.hypervisor.domains):
        found = ET.fromstring(xml).find("devices/interface")
        assert found is not None
        assert [part.attrib for part in found] == [
            {"address": f"06:00:13:88:00:{index:02x}"},
            {"dev": f"vhpc5000g{index}", "managed": "no"},
            {"type": "virtio"},
            {"queues": "2"},
            {"size": "1450"},
            {"enabled": "no"},
            {"type": "pci", "bus": "0x00", "slot": "0x1d"},
        ]
    kinds = [entry.kind for entry in rig.work.journal.held()]
    assert kinds.index("network") > kinds.index("domain"), "it is released after all domains"
    assert sorted(name for name, _ in segment.found()) == [
        "vhpc5000g0",
        "vhpc5000g1",
        "vhpcb5000",
        "vhpcx5000",
    ]
    # (libvirt and helper processes are stand-ins here: their releases are tested elsewhere)
    keep = tuple(kind for kind in kinds if kind != "network")
    assert registry.release_all(rig.work.layout, rig.work.journal, keep) == []
    assert nothing_left()


def test_a_guest_may_take_a_while_to_find_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    guest = running_of(lease, "n2").guests[0]
    asked: list[tuple[object, ...]] = []
    answers = [errno.ENODEV, errno.ENODEV, 0]

    class Slow:
        def network(self, *what: object, slots: object) -> None:
            asked.append((*what, slots))
            if number := answers.pop(0):
                raise ChannelRefusedError("guest operation network failed", number)

    monkeypatch.setattr(network, "AGAIN_S", 0.0)
    JobNetwork().configure(lease, guest, cast(Any, Slow()), 5.0)
    assert asked == [(guest.plan.interface, 1450, "vhpc0", ("n1", "n2"), 5.0, (("n1", 2), ("n2", 2)))] * 3
    answers[:] = [errno.ENOSYS]
    with pytest.raises(ChannelRefusedError):
        JobNetwork().configure(lease, guest, cast(Any, Slow()), 5.0)
    answers[:] = [errno.ENODEV] * 2
    monkeypatch.setattr(network, "PROBE_S", 0.0)
    with pytest.raises(ChannelRefusedError):
        JobNetwork().configure(lease, guest, cast(Any, Slow()), 5.0)


def test_names_lead_to_the_addresses_of_all_guests() -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    assert agent.hosts("n1", plan.names(lease)) == [
        "10.200.0.1 n1",
        "10.200.0.2 n2",
        "fd76:6870:6300::1 n1",
        "fd76:6870:6300::2 n2",
    ]


def test_an_mtu_above_the_underlays_is_a_node_error(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, node: Host
) -> None:
    large = Segment(VNI, SEGMENT.ipv4, SEGMENT.ipv6, 7634, 9000, SEGMENT.underlay)
    rig = prepared(layout, monkeypatch, segment=large)
    connect(monkeypatch, Agent())
    with pytest.raises(NodeError, match=r"network\.mtu is 9000, and the underlay of n1 leaves 1450"):
        run(rig)
    assert nothing_left()
    rig.work.journal.close()


@pytest.mark.promise("net.flush")
def test_a_journaled_segment_is_kept_and_its_firewall_restored(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, Agent())
    run(rig)
    node_layout = rig.work.layout
    assert list(network_findings(node_layout)) == []
    before = sorted(tools.run("nft", "list", "ruleset").splitlines())
    tools.run("nft", "flush", "ruleset")
    found, port = network_findings(node_layout)
    assert [found.kind, port.kind] == [Kind.FIREWALL] * 2
    assert found.what == "VNI 5000 of generation 42.0.0123abcd has lost its nftables tables"
    assert port.what == "this node has lost its nftables table vhpc-port"
    found.repair()
    assert sorted(tools.run("nft", "list", "ruleset").splitlines()) == before
    assert list(network_findings(node_layout)) == []
    (holder,) = [ref for ref, _ in process.marked("42.0.0123abcd")]
    process.end(holder)
    (found,) = network_findings(node_layout)
    assert found.kind is Kind.FIREWALL
    assert "generation 42.0.0123abcd has lost the process that keeps copies of its tables" in found.what
    found.repair()
    assert sorted(tools.run("nft", "list", "ruleset").splitlines()) == before
    assert list(network_findings(node_layout)) == []


@pytest.mark.promise("net.flush")
@pytest.mark.parametrize(
    "damage",
    [
        "flush ruleset",
        "flush table inet vhpc-port",
        "flush chain inet vhpc-port forward",
        "delete element inet vhpc-port ports { 7634 }",
    ],
)
def test_the_nodes_own_table_is_made_again_after_a_job(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Nodes that the job still has accept packets of this node, until they have learnt that it left."""
    connect(monkeypatch, Agent())
    run(rig)
    node_layout = rig.work.layout
    keep = tuple(entry.kind for entry in rig.work.journal.held() if entry.kind != "network")
    assert registry.release_all(node_layout, rig.work.journal, keep) == []
    assert list(network_findings(node_layout)) == []
    before = tools.run("nft", "list", "ruleset")
    assert before.count("udp dport @ports") == 2
    tools.run("nft", damage)
    (found,) = network_findings(node_layout)
    assert (found.kind, found.what) == (Kind.FIREWALL, "this node has lost its nftables table vhpc-port")
    found.repair()
    assert tools.run("nft", "list", "ruleset") == before
    assert list(network_findings(node_layout)) == []


def test_a_damaged_journal_does_not_stop_other_checks(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = Path(rig.work.layout.journals).iterdir()
    path.write_bytes(b'{"event": "acquire"}\n' + path.read_bytes())
    assert list(network_findings(rig.work.layout)) == []
    tools.run("ip", "tuntap", "add", "dev", "vhpc5001g0", "mode", "tap")
    (found,) = network_findings(rig.work.layout)
    with pytest.raises(VhpcError):
        found.repair()
    assert [name for name, _ in segment.found()] == ["vhpc5001g0"], "it may be that journal's"


def test_networks_of_a_running_hook_are_not_changed(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, Agent())
    run(rig)
    tools.run("nft", "flush", "ruleset")
    with joblock.held(rig.work.layout, rig.work.lease.generation.job_id, timeout_s=5.0):
        found = [one.what for one in network_findings(rig.work.layout)]
        assert found == ["this node has lost its nftables table vhpc-port"], "no hook is at work on this one"
    assert len(list(network_findings(rig.work.layout))) == 2


def test_networks_without_a_journal_are_removed(rig: BootRig, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, Agent())
    run(rig)
    node_layout = rig.work.layout
    for path in Path(node_layout.journals).iterdir():
        path.unlink()
    found = list(network_findings(node_layout))
    assert [one.kind for one in found] == [Kind.ORPHAN_NETWORK] * 2
    assert "vhpcb5000" in found[0].what
    for one in found:
        one.repair()
    assert nothing_left()


def test_an_interface_without_an_alias_is_known_by_its_vni(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, Agent())
    run(rig)
    for name in ("vhpc5000g9", "vhpc5001g0"):
        tools.run("ip", "tuntap", "add", "dev", name, "mode", "tap")
    (found,) = network_findings(rig.work.layout)
    assert "vhpc5001g0 of generation unknown" in found.what
    assert "vhpc5000g9" not in found.what
    found.repair()
    segment.release(rig.work.lease.generation, VNI)
    assert nothing_left()


def test_foreign_interfaces_of_any_name_are_not_removed(layout: Layout, node: Host) -> None:
    tools.run("ip", "tuntap", "add", "dev", "vhpc7g0", "mode", "tap")
    tools.run("ip", "link", "set", "dev", "vhpc7g0", "alias", "of another program")
    tools.run("nft", "add", "table", "inet", "vhpc_other")
    assert list(network_findings(layout)) == []
    segment.release(Generation(7, 0, "0" * 8), 7)
    assert [name for name, _ in segment.found()] == ["vhpc7g0"]


def test_a_failing_kernel_is_reported_only_if_there_is_a_segment(
    rig: BootRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.work.journal.acquire("network", "network:5000", vni=5000, port=1, local="192.0.2.1", peers=[])
    with monkeypatch.context() as patch:
        patch.setattr(tools, "WHERE", "/nowhere")
        (found,) = network_findings(rig.work.layout)
        assert "ip is not installed" in found.what
        with pytest.raises(NodeError):
            found.repair()
        rig.work.journal.released("network:5000")
        assert list(network_findings(rig.work.layout)) == []
