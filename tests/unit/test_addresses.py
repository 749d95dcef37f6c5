# SPDX-License-Identifier: Apache-2.0
"""Where Slurm's hosts are, and who may say what from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from controller_lab import allocation, request
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.config import Controller
from vhpc_slurm.controller import wire_types
from vhpc_slurm.controller.api import authority
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api.addresses import HostAddresses, plain, resolve
from vhpc_slurm.controller.api.authority import Authority, Origin
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.slurm.hosts import parse_controllers, parse_nodes
from vhpc_slurm.slurm.port import Slurm, SlurmError, SlurmNode

# As Debian's Slurm 24.11.5 prints them; a node of two partitions is there twice.
SINFO = "n1|n1|10.77.0.11\nn1|n1|10.77.0.11\nn2|host2|n2-admin\n"
CONFIG = """\
Configuration data as of 2026-11-22T07:26:58
SlurmUser               = slurm(64030)
SlurmctldAddr           = (null)
SlurmctldDebug          = verbose
SlurmctldHost[0]        = ctl
SlurmctldHost[1]        = ctl2(10.77.0.9)
SlurmctldLogFile        = /var/log/slurm/slurmctld.log
"""
NAMES = {
    "n1": {"10.77.0.11"},
    "host2": {"10.77.0.12"},
    "n2-admin": {"10.78.0.12"},
    "n1-ib": {"10.79.0.11"},
    "ctl": {"10.77.0.2", "fd00::2"},
    "ctl2": {"10.77.0.3"},
}


def known_names(name: str) -> frozenset[str]:
    return frozenset(NAMES.get(name, {name} if name[0].isdigit() else ()))


@dataclass
class Asked:
    """A Slurm that says where its hosts are."""

    nodes_: list[SlurmNode] = field(default_factory=lambda: list(parse_nodes(SINFO)))
    fails: str = ""
    count: int = 0

    def nodes(self) -> tuple[SlurmNode, ...]:
        self.count += 1
        if self.fails:
            raise SlurmError("sinfo failed", self.fails)
        return tuple(self.nodes_)

    def controllers(self) -> tuple[str, ...]:
        return parse_controllers(CONFIG)


def hosts(folder: Path, slurm: Asked | None = None, **settings: Any) -> HostAddresses:
    asked: Any = slurm or Asked()
    return HostAddresses(Controller(database=str(folder / "db"), **settings), asked, resolve=known_names)


# --- what Slurm says ------------------------------------------------------------------------------


def test_nodes_are_read_each_once() -> None:
    assert parse_nodes(SINFO) == (
        SlurmNode("n1", address="10.77.0.11", hostname="n1"),
        SlurmNode("n2", address="n2-admin", hostname="host2"),
    )
    assert parse_nodes("") == ()


@pytest.mark.parametrize(
    "text", ["n1", "n1|n1", "n1|n1|10.0.0.1|x", "n 1|n1|10.0.0.1", "n1|n1|", "n1|$(id)|n1"]
)
def test_a_line_that_names_no_node_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="cannot parse Slurm's list of nodes"):
        parse_nodes(SINFO + text)


@given(st.text(max_size=80))
def test_whatever_sinfo_prints_is_read_or_refused(text: str) -> None:
    try:
        found = parse_nodes(text)
    except SlurmError:
        return
    assert all(one.name and one.address and one.hostname for one in found)


def test_hosts_of_slurmctld_are_read() -> None:
    assert parse_controllers(CONFIG) == ("ctl", "ctl2", "10.77.0.9")
    assert parse_controllers(CONFIG.replace("(null)", "10.77.0.99"))[-1] == "10.77.0.99"
    with pytest.raises(SlurmError, match="prints no SlurmctldHost"):
        parse_controllers("SlurmUser = slurm\n")


# --- what is made of it -----------------------------------------------------------------------------


def test_a_node_has_the_addresses_of_all_its_names(tmp_path: Path) -> None:
    found = hosts(
        tmp_path,
        node_names=("{node}-ib",),
        node_addresses=("n2=10.99.0.2", "n2=n1", "n9=10.99.0.9"),
        controller_addresses=("10.99.0.1",),
    )
    found.learn()
    assert found.known.nodes == {
        "n1": {"10.77.0.11", "10.79.0.11"},
        "n2": {"10.77.0.12", "10.78.0.12", "10.99.0.2", "10.77.0.11"},
    }
    assert found.known.controllers == {"10.77.0.2", "fd00::2", "10.77.0.3", "10.77.0.9", "10.99.0.1"}


def test_a_resolver_that_is_away_takes_no_address_from_anybody(tmp_path: Path) -> None:
    here = True
    asked: Any = Asked()
    found = HostAddresses(
        Controller(database=str(tmp_path / "db")),
        asked,
        resolve=lambda name: known_names(name) if here else frozenset(),
    )
    found.learn()
    before = found.known
    here = False
    found.learn()
    assert found.known == before


def test_names_that_take_too_long_keep_what_they_had(tmp_path: Path) -> None:
    now = 0.0
    asked: list[str] = []
    slow = False

    def look_up(name: str) -> frozenset[str]:
        nonlocal now
        asked.append(name)
        now += 15.0 * slow
        return frozenset() if slow else known_names(name)

    stand_in: Any = Asked()
    found = HostAddresses(
        Controller(database=str(tmp_path / "db")), stand_in, resolve=look_up, clock=lambda: now
    )
    found.learn()
    before, slow = found.known, True
    asked.clear()
    found.learn()
    assert len(asked) == 2, "30 s are too long"
    assert found.known == before


def test_a_node_gone_from_slurm_is_remembered_for_a_day(tmp_path: Path) -> None:
    now = 0.0
    stand_in: Any = Asked()
    found = HostAddresses(
        Controller(database=str(tmp_path / "db")), stand_in, resolve=known_names, clock=lambda: now
    )
    found.learn()
    del stand_in.nodes_[1]
    now = 80000.0
    found.learn()
    assert set(found.known.nodes) == {"n1", "n2"}
    now = 90000.0
    found.learn()
    assert set(found.known.nodes) == {"n1"}


def test_knowledge_survives_a_restart_without_slurm(tmp_path: Path) -> None:
    first = hosts(tmp_path)
    first.learn()
    again = hosts(tmp_path, Asked(fails="slurmctld is down"))
    assert again.known == first.known
    with pytest.raises(SlurmError):
        again.learn()
    assert again.known == first.known
    (tmp_path / "addresses.json").write_bytes(b"{")
    assert hosts(tmp_path).known.every == frozenset()


def test_a_slurm_without_nodes_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    slurm = Asked()
    found = hosts(tmp_path, slurm)
    found.learn()
    slurm.nodes_ = []
    with pytest.raises(FabricError, match="PrivateData=nodes"):
        found.learn()
    assert "n1" in found.known.nodes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"node_names": ("n1-ib",)}, r"it must contain \{node\}"),
        ({"node_names": ("{node}-{rail}",)}, r"it must contain \{node\}"),
        ({"node_addresses": ("n1",)}, "NODE=ADDRESS"),
        ({"node_addresses": ("n1= ",)}, "NODE=ADDRESS"),
        ({"node_addresses": ("n/1=10.0.0.1",)}, "NODE=ADDRESS"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(NodeError, match=says):
        hosts(tmp_path, **settings)


def test_an_address_is_written_in_one_way() -> None:
    assert plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain("fe80::1%eth0") == "fe80::1"
    assert plain("FD00:0:0::1") == "fd00::1"
    assert plain("?") == "?"


def test_names_are_resolved_by_the_system() -> None:
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("10.0.0.1") == {"10.0.0.1"}
    assert resolve("no-such-host.invalid") == frozenset()
    assert resolve("x" * 300) == frozenset()


# --- who may say what -----------------------------------------------------------------------------------

NODE_GROUPS = wire_types.pack_allocation(allocation("n1"))
TIMELINE = wire_types.TimelineWire(generation="1.0.00000001", node="n1", stages=())
OF_NODES: list[wire.Request] = [
    wire.GetLease(job_id=1, restart=None, node="n1", wait_s=1.0),
    wire.Acknowledge(generation="1.0.00000001", node="n1", clean=True),
    wire.ReportTimeline(timeline=TIMELINE),
]
OF_THE_CONTROLLER: list[wire.Request] = [
    wire.OpenGeneration(request=request(), node_groups=NODE_GROUPS),
    wire.Ending(job_id=1, restart=None),
    wire.Fence(node="n1"),
    wire.ClearKey(generations=()),
    wire.TellFabric(),
]
OF_ANYBODY: list[wire.Request] = [
    wire.GetLease(job_id=1, restart=None, node="n1", wait_s=0.0),
    wire.ListLeases(),
    wire.ListTimelines(),
    wire.AskStatus(),
]


def test_each_request_there_is_is_somebody_s() -> None:
    kinds = {type(one) for one in (*OF_NODES, *OF_THE_CONTROLLER, *OF_ANYBODY)}
    assert kinds == set(wire.Request.__args__)


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
def test_what_only_the_controller_may_say_comes_from_there(tmp_path: Path, body: wire.Request) -> None:
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
def test_what_only_reads_may_come_from_anywhere(tmp_path: Path, body: wire.Request) -> None:
    slurm = Asked()
    assert says(tmp_path, body, Origin("192.0.2.1", own_host=False), slurm) == ""
    assert slurm.count == 0


def test_a_node_that_slurm_does_not_have_is_said_to_be_none(tmp_path: Path) -> None:
    body = wire.Acknowledge(generation="1.0.00000001", node="n7", clean=True)
    assert (
        says(tmp_path, body, Origin("10.77.0.11", own_host=False)) == "Slurm has no node n7 (see: sinfo -N)"
    )


def test_without_slurm_only_the_own_host_is_believed(tmp_path: Path) -> None:
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


def test_the_stand_in_is_one_of_slurm_s_port() -> None:
    assert {"nodes", "controllers"} <= {name for name in dir(Slurm) if not name.startswith("_")}
