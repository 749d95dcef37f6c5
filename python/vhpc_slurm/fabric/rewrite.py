# SPDX-License-Identifier: Apache-2.0
"""How OpenSM is made to write the P_Key table of a port again after another program changed it.  Pure.

OpenSM remembers the tables that it wrote and sends only blocks that differ from
what it remembers (opensm 3.3.23, osm_pkey_mgr.c; seen on a fabric: after a table
was changed with a management packet, no SIGHUP brings it back).  A key that is
added and taken away again changes what OpenSM wants in a block, so it sends the
whole block twice, the second time as it should be.

OpenSM also remembers the place of each key that a port has had, as long as it runs,
and puts a new one behind all of them, or into the first free place if the table ends
there. So the place of an extra key is not known. For the first block it has the flag
``indx0``, which puts it into the first place. A higher block needs as many extra keys
as do not fit into those below it.

The extra keys are unused keys of the pool. Ports become limited members, so two
ports with the same extra key cannot communicate through it.
"""
# Decision: A dummy key makes OpenSM write a table again

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from vhpc_slurm.fabric.keys import KeySnapshot
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.readback import Expected
from vhpc_slurm.fabric.smp import KEYS_A_BLOCK, Port, Scan

NAME = "rewrite_"
"""Prefix of the names of such partitions."""
SPARE = 2
"""Entries of a table that stay free: OpenSM does not recover a table that was full once."""


def is_extra(partition: IbPartition) -> bool:
    """Whether a partition in a file is an extra one that a killed vhpcd left there."""
    return partition.name.startswith(NAME)


def extra_partitions(
    ports: Iterable[Port], expected: Expected, scan: Scan, free: Iterable[int], block: int
) -> tuple[IbPartition, ...]:
    """Partitions that change a block (counted from 0) of these ports' tables; empty when there is no room."""
    ports = tuple(ports)
    if not ports:
        return ()
    used = [expected.entries(port.guid) for port in ports]
    rooms = [port.room for port in ports] + [one.enforced for one in scan.switches if one.enforced]
    count = KEYS_A_BLOCK * block - min(used) + 1 if block else 1
    if count > min(rooms) - max(used) - SPARE:
        return ()
    members = tuple((f"{port.guid:#018x}", False) for port in ports)
    flags = () if block else ("indx0",)
    found = tuple(IbPartition(f"{NAME}{pkey:04x}", pkey, members, flags) for pkey in islice(free, count))
    return found if len(found) == count else ()


def free_keys(pool: KeyPool, snapshot: KeySnapshot) -> Iterator[int]:
    """Keys of the pool that no generation has, also not in quarantine."""
    taken = {assignment.pkey for assignment in snapshot.assignments}
    return (pkey for pkey in pool.numbers() if pkey not in taken)
