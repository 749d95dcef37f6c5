# SPDX-License-Identifier: Apache-2.0
"""The devices of a job's segment: made, refused, and removed, on real network namespaces."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import force_setattr
from network_lab import (
    VNI,
    Host,
    build,
    first_node,
    inside,
    lease_of,
    plan_of,
    real_cluster,
    usable,
)

from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Lease
from vhpc_slurm.node.network import firewall, plan, segment, tools

pytestmark = pytest.mark.skipif(bool(usable()), reason=usable())

cluster = real_cluster
n1 = first_node


def left(host: Host) -> dict[str, list[str]]:
    """Interfaces and tables, by generation."""
    with inside(host.namespace):
        found = {str(generation): list(names) for generation, names in segment.held().items()}
        for generation in firewall.tables():
            found.setdefault(str(generation), []).append("table")
        return found


def test_a_release_leaves_nothing_and_can_be_repeated(n1: Host) -> None:
    lease, other = lease_of(1, VNI, "n1", "n2"), lease_of(2, VNI + 1, "n1")
    build(n1, lease)
    build(n1, other)
    assert sorted(left(n1)) == [str(lease.generation), str(other.generation)]
    with inside(n1.namespace):
        for _ in range(2):
            segment.release(lease.generation, VNI)
            assert list(segment.held()) == list(firewall.tables()) == [other.generation]
        segment.release(other.generation, VNI + 1)
    assert left(n1) == {}


@pytest.mark.promise("net.killed")
def test_the_release_leaves_nothing_after_any_failed_step(n1: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    real, calls = tools.run, 0

    def failing(*words: str, **how: Any) -> str:
        nonlocal calls
        calls += 1
        data = how.get("data", "")
        if calls == dies_at and data:  # half of a batch was done, as after kill -9
            how["data"] = "\n".join(data.splitlines()[: len(data.splitlines()) // 2]) + "\n"
            if words[0] != "nft":  # nft does all or nothing
                real(*words, **how)
        if calls == dies_at:
            raise NodeError("ended here")
        return real(*words, **how)

    dies_at = 0
    while True:
        dies_at, calls = dies_at + 1, 0
        monkeypatch.setattr(tools, "run", failing)
        try:
            build(n1, lease)
        except NodeError:
            monkeypatch.setattr(tools, "run", real)
            with inside(n1.namespace):
                segment.release(lease.generation, VNI)
            assert left(n1) == {}, f"after command {dies_at}"
        else:
            break
    assert dies_at > 6


def test_a_job_of_a_thousand_nodes_takes_no_more_processes(n1: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tools.run, list[str]()

    def counting(*words: str, **how: Any) -> str:
        calls.append(words[0])
        return real(*words, **how)

    monkeypatch.setattr(tools, "run", counting)
    counts = []
    for nodes in (2, 1000):
        lease = lease_of(1, VNI, *(f"n{number}" for number in range(1, nodes + 1)))
        assert lease.segment is not None
        others = tuple(f"10.9.{number // 250}.{number % 250 + 1}" for number in range(1, nodes))
        force_setattr(lease.segment, "underlay", ("192.0.2.1", *others))
        calls.clear()
        build(n1, lease)
        counts.append(len(calls))
        with inside(n1.namespace):
            entries = tools.run("bridge", "fdb", "show", "dev", plan.vxlan_name(VNI))
            assert entries.count(" dst ") == nodes - 1
            found = tools.run("ip", "neighbour", "show", "dev", plan.bridge_name(VNI))
            assert found.count("PERMANENT") == 2 * (nodes - 1)
            segment.release(lease.generation, VNI)
    assert counts[0] == counts[1]


def test_a_vni_in_use_on_the_node_is_refused_and_not_changed(n1: Host) -> None:
    old, new = lease_of(1, VNI, "n1"), lease_of(2, VNI, "n1")
    build(n1, old)
    with pytest.raises(FabricError, match=r"VNI 5000 is still in use on n1: interfaces of 1\.0\.00000001"):
        build(n1, new)
    with inside(n1.namespace):
        segment.release(new.generation, VNI)
    assert list(left(n1)) == [str(old.generation)]


def test_a_kernel_that_does_not_lock_ports_is_refused(n1: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tools.query

    def old(program: str, *words: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in one.items() if k != "locked"} for one in real(program, *words)]

    monkeypatch.setattr(tools, "query", old)
    with pytest.raises(NodeError, match="did not lock bridge port"):
        build(n1, lease_of(1, VNI, "n1"))


def test_without_nftables_only_a_trusted_underlay_has_networks(
    n1: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = tools.find
    monkeypatch.setattr(tools, "find", lambda program: None if program == "nft" else find(program))
    with pytest.raises(NodeError, match="job networks need nftables"):
        build(n1, lease_of(1, VNI, "n1"))
    assert left(n1) == {}
    build(n1, lease_of(1, VNI, "n1"), trusted=True)
    assert len(left(n1)["1.0.00000001"]) == 3


def test_the_mtu_is_the_rest_of_the_underlays_mtu(n1: Host) -> None:
    def mtu(lease: Lease) -> int:
        found = plan_of(lease, "n1").segment
        assert found is not None
        with inside(n1.namespace):
            return segment.underlay_mtu(found)

    assert mtu(lease_of(1, VNI, "n1")) == 1450
    n1.run("ip", "link", "set", "under0", "mtu", "1300")
    try:
        with pytest.raises(NodeError, match="leaves guests an MTU of 1250"):
            mtu(lease_of(1, VNI, "n1"))
    finally:
        n1.run("ip", "link", "set", "under0", "mtu", "1500")
    wrong = lease_of(1, VNI, "n1")
    assert wrong.segment is not None
    force_setattr(wrong.segment, "underlay", ("192.0.2.99",))
    with pytest.raises(NodeError, match=r"does not have the underlay address 192\.0\.2\.99"):
        mtu(wrong)
