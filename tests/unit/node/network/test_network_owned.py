# SPDX-License-Identifier: Apache-2.0
"""Copies of nftables tables that a site's ``flush ruleset`` leaves in place, in a real kernel."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from controller_lab import wait_for
from network_lab import (
    PAYLOAD,
    QUIET_S,
    TEST,
    VNI,
    Cluster,
    Host,
    Pair,
    first_node,
    injected,
    inside,
    ours,
    plan_of,
    real_cluster,
    real_pair,
    second_node,
    usable,
)

from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.host import process
from vhpc_slurm.node.network import firewall, nat, owned, plan, segment, tools

pytestmark = [pytest.mark.promise("net.flush"), pytest.mark.skipif(bool(usable()), reason=usable())]

cluster = real_cluster
n1 = first_node
n2 = second_node
pair = real_pair
GENERATION, OTHER = Generation(42, 0, "0123abcd"), Generation(43, 0, "0123abcd")
RULES = nat.Rules(dns=(), allow=(), deny=("192.0.2.0/24",), port=7634)
GID = 4_100_003


def hold(host: Host, found: Pair) -> process.ProcessRef:
    there = plan_of(found.lease, host.name).segment
    assert there is not None
    with inside(host.namespace):
        return firewall.hold(found.lease.generation, there, plan.peers(found.lease, host.name))


@pytest.fixture
def held(pair: Pair, n2: Host) -> Iterator[process.ProcessRef]:
    ref = hold(n2, pair)
    yield ref
    process.end(ref)


def test_a_segment_is_protected_after_a_flush(
    pair: Pair, held: process.ProcessRef, cluster: Cluster, n2: Host
) -> None:
    n2.run("nft", "flush", "ruleset")
    with inside(n2.namespace):
        assert firewall.tables() == {}
    for _ in range(2):
        cluster.third.send(injected(pair), VNI, n2.address)
        n2.send(injected(pair), VNI, n2.address, uid=65534)
    assert pair.two.heard(ours, QUIET_S) == []
    pair.one.send(pair.two.mac, TEST, PAYLOAD)
    assert pair.two.heard(ours), "the job's own frames arrive"
    with pytest.raises(subprocess.CalledProcessError):
        n2.run("nft", "delete", "table", "inet", owned.name_of(firewall.table_name(pair.lease.generation)))
    # the control: without the process the frame arrives
    process.end(held)
    cluster.third.send(injected(pair), VNI, n2.address)
    assert pair.two.heard(ours)


def test_the_tables_stay_when_the_process_is_killed(
    pair: Pair, held: process.ProcessRef, cluster: Cluster, n2: Host
) -> None:
    with inside(n2.namespace):
        before = firewall.tables()
        firewall.apply(pair.lease.generation, plan_of(pair.lease, "n2").segment, ("192.0.2.1",))  # type: ignore[arg-type]
        os.kill(held.pid, signal.SIGKILL)
        wait_for(lambda: not owned.existing(), "the copies stay after their process")
        assert firewall.tables() == before
    cluster.third.send(injected(pair), VNI, n2.address)
    assert pair.two.heard(ours, QUIET_S) == []


def test_a_release_ends_the_process_and_nothing_else(pair: Pair, n2: Host) -> None:
    generation, other = pair.lease.generation, Generation(7, 0, "0" * 8)
    first = hold(n2, pair)
    again = hold(n2, pair)
    assert not process.alive(first), "there is one process for a table"
    with inside(n2.namespace):
        passts = [nat.hold(GENERATION, index, GID + index, RULES) for index in (0, 1)]
        try:
            assert owned.existing() == {
                *((family, firewall.table_name(generation)) for family in firewall.FAMILIES),
                *(("inet", nat.table_name(GENERATION, index)) for index in (0, 1)),
            }
            owned.end(other, firewall.table_name(generation))
            assert process.alive(again)
            for _ in range(2):
                segment.release(generation, VNI)
            assert not process.alive(again)
            nat.release(GENERATION, 0)
            assert [process.alive(ref) for ref in passts] == [False, True]
            assert owned.existing() == {("inet", nat.table_name(GENERATION, 1))}
        finally:
            nat.release(GENERATION, 1)
        assert owned.existing() == frozenset()


def test_commands_that_nft_refuses_leave_no_process(n1: Host) -> None:
    with inside(n1.namespace):
        with pytest.raises(NodeError, match=r"does not make a table .*Error: "):
            owned.hold(OTHER, "vhpctest", ("inet",), "table inet vhpctest_owned { flags none; }\n")
        assert list(process.marked(str(OTHER))) == []
        assert owned.existing() == frozenset()


def test_a_process_that_is_stopped_keeps_its_table(n1: Host) -> None:
    """It only waits, so nothing that slows it down opens the filter."""
    with inside(n1.namespace):
        ref = nat.hold(GENERATION, 0, GID, RULES)
        os.kill(ref.pid, signal.SIGSTOP)
        tools.run("nft", "flush", "ruleset")
        assert owned.existing() == {("inet", nat.table_name(GENERATION, 0))}
        nat.release(GENERATION, 0)
        assert owned.existing() == frozenset()
