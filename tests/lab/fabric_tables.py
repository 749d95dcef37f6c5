# SPDX-License-Identifier: Apache-2.0
"""Tables of partition keys in a lab with a fabric: what the adapters have, and what jobs should have."""

from __future__ import annotations

import re

from cluster import Job, Lab
from injection import until

# as /etc/vhpc/ports.map says: port GUIDs of each node's adapters
ADAPTERS = {
    "n1": (0x0002C90300000101, 0x0002C90300000111),
    "n2": (0x0002C90300000201, 0x0002C90300000211),
}


LIMITED = 0x7FFF


FULL = 0x8000


NOBODY = {guid: {LIMITED} for guids in ADAPTERS.values() for guid in guids}


def rows(lab: Lab) -> dict[int, tuple[int, ...]]:
    """The tables of every adapter but the subnet manager's own, by the GUID that it says it has."""
    script = (
        "cd /run/opensm/readers; export SIM_HOST=SM"
        " LD_PRELOAD=/usr/lib/x86_64-linux-gnu/umad2sim/libumad2sim.so\n"
        "for at in 0,1,1 0,1,2 0,1,3 0,1,4; do\n"
        "  smpquery -t 10000 -D nodeinfo $at && smpquery -t 10000 -D pkeys $at 1 || exit\n"
        "done\n"
    )
    found: dict[int, tuple[int, ...]] = {}
    for line in lab.run("ctl", "sh", "-c", script).out.splitlines():
        if guid := re.match(r"PortGuid:\.*(0x[0-9a-f]{16})$", line):
            mine = int(guid[1], 16)
            found[mine] = ()
        if row := re.match(r" *\d+: ((?:0x[0-9a-f]{4} ?)+)$", line):
            found[mine] += tuple(int(word, 16) for word in row[1].split())
    return found


def tables(lab: Lab) -> dict[int, set[int]]:
    """The same without order and empty entries."""
    return {guid: set(row) - {0} for guid, row in rows(lab).items()}


def keys_of(lab: Lab, job: Job) -> set[int]:
    """The key of a job, as vhpcd says."""
    assignments = lab.vhpc("ctl", "fabric", "ls")["assignments"]
    return {int(one["pkey"], 16) for one in assignments if one["generation"].startswith(f"{job.id}.")}


def holding(*jobs: tuple[Job, int, tuple[str, ...]]) -> dict[int, set[int]]:
    """Tables where each job has the key on one adapter of each of its nodes."""
    meant = {guid: set(keys) for guid, keys in NOBODY.items()}
    for _, pkey, nodes in jobs:
        for node in nodes:
            meant[next(guid for guid in ADAPTERS[node] if meant[guid] == {LIMITED})].add(pkey | FULL)
    return meant


def by_node(found: dict[int, set[int]]) -> dict[str, list[list[int]]]:
    """The tables of each node, whichever of its adapters has which."""
    return {node: sorted(sorted(found[guid]) for guid in guids) for node, guids in ADAPTERS.items()}


def nobody_has_a_key(lab: Lab) -> None:
    until(lambda: not lab.leases(), "all leases to be released", 180)
    assert tables(lab) == NOBODY
