# SPDX-License-Identifier: Apache-2.0
"""The agent holds the guest's InfiniBand ports against the lease; real programs, a made tree."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, cast

import pytest
from controller_lab import allocation, identity, request
from guest_processes import CONTROL_OPERATIONS

from hca_tree import HcaTree
from pace import limit
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import backend, partitions, select
from vhpc_slurm.fabric.backend import KeyPolicy
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.model import (
    Generation,
    GuestPlan,
    GuestTopology,
    Lease,
    LeaseState,
    NodePlan,
)
from vhpc_slurm.node.guest import ports
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, GuestChannel

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
pytestmark = CONTROL_OPERATIONS

WAIT_S = 30
GUID, OTHER = 0x02CC_1000_0000_0000, 0x02CC_1000_0100_0000
KEYS = (0x9000, 0x7FFF)


@pytest.fixture
def tree(guest: Guest) -> HcaTree:
    return HcaTree(guest.sysfs)


def test_correct_ports_are_named_with_their_key_index(guest: Guest, tree: HcaTree) -> None:
    tree.add("mlx5_0", GUID, (0x7FFF, 0x9000))
    tree.add("mlx5_1", OTHER, KEYS)
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        assert channel.fabric(KEYS, (OTHER, GUID), WAIT_S).ports == (("mlx5_1:1", 0), ("mlx5_0:1", 1))
        assert channel.ping() < WAIT_S


def test_the_agent_serves_others_while_it_waits_for_the_port(guest: Guest, tree: HcaTree) -> None:
    found: list[tuple[tuple[str, int], ...]] = []

    def ask() -> None:
        with GuestChannel.connect(guest.socket, WAIT_S) as channel:
            found.append(channel.fabric(KEYS, (GUID,), WAIT_S).ports)

    asking = threading.Thread(target=ask)
    asking.start()
    tree.add("mlx5_0", 0, (), "1: DOWN")
    assert guest.run("echo", "meanwhile").stdout == b"meanwhile\n"
    tree.clear()
    tree.add("mlx5_0", GUID, (0x7FFF,), "2: INIT")
    with GuestChannel.connect(guest.socket, WAIT_S) as second:
        with pytest.raises(ChannelRefusedError, match="another fabric request is still waiting"):
            second.fabric(KEYS, (GUID,), WAIT_S)
        assert found == []
    tree.set_keys("mlx5_0", KEYS)
    assert found == []
    tree.set_state("mlx5_0", "4: ACTIVE")
    asking.join(WAIT_S)
    assert found == [(("mlx5_0:1", 0),)]


def test_a_port_that_stays_wrong_is_shown_unchanged(guest: Guest, tree: HcaTree) -> None:
    tree.add("mlx5_0", GUID, (0xFFFF,))
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError) as caught:
            channel.fabric(KEYS, (GUID,), 0.3)
        assert caught.value.why == ("mlx5_0 port 1 has the keys 0xffff, and should have 0x9000 0x7fff")
        # and then programs are told nothing
        assert guest.run("sh", "-c", "echo $VHPC_PKEY.").stdout == b".\n"


def test_a_client_that_disconnects_is_forgotten(guest: Guest, tree: HcaTree) -> None:
    with (
        GuestChannel.connect(guest.socket, WAIT_S) as channel,
        pytest.raises(ChannelError, match="no answer"),
    ):
        # the guest would wait for ten minutes, and the client does for one second
        channel.fabric(KEYS, (GUID,), 600.0, timeout_s=-599.0)
    tree.add("mlx5_0", GUID, KEYS)
    until = time.monotonic() + limit(WAIT_S)
    while True:  # the agent hears of the end a little later
        try:
            with GuestChannel.connect(guest.socket, WAIT_S) as channel:
                assert channel.fabric(KEYS, (GUID,), WAIT_S).ports == (("mlx5_0:1", 0),)
                return
        except ChannelRefusedError:
            assert time.monotonic() < until


@pytest.mark.parametrize(
    ("keys", "guids", "wait_s"),
    [
        ((), (GUID,), 1.0),
        (KEYS, (), 1.0),
        ((0x8000,), (GUID,), 1.0),
        (KEYS, (0,), 1.0),
        (KEYS, (GUID,), 601.0),
        (KEYS, tuple(range(1, 258)), 1.0),
        (tuple(range(1, 34)), (GUID,), 1.0),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    guest: Guest, keys: tuple[int, ...], guids: tuple[int, ...], wait_s: float
) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError):
            channel.fabric(keys, guids, wait_s)
        assert channel.ping() < WAIT_S


def test_programs_get_the_variables_and_users_values_stay(guest: Guest, tree: HcaTree) -> None:
    tree.add("mlx5_3", GUID, KEYS)
    show = ("sh", "-c", "env | grep -E '^(VHPC_PKEY|UCX_|NCCL_|OMPI_)' | sort")
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        channel.fabric(KEYS, (GUID,), WAIT_S)
    assert guest.run(*show).stdout.decode().splitlines() == [
        "NCCL_IB_HCA==mlx5_3:1",
        "NCCL_IB_PKEY=0",
        "OMPI_MCA_btl_openib_pkey=0x1000",
        "UCX_IB_PKEY=0x1000",
        "UCX_NET_DEVICES=mlx5_3:1",
        "VHPC_PKEY=0x1000",
    ]
    mine = guest.run(*show, UCX_NET_DEVICES="all", NCCL_IB_PKEY="7").stdout.decode().splitlines()
    assert "UCX_NET_DEVICES=all" in mine
    assert "NCCL_IB_PKEY=7" in mine
    assert "UCX_IB_PKEY=0x1000" in mine


@pytest.mark.promise("fabric.address")
def test_the_interface_with_the_key_is_taken_or_asked_for(guest: Guest, tree: HcaTree) -> None:
    tree.add("mlx5_0", GUID, KEYS)
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError) as caught:
            channel.fabric(KEYS, (GUID,), 0.0, "10.128.0.1/12")
        assert caught.value.why == "mlx5_0 port 1 has no IPoIB interface (does the image have ib_ipoib?)"
        tree.add_interface("mlx5_0", "ib0", 0xFFFF)
        with pytest.raises(ChannelRefusedError, match="ib0 has no interface with the key 0x9000"):
            channel.fabric(KEYS, (GUID,), 0.0, "10.128.0.1/12")
        assert (tree.root / "class/net/ib0/create_child").read_text() == "0x9000"
        tree.add_interface("mlx5_0", "ib0.9000", 0x9000, parent=False)
        found = channel.fabric(KEYS, (GUID,), WAIT_S, "10.128.0.1/12")
        assert found == ((("mlx5_0:1", 0),), "ib0.9000")


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "10.0.0.1/", "10.0.0.1/32", "10.0.0/8", "x/8", "10.0.0.1/8 "]
)
def test_an_invalid_address_of_a_peer_is_refused(guest: Guest, tree: HcaTree, address: str) -> None:
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(ChannelRefusedError, match="ADDRESS is not"):
            channel.fabric(KEYS, (GUID,), 0.0, address)
        assert channel.ping() < WAIT_S


# --- from the lease to the question ------------------------------------------------------------


def a_lease(policy: KeyPolicy, *nodes: str) -> Lease:
    made = Generation(42, 0, "0" * 8)
    network, _ = policy.plan(made, request(), allocation(*nodes), KeySnapshot(0), "job 1")
    return Lease(made, LeaseState.READY, request(), allocation(*nodes), identity(), network)


PORTS = PortMap("ports", {("n1", 0): (0x0002C90300000101,), ("n2", 0): (0x0002C90300000201,)})
POLICY = KeyPolicy(KeyPool(0x1000, 0x1003), ports=PORTS, in_guests=True)
SITE = partitions.parse(
    b"Default=0x7fff, ipoib :\n    ALL=limited, SELF=full ;\n"
    b"storage=0x0010 :\n    0x0002c90300000201=limited, 0x0002c90300000301=full ;\n"
    b"others=0x0011 :\n    0x0002c90300000302=full ;\n"
)[1:]


def a_guest() -> GuestPlan:
    """Without devices of its own."""
    return GuestPlan(0, "n2", (), GuestTopology(1, 1, 1, 1), (), 512, (), "")


def expected(lease: Lease, node: str) -> tuple[int, ...]:
    guest = a_guest()
    plan = NodePlan(lease.generation, node, (guest,), 512, 0)
    return ports.expected(lease, plan, guest)


def test_ports_of_guests_are_those_of_lease_and_node() -> None:
    assert expected(a_lease(POLICY, "n1", "n2"), "n2") == (0x0002C90300000201,)


def test_a_guest_without_assigned_ports_has_no_port() -> None:
    assert expected(a_lease(replace(POLICY, in_guests=False), "n1", "n2"), "n2") == ()
    assert expected(a_lease(replace(POLICY, in_guests=False, ports=None), "n1", "n2"), "n2") == ()


def test_site_partition_keys_are_expected_on_all_job_ports() -> None:
    policy = replace(POLICY, site=SITE)
    assert a_lease(policy, "n2").network.site_keys == (0x0010,)
    assert a_lease(policy, "n1", "n2").network.site_keys == ()


def test_guests_have_addresses_by_their_ranks() -> None:
    policy = replace(POLICY, ports=None, in_guests=False, network=IPv4Network("10.128.0.0/29"))
    lease = a_lease(policy, "n1", "n2")
    assert lease.network.addresses == (("n1", "10.128.0.1"), ("n2", "10.128.0.2"))
    assert ports.address_of(lease, "n2") == "10.128.0.2/29"
    assert ports.address_of(a_lease(POLICY, "n1"), "n1") == ""
    # another job of the same user, on the same key
    assignment = KeyAssignment(Generation(1, 0, "0" * 8), 0x1000, "user 2001", 4, 2, 1, 1)
    assert backend.addresses_of(IPv4Network("10.128.0.0/29"), assignment, ("n1", "n3")) == (
        ("n1", "10.128.0.5"),
        ("n3", "10.128.0.6"),
    )
    with pytest.raises(FabricError, match="has no address for guest 7"):
        backend.addresses_of(IPv4Network("10.128.0.0/29"), replace(assignment, first_rank=5), ("n1", "n3"))


@pytest.mark.parametrize("text", ["10.128.0.0", "10.128.0.1/8", "10.0.0.0/31", "0.0.0.0/0", "fd00::/8", "x"])
def test_an_invalid_network_is_refused_when_vhpcd_starts(text: str) -> None:
    with pytest.raises(FabricError, match=r"fabric\.ipoib_network"):
        select.ipoib_network(Fabric(ipoib_network=text))
    assert select.ipoib_network(Fabric(ipoib_network="10.128.0.0/12")) == IPv4Network("10.128.0.0/12")
    with pytest.raises(FabricError, match=r"needs fabric\.ipoib"):
        select.ipoib_network(Fabric(ipoib_network="10.128.0.0/12", ipoib=False))


def test_a_job_with_ports_not_isolated_fails_with_the_cause(guest: Guest, tree: HcaTree) -> None:
    lease = a_lease(replace(POLICY, site=SITE), "n2")
    tree.add("mlx5_0", 0x0002C90300000201, KEYS)
    with GuestChannel.connect(guest.socket, WAIT_S) as channel:
        with pytest.raises(UserError) as caught:
            ports.find(lease, "n2", (0x0002C90300000201,), channel, wait_s=0.5, timeout_s=WAIT_S)
        assert caught.value.line() == (
            "the job's InfiniBand is not isolated on n2: its guest sees: mlx5_0 port 1 has the keys "
            "0x9000 0x7fff, and should have 0x9000 0x7fff 0x0010 (nothing was started; tell your operator)"
        )
        tree.set_keys("mlx5_0", (*KEYS, 0x0010))
        ports.find(lease, "n2", (0x0002C90300000201,), channel, wait_s=WAIT_S, timeout_s=WAIT_S)


def test_an_agent_that_does_not_know_the_question_is_too_old() -> None:
    class Old:
        def fabric(self, *_: object, **__: object) -> None:
            # as an agent of 0.1.0 answers to operation 6
            raise ChannelRefusedError(
                "guest operation fabric failed", 38, "operation 6 is unknown to this agent"
            )

    with pytest.raises(UserError, match="older than this check"):
        ports.find(a_lease(POLICY, "n1"), "n1", (GUID,), cast(GuestChannel, Old()), wait_s=1.0, timeout_s=1.0)


def test_ports_reach_guests_only_where_the_site_lists_them() -> None:
    with pytest.raises(FabricError, match=r"in_guests needs fabric\.port_map"):
        select.port_map(Fabric(backend="opensm-file", in_guests=True))
