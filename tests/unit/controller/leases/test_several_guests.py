# SPDX-License-Identifier: Apache-2.0
"""Several guests of a job on each node: names, ranks, addresses, ports, GPUs, consoles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from controller_lab import Alone, allocation, identity, request
from device_rig import GENERATION, Rig, machine
from job_devices import IB, gpus, host, lease, prepare, vfs

from vhpc_slurm.controller.store.database import SqliteStore
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric import numbers
from vhpc_slurm.fabric.backend import KeyPolicy, NoNetwork
from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.hooks import slurmctld, statefields
from vhpc_slurm.hooks.common import HookEnv
from vhpc_slurm.model import GresAllocation, Lease, NetworkIdentity
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import identities
from vhpc_slurm.node.guest import console, ports
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.slurm.port import SlurmJob

TWO = replace(request(), guests_per_node=2)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with machine(tmp_path) as found:
        yield found


def two_guests(*gres: GresAllocation, net: NetworkIdentity = IB) -> Lease:
    one = lease(*gres, net=net)
    return replace(one, request=replace(one.request, guests_per_node=2))


def test_guests_are_called_after_their_node_and_place() -> None:
    nodes = allocation("n1", "gpu-7")
    assert nodes.guests(1) == ("n1", "gpu-7")
    assert nodes.guests(3) == ("n1-g0", "n1-g1", "n1-g2", "gpu-7-g0", "gpu-7-g1", "gpu-7-g2")


def test_each_guest_has_a_rank_and_an_address_on_the_jobs_key() -> None:
    policy = KeyPolicy(KeyPool(0x1000, 0x1003), network=IPv4Network("10.128.0.0/12"))
    network, assignment = policy.plan(GENERATION, TWO, allocation("n1", "n2"), KeySnapshot(0), "job 1")
    assert assignment is not None
    assert assignment.ranks == 4
    assert network.addresses == (
        ("n1-g0", "10.128.0.1"),
        ("n1-g1", "10.128.0.2"),
        ("n2-g0", "10.128.0.3"),
        ("n2-g1", "10.128.0.4"),
    )
    assert len(set(assignment.port_guids())) == 4


def test_each_guest_has_ports_of_its_own_where_they_are_of_a_map() -> None:
    ports = PortMap("ports", {("n1", 0): (0x101, 0x102, 0x103), ("n2", 0): (0x201, 0x202)})
    policy = KeyPolicy(KeyPool(0x1000, 0x1003), ports=ports, in_guests=True)
    network, assignment = policy.plan(GENERATION, TWO, allocation("n1", "n2"), KeySnapshot(0), "job 1")
    assert assignment is not None
    assert assignment.ports == (0x101, 0x102, 0x201, 0x202)
    assert [[int(word, 16) for word in row] for row in network.port_guids] == [
        [0x101], [0x102], [0x201], [0x202],
    ]  # fmt: skip
    with pytest.raises(FabricError, match="ports has 2 ports of node n2 on rail 0: each of 3 guests has 1"):
        policy.plan(
            GENERATION, replace(TWO, guests_per_node=3), allocation("n1", "n2"), KeySnapshot(0), "job 1"
        )


@pytest.mark.promise("place.guests")
def test_functions_of_two_guests_have_identities_of_two_ranks(rig: Rig) -> None:
    what = two_guests(gpus(0, 1), vfs(2))
    plan, snapshot = prepare(rig, what)
    assert [guest.hostname for guest in plan.guests] == ["n1-g0", "n1-g1"]
    found = identities.of_plan(what, plan, host(rig))
    # first rank 3, n1 is the second node: its guests are number 2 and 3 of the job
    assert sorted(one.port_guid for one in found.values()) == [
        numbers.port_guid(0x1234, 0, 5, 0),
        numbers.port_guid(0x1234, 0, 6, 0),
    ]
    for guest, rank in zip(plan.guests, (5, 6), strict=True):
        assert guest.port_guids == (numbers.port_guid(0x1234, 0, rank, 0),)
    # a GPU and a function each, and Slurm's number of each guest's GPU
    assert [sorted(device.device_class for device in guest.devices) for guest in plan.guests] == [
        ["gpu", "vf"]
    ] * 2
    assert sorted(statefields.gpu_indexes(rig.layout, plan)) == [[0], [1]]
    assert [reservation.guest for reservation in reservations.live(rig.layout)] == [0, 1]
    snapshot.close()
    teardown.clear(rig.layout, GENERATION, "n1")
    assert reservations.live(rig.layout) == ()


def test_a_guest_shows_the_port_of_its_own_row(rig: Rig) -> None:
    rows = tuple((f"0x{number:016x}",) for number in (1, 2, 3, 4))
    what = two_guests(net=replace(IB, port_guids=rows, in_guests=True))
    plan, _ = prepare(rig, what)
    assert [guest.port_guids for guest in plan.guests] == [(3,), (4,)]


def test_addresses_are_found_by_the_guests_names() -> None:
    what = two_guests(net=replace(IB, addresses=(("n1-g0", "10.0.0.5"), ("n1-g1", "10.0.0.6")), prefix=8))
    assert ports.address_of(what, "n1-g1") == "10.0.0.6/8"
    assert ports.address_of(what, "n1") == ""


def test_vhpcd_takes_no_number_that_no_node_could_have() -> None:
    service = Alone(SqliteStore(":memory:"), NoNetwork(), reserve_mib=0)
    for number in (0, -1, 65, 1 << 40):
        with pytest.raises(FabricError, match="a node has 1 to 64 guests"):
            service.open(replace(request(), guests_per_node=number), allocation("n1"), identity())
    assert service.open(replace(TWO, guests_per_node=64), allocation("n1"), identity(0)).lease.request


def test_the_number_of_guests_is_checked_again_by_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cast(
        SlurmJob,
        SimpleNamespace(
            uid=1, gid=1, user="a", work_dir="/", name="", partition="", het=None, account="", qos=""
        ),
    )
    env = HookEnv(7, 0, "")
    monkeypatch.setenv("SPANK_VHPC_IMAGE", "tiny:1")
    assert slurmctld._request(env, job).guests_per_node == 1
    monkeypatch.setenv("SPANK_VHPC_GUESTS_PER_NODE", "64")
    assert slurmctld._request(env, job).guests_per_node == 64
    for text in ("0", "65", "-1", "2 guests", "٣"):
        monkeypatch.setenv("SPANK_VHPC_GUESTS_PER_NODE", text)
        with pytest.raises(UserError, match=r"--vhpc-guests-per-node=.*whole number"):
            slurmctld._request(env, job)


def test_each_guest_has_a_console_of_its_own(tmp_path: Path) -> None:
    for name, text in (("g0", "zero"), ("g1", ""), ("g10", "ten"), ("g2", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "console.log").write_text(text)
    (tmp_path / "state").write_text("")
    assert console.of_guests(tmp_path) == [
        (index, tmp_path / f"g{index}/console.log") for index in (0, 1, 2, 10)
    ]
    asked: Any = replace(request(), console="%j-%N.log")
    assert console.user_path(asked, "n1") == "/home/alice/42-n1.log"
    assert console.user_path(asked, "n1", 2) == "/home/alice/42-n1.log.g2"
