# SPDX-License-Identifier: Apache-2.0
"""Limits of vhpcd's connections and bytes for unauthenticated peers.

Each address has a quota, and each *group* of addresses has room that no other group
can take. When an address exceeds its quota, its oldest or its largest connection is
closed, not the newest: the newest may be the legitimate one.

A peer cannot choose its group: it follows from the address, from the port (binding a
port below 1024 takes root on the peer's host) and, on vhpcd's own host, from the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

PRIVILEGED_PORTS = 1024


class PeerGroup(Enum):
    """Connections that share one quota."""

    TRUSTED = "root of the cluster's hosts"
    MEMBER = "the cluster's hosts"
    OTHER = "other hosts"


@dataclass(frozen=True)
class Quota:
    """The most that a group and an address of it may hold."""

    connections: int
    connections_each: int
    bytes: int
    bytes_each: int


SHARES: Mapping[PeerGroup, Quota] = {
    PeerGroup.TRUSTED: Quota(4096, 1024, 64 << 20, 32 << 20),
    PeerGroup.MEMBER: Quota(1024, 64, 16 << 20, 4 << 20),
    PeerGroup.OTHER: Quota(256, 32, 16 << 20, 4 << 20),
}
"""A request has at most 1 MiB; a node with a thousand leases acknowledges them one by one."""


class Peer:
    """A connection whose user is not authenticated yet."""

    def __init__(self, address: str, group: PeerGroup, drop: Callable[[], None]) -> None:
        """``drop`` ends the connection; it is called at most once."""
        self.address = address
        self.group = group
        self.held = 0
        self._drop = drop

    def drop(self) -> None:
        """End it."""
        self._drop()


class Admission:
    """All unauthenticated connections; belongs to the event loop."""

    def __init__(
        self,
        shares: Mapping[PeerGroup, Quota],
        dropped: Callable[[Peer, str], None] = lambda _peer, _why: None,
    ) -> None:
        """``dropped`` is called for each connection that is closed, with the reason."""
        self._shares = shares
        self._dropped = dropped
        # Peers of an address in the order in which they came.
        self._peers: dict[PeerGroup, dict[str, dict[Peer, None]]] = {group: {} for group in PeerGroup}
        self._bytes: dict[PeerGroup, dict[str, int]] = {group: {} for group in PeerGroup}
        self._connections = dict.fromkeys(PeerGroup, 0)
        self._held = dict.fromkeys(PeerGroup, 0)

    def enter(self, peer: Peer) -> None:
        """Add a connection; the oldest of its address, or of the address with most, may be closed for it."""
        share, group = self._shares[peer.group], peer.group
        of_address = self._peers[group].setdefault(peer.address, {})
        of_address[peer] = None
        self._connections[group] += 1
        if len(of_address) > share.connections_each:
            self._oust(next(iter(of_address)), "its address has too many connections")
        elif self._connections[group] > share.connections:
            most = max(self._peers[group].values(), key=len)
            self._oust(next(iter(most)), f"{group.value} have too many connections")

    def grew(self, peer: Peer, count: int) -> None:
        """A connection holds more bytes; the largest of its address, or some of the group, may be closed."""
        share, group = self._shares[peer.group], peer.group
        if peer not in self._peers[group].get(peer.address, ()):
            return  # it has just been dropped
        self._hold(peer, count)
        if self._bytes[group][peer.address] > share.bytes_each:
            self._oust(self._largest(group, peer.address), "its address holds too many bytes")
        # The address that holds most may do so in many small connections.
        while self._held[group] > share.bytes:
            most = max(self._bytes[group], key=self._bytes[group].__getitem__)
            self._oust(self._largest(group, most), f"{group.value} hold too many bytes")

    def leave(self, peer: Peer) -> None:
        """A connection has ended, or its user is authenticated; may be called twice."""
        of_address = self._peers[peer.group].get(peer.address, {})
        if peer not in of_address:
            return
        self._hold(peer, -peer.held)
        del of_address[peer]
        self._connections[peer.group] -= 1
        if not of_address:
            del self._peers[peer.group][peer.address]
            self._bytes[peer.group].pop(peer.address, None)

    def count(self, group: PeerGroup) -> int:
        """How many connections of a group there are."""
        return self._connections[group]

    def _hold(self, peer: Peer, count: int) -> None:
        peer.held += count
        self._held[peer.group] += count
        of_address = self._bytes[peer.group]
        of_address[peer.address] = of_address.get(peer.address, 0) + count

    def _largest(self, group: PeerGroup, address: str) -> Peer:
        # The first of several as large: the oldest.
        return max(self._peers[group][address], key=lambda peer: peer.held)

    def _oust(self, peer: Peer, why: str) -> None:
        self.leave(peer)
        self._dropped(peer, why)
        peer.drop()


def scaled(shares: Mapping[PeerGroup, Quota], descriptors: int) -> dict[PeerGroup, Quota]:
    """The quotas, reduced to the available number of file descriptors for connections."""
    wanted = sum(share.connections for share in shares.values())
    if descriptors >= wanted:
        return dict(shares)
    part = max(0.0, descriptors / wanted)
    return {
        group: Quota(
            max(8, int(share.connections * part)),
            max(4, int(share.connections_each * part)),
            share.bytes,
            share.bytes_each,
        )
        for group, share in shares.items()
    }
