# SPDX-License-Identifier: Apache-2.0
"""How OpenSM is made to write a port's P_Key table again that somebody else has changed.  Pure.

OpenSM remembers the tables that it wrote and sends only blocks that differ from
what it remembers (opensm 3.3.23, osm_pkey_mgr.c; seen on a fabric: after a table
was changed with a management packet, no SIGHUP brings it back).  A key that is
added and taken away again changes what OpenSM wants in a block, so it sends the
whole block twice, the second time as it should be.

New keys go into the first free places, so a higher block needs more of them.
The extra keys are keys of the pool that nobody has; ports are limited members,
so two that get the same one cannot talk to each other by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.readback import Expected
from vhpc_slurm.fabric.smp import KEYS_A_BLOCK, Port, Scan

NAME = "rewrite_"
"""What the names of such partitions begin with."""
SPARE = 2
"""Places that stay free: OpenSM does not recover a table that was full once."""


def is_extra(partition: IbPartition) -> bool:
    """Whether a partition of a file is one of these, left there by a vhpcd that was killed."""
    return partition.name.startswith(NAME)


def extra_partitions(
    ports: Iterable[Port], expected: Expected, scan: Scan, free: Iterable[int], block: int
) -> tuple[IbPartition, ...]:
    """Partitions that change what OpenSM wants in a block (from 0) of these ports' tables; none: no room."""
    ports = tuple(ports)
    if not ports:
        return ()
    used = [expected.entries(port.guid) for port in ports]
    rooms = [port.room for port in ports] + [one.enforced for one in scan.switches if one.enforced]
    count = max(1, KEYS_A_BLOCK * block - min(used) + 1)
    if count > min(rooms) - max(used) - SPARE:
        return ()
    members = tuple((f"{port.guid:#018x}", False) for port in ports)
    found = tuple(IbPartition(f"{NAME}{pkey:04x}", pkey, members) for pkey in islice(free, count))
    return found if len(found) == count else ()


def free_keys(pool: KeyPool, snapshot: KeySnapshot) -> Iterator[int]:
    """Keys of the pool that nobody has, or had a moment ago."""
    taken = {assignment.pkey for assignment in snapshot.assignments}
    return (pkey for pkey in pool.numbers() if pkey not in taken)
