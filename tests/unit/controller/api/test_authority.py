# SPDX-License-Identifier: Apache-2.0
"""Authority for requests to vhpcd by the address that they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from address_rig import Asked, hosts
from controller_lab import allocation, request

from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import (
    authority,
    checkpoint_messages,
    cluster_messages,
    status_messages,
    usage_messages,
)
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.authority import Authority, Origin
from vhpc_slurm.errors import FabricError
from vhpc_slurm.slurm.port import Slurm, SlurmNode

pytestmark = pytest.mark.promise("attack.boot-word")

NODE_GROUPS = wire_types.pack_allocation(allocation("n1"))
TIMELINE = wire_types.TimelineWire(generation="1.0.00000001", node="n1", stages=())
OF_NODES: list[wire.Request] = [
    wire.GetLease(job_id=1, restart=0, node="n1", wait_s=0.0, stage="agent g0"),
    wire.GetLease(job_id=1, restart=None, node="n1", wait_s=1.0),
    wire.Acknowledge(generation="1.0.00000001", node="n1", clean=True),
    wire.Together(requests=(wire.Acknowledge(generation="1.0.00000001", node="n1", clean=True),)),
    wire.ReportTimeline(timeline=TIMELINE),
    wire.ReportReady(generation="1.0.00000001", node="n1", state="passed"),
    usage_messages.ReportUsage(generation="1.0.00000001", node="n1", guests=()),
    usage_messages.ReportUsageSoFar(node="n1", used=()),
    status_messages.ReportQuarantine(node="n1", devices=()),
    checkpoint_messages.AskOrder(generation="1.0.00000001", node="n1"),
    cluster_messages.AskRoster(generation="1.0.00000001", node="n1"),
]
OF_THE_CONTROLLER: list[wire.Request] = [
    wire.OpenGeneration(request=request(), node_groups=NODE_GROUPS),
    wire.WithoutGuests(leader=1, offset=1),
    wire.Ending(job_id=1, restart=None),
    wire.Fence(node="n1"),
    wire.ClearKey(generations=()),
    wire.TellFabric(),
]
OF_ANYBODY: list[wire.Request] = [
    wire.GetLease(job_id=1, restart=None, node="n1", wait_s=0.0),
    wire.ListLeases(),
    wire.ListTimelines(),
    usage_messages.AskUsage(job_id=1),
    wire.ListReports(job_id=1),
    wire.AskStatus(),
    status_messages.AskTrouble(),
    wire.AsUser(uid=2001, request=wire.ListLeases()),
    checkpoint_messages.SaveJob(job_id=1),
    checkpoint_messages.ListCheckpoints(),
    checkpoint_messages.RemoveCheckpoints(names=("a",)),
    checkpoint_messages.KnownCheckpoints(serials=()),
    cluster_messages.ListClusters(),
    cluster_messages.ListClusterJobs(cluster=1),
    cluster_messages.KeepCluster(name="a"),
    cluster_messages.RemoveCluster(cluster=1),
]


def test_each_kind_of_request_has_an_authority() -> None:
    kinds = {type(one) for one in (*OF_NODES, *OF_THE_CONTROLLER, *OF_ANYBODY)}
    assert kinds == set(wire.Request.__args__)


def test_requests_in_one_credential_are_of_one_node(tmp_path: Path) -> None:
    own, others = (
        wire.Acknowledge(generation="1.0.00000001", node=node, clean=True) for node in ("n1", "n2")
    )
    assert says(tmp_path, wire.Together(requests=(own, own)), Origin("10.77.0.11", own_host=False)) == ""
    said = says(tmp_path, wire.Together(requests=(own, others)), Origin("10.77.0.11", own_host=False))
    assert "may not send requests of node n2" in said


def says(
    tmp_path: Path, body: wire.Request, origin: Origin, slurm: Asked | None = None, **settings: Any
) -> str:
    """Why it is refused; empty where it is not."""

    async def check() -> str:
        one = Authority(hosts(tmp_path, slurm, **settings))
        try:
            await one.check(body, origin)
        except FabricError as err:
            return err.line()
        finally:
            one.close()
        return ""

    return asyncio.run(check())


def kind_of(body: wire.Request) -> str:
    return type(body).__name__


@pytest.mark.parametrize("body", OF_NODES, ids=kind_of)
def test_a_node_speaks_for_itself_and_for_no_other(tmp_path: Path, body: wire.Request) -> None:
    assert says(tmp_path, body, Origin("10.77.0.11", own_host=False)) == ""
    for address in ("10.78.0.12", "10.77.0.2", "192.0.2.1"):
        line = says(tmp_path, body, Origin(address, own_host=False))
        assert line == (
            f"{address} may not send requests of node n1: Slurm has the node at 10.77.0.11 (if the "
            "node has this address, add it to controller.node_names or node_addresses in vhpcd's vhpc.toml)"
        )
    assert says(tmp_path, body, Origin("127.0.0.1", own_host=True)) == "", (
        "root of vhpcd's host has all leases"
    )
    other = Origin("10.99.0.1", own_host=False)
    assert says(tmp_path, body, other, node_addresses=("n1=10.99.0.1",)) == ""


@pytest.mark.parametrize("body", OF_THE_CONTROLLER, ids=kind_of)
def test_requests_of_the_controller_come_from_its_host(tmp_path: Path, body: wire.Request) -> None:
    for address in ("10.77.0.2", "fd00::2", "10.77.0.3"):
        assert says(tmp_path, body, Origin(address, own_host=False)) == ""
    assert says(tmp_path, body, Origin("127.0.0.1", own_host=True)) == ""
    line = says(tmp_path, body, Origin("10.77.0.11", own_host=False))
    assert line.startswith(
        "10.77.0.11 may not send requests of the controller: it is neither vhpcd's own host nor one of "
    )
    assert "controller.controller_addresses" in line
    assert (
        says(tmp_path, body, Origin("10.77.0.11", own_host=False), controller_addresses=("10.77.0.11",)) == ""
    )


@pytest.mark.parametrize("body", OF_ANYBODY, ids=kind_of)
def test_reading_requests_may_come_from_any_host(tmp_path: Path, body: wire.Request) -> None:
    slurm = Asked()
    assert says(tmp_path, body, Origin("192.0.2.1", own_host=False), slurm) == ""
    assert slurm.count == 0


def test_a_node_unknown_to_slurm_is_reported(tmp_path: Path) -> None:
    body = wire.Acknowledge(generation="1.0.00000001", node="n7", clean=True)
    assert (
        says(tmp_path, body, Origin("10.77.0.11", own_host=False)) == "Slurm has no node n7 (see: sinfo -N)"
    )


@pytest.mark.promise("attack.no-slurm")
def test_without_slurm_only_the_own_host_is_trusted(tmp_path: Path) -> None:
    slurm = Asked(fails="no answer within 5 s")
    for body in (*OF_NODES, *OF_THE_CONTROLLER):
        line = says(tmp_path, body, Origin("10.77.0.11", own_host=False), slurm)
        assert line == (
            "vhpcd does not know the addresses of Slurm's hosts, so it cannot check the sender: "
            "sinfo failed: no answer within 5 s (see controller.slurm_bin in vhpc.toml, and the log of vhpcd)"
        )
        assert says(tmp_path, body, Origin("127.0.0.1", own_host=True), slurm) == ""


def test_a_moved_node_is_found_without_asking_for_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Asked()
    now = 0.0

    async def ask() -> None:
        nonlocal now
        one = Authority(hosts(tmp_path, slurm), clock=lambda: now)
        here, there = Origin("10.77.0.11", own_host=False), Origin("10.77.0.55", own_host=False)
        try:
            await one.check(OF_NODES[1], here)
            assert slurm.count == 1
            slurm.nodes_[0] = SlurmNode("n1", address="10.77.0.55", hostname="10.77.0.55")
            with pytest.raises(FabricError):
                await one.check(OF_NODES[1], there)
            assert slurm.count == 1, "it was asked a moment ago"
            now = authority.SOON_S + 0.1
            results = await asyncio.gather(
                *(one.check(OF_NODES[1], there) for _ in range(20)), return_exceptions=True
            )
            assert results == [None] * 20
            assert slurm.count == 2, "all share one question"
            assert one.knows("10.77.0.55")
            assert not one.knows("10.77.0.11")
        finally:
            one.close()

    asyncio.run(ask())


def test_slurm_is_polled_and_sooner_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "SOON_S", 0.0)
    monkeypatch.setattr(authority, "AGAIN_S", 0.05)
    slurm = Asked(fails="down")

    async def learn() -> None:
        one = Authority(hosts(tmp_path, slurm))
        task = asyncio.create_task(one.keep_learning())
        try:
            await _until(lambda: slurm.count >= 3)
            slurm.fails = ""
            await _until(lambda: one.knows("10.77.0.11"))
            count = slurm.count
            await asyncio.sleep(0.3)
            assert slurm.count <= count + 1, "once it has worked it is not asked so often"
        finally:
            task.cancel()
            one.close()

    asyncio.run(asyncio.wait_for(learn(), 20))


async def _until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.01)


def test_the_fake_implements_slurms_port() -> None:
    assert {"nodes", "controllers"} <= {name for name in dir(Slurm) if not name.startswith("_")}
