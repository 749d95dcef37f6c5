# SPDX-License-Identifier: Apache-2.0
"""Where Slurm's hosts are, and who may say what from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from address_rig import CONFIG, SINFO, Asked, hosts, known_names
from hypothesis import given
from hypothesis import strategies as st

from vhpc_slurm.config.controller import Controller
from vhpc_slurm.controller.api.addresses import HostAddresses, plain, resolve
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.slurm.hosts import parse_controllers, parse_nodes
from vhpc_slurm.slurm.port import SlurmError, SlurmNode

# --- what Slurm says ------------------------------------------------------------------------------


def test_nodes_are_read_each_once() -> None:
    assert parse_nodes(SINFO) == (
        SlurmNode("n1", address="10.77.0.11", hostname="n1"),
        SlurmNode("n2", address="n2-admin", hostname="host2"),
    )
    assert parse_nodes("") == ()


@pytest.mark.promise("attack.node-address")
@pytest.mark.parametrize(
    "text", ["n1", "n1|n1", "n1|n1|10.0.0.1|x", "n 1|n1|10.0.0.1", "n1|n1|", "n1|$(id)|n1"]
)
def test_a_line_that_names_no_node_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="cannot parse Slurm's list of nodes"):
        parse_nodes(SINFO + text)


@given(st.text(max_size=80))
def test_any_output_of_sinfo_is_read_or_refused(text: str) -> None:
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


def test_names_that_resolve_too_slowly_keep_their_addresses(tmp_path: Path) -> None:
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


def test_a_node_removed_from_slurm_is_kept_for_a_day(tmp_path: Path) -> None:
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


def test_addresses_have_one_form() -> None:
    assert plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain("fe80::1%eth0") == "fe80::1"
    assert plain("FD00:0:0::1") == "fd00::1"
    assert plain("?") == "?"


def test_names_are_resolved_by_the_system() -> None:
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("10.0.0.1") == {"10.0.0.1"}
    assert resolve("no-such-host.invalid") == frozenset()
    assert resolve("x" * 300) == frozenset()
