# SPDX-License-Identifier: Apache-2.0
"""Ports with fixed GUIDs: of whole adapters, or of virtual functions whose GUIDs nodes do not set.

A subnet manager without support for virtual functions (that of Linux distributions)
sees only such ports. The site lists which node has which; a job gets free ports of its
nodes, and its partition contains their GUIDs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric.numbers import MAX_RAILS
from vhpc_slurm.model import NODE_NAME

_GUID = re.compile(r"^0x[0-9a-fA-F]{16}\Z", re.ASCII)
_RAIL = re.compile(r"^[0-9]{1,3}\Z", re.ASCII)


@dataclass(frozen=True)
class PortMap:
    """The port GUIDs of each (node, rail), in the order in which jobs get them."""

    file: str
    ports: Mapping[tuple[str, int], tuple[int, ...]]

    def choose(
        self, nodes: Sequence[str], *, rails: int, vfs: int, taken: Collection[int]
    ) -> tuple[int, ...]:
        """``vfs`` ports on each rail of each node, none of them ``taken``: node by node, rail by rail.

        A node that occurs several times gets different ports each time: it has several guests.

        Raises:
            FabricError: a node has too few, or too few of them are free.
        """
        chosen: dict[int, None] = {}
        guests = Counter(nodes)
        for node in nodes:
            for rail in range(rails):
                has = self.ports.get((node, rail), ())
                free = [guid for guid in has if guid not in taken and guid not in chosen]
                if len(has) < vfs * guests[node]:
                    each = "each guest" if guests[node] == 1 else f"each of {guests[node]} guests"
                    raise FabricError(
                        f"{self.file} has {len(has)} ports of node {node} on rail {rail}",
                        f"{each} has {vfs}",
                        "see fabric.port_map in vhpc.toml(5)",
                    )
                if len(free) < vfs:
                    raise FabricError(
                        f"no port of node {node} on rail {rail} is free",
                        f"other jobs have {sum(guid in taken for guid in has)} of its {len(has)}",
                        "declare them as a generic resource of the node: then jobs wait instead",
                    )
                chosen |= dict.fromkeys(free[:vfs])
        return tuple(chosen)


def parse(text: str, file: str) -> PortMap:
    """Read lines ``NODE RAIL GUID``; ``#`` begins a comment.

    Raises:
        FabricError: a line is invalid, or a GUID occurs twice; the error has the line's number.
    """
    ports: dict[tuple[str, int], list[int]] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file} is refused, line {number}"
        hint = "lines are NODE RAIL 0xGUID, with the 16 digits of the GUID"
        if len(words) != 3 or not NODE_NAME.match(words[0]):
            raise FabricError(where, f"{line.strip()[:80]!r}", hint)
        node, rail, guid = words
        if not _RAIL.match(rail) or int(rail) >= MAX_RAILS:
            raise FabricError(where, f"{rail[:20]!r} is not a rail: 0 to {MAX_RAILS - 1}", hint)
        value = int(guid, 16) if _GUID.match(guid) else 0
        if not value:
            raise FabricError(where, f"{guid[:40]!r} is not a port GUID", hint)
        if value in seen:
            raise FabricError(where, f"{guid} is also in line {seen[value]}")
        seen[value] = number
        ports.setdefault((node, int(rail)), []).append(value)
    if not ports:
        raise FabricError(f"{file} lists no port", hint="see fabric.port_map in vhpc.toml(5)")
    return PortMap(file, {place: tuple(guids) for place, guids in ports.items()})
