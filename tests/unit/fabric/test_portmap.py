# SPDX-License-Identifier: Apache-2.0
"""The site's list of ports whose GUIDs are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vhpc_slurm.config.fabric import Fabric
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import portmap, select

TEXT = """\
# whole adapters
n1 0 0x0002c90300000101
n1 0 0xfeFF00000000ffff   # more than 63 bits
n1 1 0x0002c90300000111
n2 0 0x0002c90300000201
"""


def test_each_node_and_rail_has_its_ports_in_line_order() -> None:
    assert portmap.parse(TEXT, "ports").ports == {
        ("n1", 0): (0x0002C90300000101, 0xFEFF00000000FFFF),
        ("n1", 1): (0x0002C90300000111,),
        ("n2", 0): (0x0002C90300000201,),
    }


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("n1 0", "line 1: 'n1 0'"),
        ("n1 0 0x0002c90300000101 x", "line 1"),
        ("-n1 0 0x0002c90300000101", "line 1"),
        ("n1 256 0x0002c90300000101", "'256' is not a rail: 0 to 255"),
        ("n1 -1 0x0002c90300000101", "'-1' is not a rail"),
        ("n1 ٣ 0x0002c90300000101", "is not a rail"),
        ("n1 0 0002c90300000101", "is not a port GUID"),
        ("n1 0 0x2c90300000101", "is not a port GUID"),
        ("n1 0 0x0000000000000000", "is not a port GUID"),
        ("n1 0 0x0002c9030000010g", "is not a port GUID"),
        ("n1 0 0x0002c90300000101\nn2 0 0x0002C90300000101", "line 2: .* is also in line 1"),
        ("# nothing", "lists no port"),
        ("", "lists no port"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(line: str, why: str) -> None:
    with pytest.raises(FabricError, match=why):
        portmap.parse(line, "ports")


def test_a_job_gets_the_first_free_ports_of_its_nodes() -> None:
    ports = portmap.parse(TEXT, "ports")
    first = ports.choose(("n2", "n1"), rails=1, vfs=1, taken=())
    assert first == (0x0002C90300000201, 0x0002C90300000101)
    assert ports.choose(("n1",), rails=1, vfs=1, taken=first) == (0xFEFF00000000FFFF,)
    assert ports.choose(("n1",), rails=2, vfs=1, taken=()) == (0x0002C90300000101, 0x0002C90300000111)


@pytest.mark.parametrize(
    ("node", "rails", "vfs", "why"),
    [
        ("n2", 1, 1, "no port of node n2 on rail 0 is free: other jobs have 1 of its 1"),
        ("n1", 1, 2, "no port of node n1 on rail 0 is free: other jobs have 1 of its 2"),
        ("n1", 1, 3, "ports has 2 ports of node n1 on rail 0: each guest has 3"),
        ("n2", 2, 1, "no port of node n2 on rail 0"),
        ("n3", 1, 1, "ports has 0 ports of node n3 on rail 0"),
    ],
)
def test_too_few_ports_are_an_error_with_their_holders(node: str, rails: int, vfs: int, why: str) -> None:
    with pytest.raises(FabricError, match=why):
        portmap.parse(TEXT, "ports").choose(
            (node,), rails=rails, vfs=vfs, taken={0x0002C90300000101, 0x0002C90300000201}
        )


def test_the_configuration_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ports"
    assert select.port_map(Fabric(backend="opensm-file")) is None
    with pytest.raises(FabricError, match="cannot read"):
        select.port_map(Fabric(backend="opensm-file", port_map=str(file)))
    file.write_bytes(b"\xff")
    with pytest.raises(FabricError, match="cannot read"):
        select.port_map(Fabric(backend="opensm-file", port_map=str(file)))
    file.write_text(TEXT)
    found = select.port_map(Fabric(backend="opensm-file", port_map=str(file)))
    assert found is not None
    assert found.ports[("n2", 0)] == (0x0002C90300000201,)
    with pytest.raises(FabricError, match="cannot be used with backend static-pool"):
        select.port_map(Fabric(backend="static-pool", port_map=str(file)))
