# SPDX-License-Identifier: Apache-2.0
"""A network of guests: what its three kinds have in common."""

from __future__ import annotations

import errno
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar

from msgspec import field

from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.model import Generation, Lease, NatInterface, RunningGuest, SiteInterface, SitePort
from vhpc_slurm.node import finding
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.wire import Op, Tag, put
from vhpc_slurm.node.resource.protocol import Resource
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

PROBE_S = 10.0
"""How long a guest may take to probe its interface after its agent has started."""
AGAIN_S = 0.2
Key = tuple[Generation, int]
"""A generation, and the index of a guest; 0 where a node has one network for all guests of a generation."""


class NumberedData(Record, frozen=True):
    """The number of the guest in the entry of any kind of network; 0 where all guests have one together."""

    index: int = 0


class Seen(Record, frozen=True):
    """What the kernel has of a kind of network.

    Attributes:
        interfaces: names, and the generations that have them; empty where that is not set yet.
        tables: families of nftables by key.
        copies: families and names of tables of which a process keeps a copy (``owned``).
    """

    interfaces: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[Key, frozenset[str]] = field(default_factory=dict)
    copies: frozenset[tuple[str, str]] = frozenset()


class GuestNetwork(Resource):
    """A kind of network: taken, configured in the guest, checked, restored and released.

    ``domain`` has the interface of each kind in a guest's XML.
    """

    families: ClassVar[tuple[str, ...]]
    """Families of nftables in which it has a table."""
    unseen: ClassVar[Kind]
    """The finding if the kernel cannot be asked."""

    @abstractmethod
    def configure(self, lease: Lease, guest: RunningGuest, channel: GuestChannel, timeout_s: float) -> None:
        """Give the guest's interface its name, its addresses and routes; a guest without one needs nothing.

        Raises:
            ChannelError: the guest does not do it.
        """

    @abstractmethod
    def seen(self) -> Seen:
        """What the kernel has; NodeError if it cannot be asked."""

    @abstractmethod
    def table(self, generation: Generation, index: int) -> str:
        """Name of the nftables table."""

    @abstractmethod
    def protect(self, layout: Layout, generation: Generation, entry: Entry, *, copy: bool) -> None:
        """Make the table again, or its copy, from what the journal has."""

    @abstractmethod
    def unprotect(self, generation: Generation, index: int) -> None:
        """Remove the table and its copy."""

    @abstractmethod
    def protected(self, seen: Seen, key: Key, entry: Entry) -> str:
        """What the table protects; empty if that is not there yet."""

    def stray_interfaces(
        self, layout: Layout, seen: Seen, known: Mapping[Key, Entry]
    ) -> Iterator[NodeFinding]:
        """Interfaces that no journal has."""
        del layout, seen, known
        yield from ()

    def announced(self, layout: Layout) -> dict[Key, Entry]:
        """Those that journals have."""
        found = self.entries(layout)
        return {(generation, entry.read(NumberedData).index): entry for generation, entry in found}

    def orphans(self, layout: Layout) -> Iterator[NodeFinding]:
        """Interfaces and tables that no journal has, and lost tables.

        The kernel is asked before the journals: a boot announces its network before it makes it.
        """
        seen, problem = Seen(), None
        try:
            seen = self.seen()
        except NodeError as err:
            problem = err
        try:
            known = self.announced(layout)
        except VhpcError as err:  # a journal is damaged: it is unknown which generation holds what
            if seen.interfaces or seen.tables:
                yield finding.of_error(Kind.ORPHAN_NETWORK, err)
            return
        if problem is not None:
            if known:
                yield finding.of_error(self.unseen, problem)
            return
        yield from self.stray_interfaces(layout, seen, known)
        for key in seen.tables.keys() - known.keys():
            what = f"nftables table {self.table(*key)} of a generation that has no journal"
            yield NodeFinding(Kind.ORPHAN_NETWORK, what, partial(self._remove_table, layout, key))
        for key, entry in known.items():
            protected = self.protected(seen, key, entry)
            if protected and not joblock.busy(layout, key[0].job_id):  # a hook makes it, or removes it
                yield from self._lost(layout, seen, key, f"{protected} has lost")

    def _lost(self, layout: Layout, seen: Seen, key: Key, what: str) -> Iterator[NodeFinding]:
        name, several = self.table(*key), len(self.families) > 1
        if seen.tables.get(key) != frozenset(self.families):
            repair = partial(self._restore, layout, key, copy=False)
            yield NodeFinding(Kind.FIREWALL, f"{what} its nftables table{'s' if several else ''}", repair)
        if not {(family, name) for family in self.families} <= seen.copies:
            repair = partial(self._restore, layout, key, copy=True)
            copies = "copies of its tables" if several else "a copy of its table"
            yield NodeFinding(Kind.FIREWALL, f"{what} the process that keeps {copies}", repair)

    def _restore(self, layout: Layout, key: Key, *, copy: bool) -> None:
        entry = self.announced(layout).get(key)
        if entry is not None:
            self.protect(layout, key[0], entry, copy=copy)

    def _remove_table(self, layout: Layout, key: Key) -> None:
        if key not in self.announced(layout):
            self.unprotect(*key)


def configure_route(
    channel: GuestChannel,
    name: str,
    found: NatInterface | SitePort,
    route: NatInterface | SiteInterface,
    timeout_s: float,
) -> None:
    """Configure a guest's interface with its default route and its DNS servers.

    Args:
        channel: to the guest.
        name: that the interface gets in the guest.
        found: the guest's end.
        route: gateway and DNS servers; without servers the image's resolv.conf stays.
        timeout_s: deadline.

    Raises:
        ChannelRefusedError: ENOSYS: the image's agent does not know the operation; else it cannot do it.
        ChannelError: silence, or the channel was closed.
    """
    body = put(Tag.MAC, bytes.fromhex(found.mac.replace(":", "")))
    body += put(Tag.INTERFACE, name) + put(Tag.MTU, found.mtu)
    body += put(Tag.IPV4, found.ipv4) + put(Tag.GATEWAY, route.gateway)
    body += b"".join(put(Tag.NAMESERVER, one) for one in route.dns)
    when_probed(lambda: channel.ask(Op.NAT, body, timeout_s))


def when_probed(ask: Callable[[], object]) -> None:
    """Ask a guest to configure an interface, again while it has not found the interface yet."""
    until = time.monotonic() + PROBE_S
    while True:
        try:
            ask()
            return
        except ChannelRefusedError as err:
            if err.errno != errno.ENODEV or time.monotonic() >= until:
                raise
        time.sleep(AGAIN_S)
