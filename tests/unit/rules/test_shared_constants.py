# SPDX-License-Identifier: Apache-2.0
"""Numbers and names that C, Python and the documents share are the same in each of them.

A C compiler evaluates the headers; files of the plugin that do not need Slurm are run.
"""

from __future__ import annotations

import re

import pytest
from c_probe import AGENT, CHECKOUT, LIB, PLUGIN, highest, strings, values

from vhpc_slurm.cli.jobs import steprelay
from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.config.network import LEAST_MTU, Network
from vhpc_slurm.domain import boot
from vhpc_slurm.domain.plain import PORT_NAME
from vhpc_slurm.importing import owncommands
from vhpc_slurm.node.boot import helpers
from vhpc_slurm.node.guest import channel, cluster, peers, wire
from vhpc_slurm.node.network import nat, segment
from vhpc_slurm.node.resource import job_network

PROTOCOL = (LIB / "protocol.h").read_text()
# Section 9 has the frames of `vhpc forward`, which are others than the agent's.
DOCUMENT = (CHECKOUT / "docs/guest-protocol.md").read_text().partition("\n## 9.")[0]
ENUMERATOR = re.compile(r"^ {4}(\w+) = ", re.MULTILINE)


def test_exit_statuses_of_a_shim_that_its_guest_left_agree() -> None:
    header = (CHECKOUT / "guest/shim/shim.h").read_text()
    numbers = re.findall(r"\b(?:SHIM_AGENT_CLOSED|SHIM_AGENT_BROKEN) = (\d+)", header)
    assert [int(number) for number in numbers] == list(helpers.SHIM_LEFT)


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Values of all enumerators of protocol.h, and of single ones of other headers."""
    headers = {
        "protocol.h": ["VHPC_PROTOCOL_MIN", "VHPC_PROTOCOL_MAX", *ENUMERATOR.findall(PROTOCOL)],
        "fabric.h": ["FABRIC_WAIT_MAX_MS"],
        "ibports.h": ["IB_PORTS_MAX", "IB_KEYS_MAX"],
        "topology.h": ["TOPOLOGY_MAX"],
        "nat.h": ["NAT_SERVERS_MAX"],
        "cluster.h": ["CLUSTER_GUESTS_MAX"],
        "reach.h": ["REACH_TARGETS_MAX", "REACH_SIZE_MIN", "REACH_WAIT_MAX_MS"],
        "network.h": ["NODELIST_MAX", "NETWORK_MTU_MIN", "NETWORK_MTU_MAX"],
        "ring.h": ["RING_BYTES", "RING_PARTS"],
        "sbcast.h": ["SBCAST_GUESTS_MAX"],
        "option_ids.h": ["VHPC_GUESTS_PER_NODE_MOST"],
    }
    return values(tmp_path_factory.mktemp("constants"), headers)


def group(constants: dict[str, int], block: str, prefix: str) -> dict[str, int]:
    """The enumerators between ``enum block {`` and its end, without their prefix."""
    (body,) = re.findall(rf"^enum {block} \{{\n(.*?)^\}};", PROTOCOL, re.MULTILINE | re.DOTALL)
    return {name.removeprefix(prefix): constants[name] for name in ENUMERATOR.findall(body)}


def test_the_variable_with_names_of_export_is_one() -> None:
    """The plugin sets it, the agent reads it."""
    name = re.compile(r'^#define (?:VHPC|IMAGE)_ENV_EXPORTED "(\w+)"', re.MULTILINE)
    texts = ((PLUGIN / "exported.h").read_text(), (AGENT / "imageenv.h").read_text())
    assert [name.findall(text) for text in texts] == [["SLURM_VHPC_EXPORTED"]] * 2


def test_folders_of_covered_commands_agree() -> None:
    found = strings((AGENT / "commands.h").read_text())
    assert found["COMMANDS_PATH"].split(":") == list(owncommands.FOLDERS)
    assert owncommands.AGENT == steprelay.AGENT


# --- the guest channel -------------------------------------------------------


def test_frame_types_are_the_same(constants: dict[str, int]) -> None:
    types = group(constants, "vhpc_type", "VHPC_")
    assert types.pop("TYPE_LAST") == max(wire.FrameType)
    assert types == {kind.name: kind.value for kind in wire.FrameType}


def test_field_tags_are_the_same(constants: dict[str, int]) -> None:
    assert group(constants, "vhpc_tag", "TAG_") == {tag.name: tag.value for tag in wire.Tag}


def test_control_operations_are_the_same(constants: dict[str, int]) -> None:
    assert group(constants, "vhpc_op", "VHPC_OP_") == {op.name: op.value for op in wire.Op}


def test_the_guests_states_are_the_same(constants: dict[str, int]) -> None:
    found = re.findall(r"\b(VHPC_STATE_(\w+)) = (\d+)", PROTOCOL)
    assert {short: int(value) for _, short, value in found} == {s.name: s.value for s in wire.GuestState}


def test_limits_of_the_channel_are_the_same(constants: dict[str, int]) -> None:
    assert constants["VHPC_PROTOCOL_MIN"] == channel.VERSION_MIN
    assert constants["VHPC_PROTOCOL_MAX"] == channel.VERSION_MAX
    assert constants["VHPC_HEADER"] == wire.HEADER.size
    assert constants["VHPC_PAYLOAD_MAX"] == wire.PAYLOAD_MAX
    assert constants["VHPC_MESSAGE_MAX"] == wire.MESSAGE_MAX
    assert constants["VHPC_MORE"] == wire.MORE
    assert strings(PROTOCOL)["VHPC_PORT_NAME"] == PORT_NAME


def test_the_shim_may_make_the_memory_that_it_shares(constants: dict[str, int]) -> None:
    """RLIMIT_FSIZE of the shim is the size of its log, and also holds for memfds."""
    assert constants["RING_BYTES"] // constants["RING_PARTS"] <= helpers.LOG_BYTES


def test_the_agent_waits_as_long_as_a_site_may_set(constants: dict[str, int]) -> None:
    assert constants["FABRIC_WAIT_MAX_MS"] == 1000 * highest(Fabric, "guest_timeout_s")


def test_the_network_operation_has_the_same_limits(constants: dict[str, int]) -> None:
    assert constants["NODELIST_MAX"] == job_network.NODELIST_MAX
    assert constants["NETWORK_MTU_MIN"] == LEAST_MTU == segment.LEAST_MTU
    assert constants["NETWORK_MTU_MAX"] >= 65465  # the most of network.mtu


def test_the_reach_operation_has_the_same_limits(constants: dict[str, int]) -> None:
    assert constants["REACH_TARGETS_MAX"] == peers.TARGETS_MAX
    assert constants["REACH_SIZE_MIN"] == LEAST_MTU
    assert constants["REACH_WAIT_MAX_MS"] == 1000 * highest(Network, "ready_timeout_s")


def test_the_cluster_operation_has_the_same_limit(constants: dict[str, int]) -> None:
    assert constants["CLUSTER_GUESTS_MAX"] == cluster.GUESTS_MAX


def test_the_nat_operation_has_the_same_limit(constants: dict[str, int]) -> None:
    assert constants["NAT_SERVERS_MAX"] == nat.MAX_DNS
    assert constants["NETWORK_MTU_MAX"] >= nat.MTU


def test_the_document_has_the_same_numbers(constants: dict[str, int]) -> None:
    tags = {(name, int(number)) for name, number in re.findall(r"\b([A-Z_]{2,}[46]?)\((\d+)[),:]", DOCUMENT)}
    for numbers, names in re.findall(r"^\| ([\d, ]+) \| ([A-Z_, ]+) \|", DOCUMENT, re.MULTILINE):
        rows = set(zip(names.split(", "), map(int, numbers.split(", ")), strict=True))
        is_type = {name for name, _ in rows} <= wire.FrameType.__members__.keys()
        expected = wire.FrameType.__members__ if is_type else wire.Tag.__members__
        assert all(expected[name] == number for name, number in rows), (names, numbers)
        tags |= set() if is_type else rows
    assert dict(tags) == {tag.name: tag.value for tag in wire.Tag}
    operations = re.findall(r"^\| (\d+) \| ([a-z]+) \|", DOCUMENT, re.MULTILINE)
    assert {name.upper(): int(number) for number, name in operations} == {op.name: op.value for op in wire.Op}
    names = re.findall(
        r"^\| (\d+) \| ([A-Z]+) \| (?:both|root|agent|init|exec|client)", DOCUMENT, re.MULTILINE
    )
    assert {name: int(number) for number, name in names} == {kind.name: kind.value for kind in wire.FrameType}


@pytest.mark.parametrize(
    ("row", "names", "unit"),
    [
        ("payload of a frame | {} KiB", ["VHPC_PAYLOAD_MAX"], 1 << 10),
        ("message | {} MiB", ["VHPC_MESSAGE_MAX"], 1 << 20),
        ("window of a lane | {} MiB", ["VHPC_WINDOW"], 1 << 20),
        ("relayed fds of a program | {} |", ["VHPC_FDS_MAX"], 1),
        ("sessions of a guest | {} |", ["VHPC_CLIENTS_MAX"], 1),
        ("ports, and keys, of a *fabric* request | {}, {} |", ["IB_PORTS_MAX", "IB_KEYS_MAX"], 1),
        ("wait of a *fabric* request | {} s", ["FABRIC_WAIT_MAX_MS"], 1000),
        ("targets of a *reach* request | {} |", ["REACH_TARGETS_MAX"], 1),
        ("wait of a *reach* request | {} s", ["REACH_WAIT_MAX_MS"], 1000),
        (
            "GUEST fields, and keys of each kind, of a *cluster* request | {}, {} |",
            ["CLUSTER_GUESTS_MAX", "CLUSTER_GUESTS_MAX"],
            1,
        ),
        ("NAMESERVER fields of a *nat* request | {} |", ["NAT_SERVERS_MAX"], 1),
        ("text of a *topology* request | {} KiB", ["TOPOLOGY_MAX"], 1 << 10),
        ("host calls alive in a session | {} |", ["VHPC_CALLS_MAX"], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_document_has_the_same_limits(
    constants: dict[str, int], row: str, names: list[str], unit: int
) -> None:
    assert f"| {row.format(*(constants[name] // unit for name in names))}" in DOCUMENT


def test_shim_and_plugin_agree_on_the_guests_of_a_node(constants: dict[str, int]) -> None:
    assert constants["VHPC_GUESTS_PER_NODE_MOST"] == constants["SBCAST_GUESTS_MAX"]


# --- variables of the environment ---------------------------------------------


def test_new_jobs_lose_all_variables_that_the_agent_sets() -> None:
    sources = "".join(path.read_text() for path in AGENT.glob("*.c"))
    lists = set(re.findall(r'^#define MARK "(\w+)"', sources, re.MULTILINE))
    assert len(lists) == sources.count("return defaults_apply(")
    removed = (PLUGIN / "inherited.c").read_text().split("marks[] = {")[1].partition("}")[0]
    assert set(re.findall(r'"(\w+)"', removed)) == lists


# --- the kernel command line -------------------------------------------------


def test_the_initrd_knows_the_parameters_of_guests() -> None:
    source = (CHECKOUT / "guest/init/options.c").read_text()
    known = set(re.findall(r'strcmp\(word, "(vhpc\.[\w.]+)"\)', source))
    given = {word.partition("=")[0] for word in boot.kernel_cmdline("", "erofs").split()}
    needed = {word for word in given if word.startswith("vhpc.")}
    assert needed
    given = {*boot.kernel_cmdline("", "erofs", disk=True).split()}
    given |= {*boot.kernel_cmdline("", "erofs", disk=True, mounted=True).split()}
    needed |= {name for word in given if (name := word.partition("=")[0]).startswith("vhpc.")}
    assert {"vhpc.disk", "vhpc.agent.disk"} <= needed
    assert needed | {"vhpc.init", "vhpc.verity"} <= known  # an image's own: catalog/manifest.py
