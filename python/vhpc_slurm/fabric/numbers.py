# SPDX-License-Identifier: Apache-2.0
"""Numbers of segments (partition keys, VLANs), and the GUIDs and MAC addresses that follow.  Pure."""
# Decision: VLANs are numbers in the same table

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.errors import FabricError
from vhpc_slurm.record import Record

DEFAULT_PKEY = 0x7FFF
"""The default partition: every port is a limited member, so that it reaches the subnet manager."""
FULL = 0x8000
"""Membership bit of an entry in a port's table."""
FIRST_PKEY, LAST_PKEY = 0x0001, 0x7FFE
PORT_PREFIX, NODE_PREFIX = 0x02CC, 0x02CD
"""Upper 16 bits of our GUIDs; 0x02 is the locally administered bit of an EUI-64."""
MAX_RAILS, MAX_RANKS, MAX_VFS = 1 << 8, 1 << 16, 1 << 8
MAX_ETHERNET_RAILS = 1 << 4
"""Rails that a MAC address has room for."""


class Space(Record, frozen=True):
    """Numbers of one kind of segment; assignments have ``base`` plus the number, so kinds never overlap.

    A site may use the numbers ``first`` to ``last``; ``option`` is the prefix of its
    keys in the configuration.
    """

    name: str
    option: str
    base: int
    first: int
    last: int
    digits: str = "d"

    def label(self, number: int) -> str:
        """A number as the site writes it."""
        return f"{number:{self.digits}}"

    def has(self, number: int) -> bool:
        """Whether an assignment's number is of this kind."""
        return self.first <= number - self.base <= self.last


PKEYS = Space("partition key", "pkey", 0, FIRST_PKEY, LAST_PKEY, "#06x")
VLANS = Space("VLAN", "vlan", 1 << 16, 2, 4094)
"""IEEE 802.1Q: 0 and 4095 are reserved, 1 is the default VLAN of most switches."""
SPACES = (PKEYS, VLANS)
MAX_POOL = 1 << 16
"""The most numbers of a pool; choosing one may look at all of them."""


def label(number: int) -> str:
    """The number of an assignment with its kind: ``VLAN 100``; a partition key has no prefix."""
    space = next((one for one in SPACES if one.has(number)), PKEYS)
    shown = space.label(number - space.base)
    return shown if space is PKEYS else f"{space.name} {shown}"


class KeyPool(Record, frozen=True):
    """The numbers for jobs: ``first`` to ``last`` without ``reserved``.

    Raises:
        FabricError: the range is invalid, too large, or all of it is reserved.
    """

    first: int
    last: int
    reserved: frozenset[int] = frozenset()
    space: Space = PKEYS

    def __post_init__(self) -> None:
        space = self.space
        if not space.first <= self.first <= self.last <= space.last:
            raise FabricError(
                f"invalid range of {space.name}s: {space.label(self.first)}-{space.label(self.last)}",
                f"they are {space.label(space.first)} to {space.label(space.last)}"
                + ("; 0x7fff is the default partition" if space is PKEYS else ""),
                f"see fabric.{space.option}_first and fabric.{space.option}_last in vhpc.toml",
            )
        if self.last - self.first >= MAX_POOL:
            raise FabricError(
                f"too many {space.name}s: {self.last - self.first + 1}", f"a pool has at most {MAX_POOL}"
            )
        if not any(True for _ in self.numbers()):
            raise FabricError(
                f"the pool of {space.name}s is empty", f"fabric.{space.option}_reserved has the whole range"
            )

    def __contains__(self, number: int) -> bool:
        """Whether the number of an assignment is in the pool."""
        shown = number - self.space.base
        return self.first <= shown <= self.last and shown not in self.reserved

    def numbers(self) -> Iterator[int]:
        """All numbers of the pool in order, in the form of assignments."""
        numbers = range(self.first, self.last + 1)
        return (self.space.base + number for number in numbers if number not in self.reserved)


def port_guid(pkey: int, rail: int, rank: int, vf: int) -> int:
    """The GUID of a port: ``02cc PPPP SS RRRR VV``, so that it can only ever have its own key."""
    return _guid(PORT_PREFIX, pkey, rail, rank, vf)


def node_guid(pkey: int, rail: int, rank: int, vf: int) -> int:
    """The node GUID that belongs to ``port_guid``: ``02cd PPPP SS RRRR VV``."""
    return _guid(NODE_PREFIX, pkey, rail, rank, vf)


def mac(number: int, rail: int, rank: int, vf: int) -> str:
    """The MAC address of a guest's interface on an assignment's VLAN; locally administered, unicast.

    ``02`` and then the VLAN in 12 bits, the rail in 4, the rank in 16 and the VF in 8.

    Raises:
        ValueError: the number is not a VLAN, or a value does not fit into an address.
    """
    if VLANS.has(number) and 0 <= rail < MAX_ETHERNET_RAILS and 0 <= rank < MAX_RANKS and 0 <= vf < MAX_VFS:
        value = 0x02 << 40 | (number - VLANS.base) << 28 | rail << 24 | rank << 8 | vf
    else:
        raise ValueError(f"no MAC address has {label(number)}, rail {rail}, rank {rank}, VF {vf}")
    return value.to_bytes(6, "big").hex(":")


def _guid(prefix: int, pkey: int, rail: int, rank: int, vf: int) -> int:
    if not (
        FIRST_PKEY <= pkey <= LAST_PKEY
        and 0 <= rail < MAX_RAILS
        and 0 <= rank < MAX_RANKS
        and 0 <= vf < MAX_VFS
    ):
        raise ValueError(f"no GUID has pkey {pkey:#x}, rail {rail}, rank {rank}, VF {vf}")
    return prefix << 48 | pkey << 32 | rail << 24 | rank << 8 | vf
