# SPDX-License-Identifier: Apache-2.0
"""A guest's way to other networks through passt: the packet filter of its passt."""

from __future__ import annotations

from vhpc_slurm.model import Generation, GuestPlan, Lease, RunningGuest
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.network import nat, owned
from vhpc_slurm.node.resource.network import GuestNetwork, Key, Seen, configure_route
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

NAME = "nat0"
"""Name of the interface in guests."""


class NatData(nat.Rules, frozen=True):
    """The entry of a guest's filter: its rules, the guest's number, and the gid of its passt."""

    index: int
    gid: int


class Nat(GuestNetwork):
    """The packet filter of a guest's passt; the passt itself is a helper process."""

    kind = "nat"
    families = ("inet",)
    unseen = Kind.FIREWALL

    def take(self, layout: Layout, journal: Journal, lease: Lease, guest: GuestPlan, uid: int) -> None:
        """Make a guest's filter, before its passt starts with the number of QEMU's uid as gid.

        Raises:
            NodeError: this node cannot do it.
            Stopped: the job was ended meanwhile.
        """
        assert guest.nat is not None
        nat.check_gid(uid)
        what = nat.rules(layout.config, lease, guest.nat.dns)
        entry = NatData(what.dns, what.allow, what.deny, what.port, guest.index, uid)
        journal.announce(self.kind, f"{self.kind}:g{guest.index}", entry)
        nat.protect(lease.generation, guest.index, uid, what)
        nat.hold(lease.generation, guest.index, uid, what)

    def configure(self, lease: Lease, guest: RunningGuest, channel: GuestChannel, timeout_s: float) -> None:
        """Give the interface its name, its route and DNS servers."""
        del lease
        if found := guest.plan.nat:
            configure_route(channel, NAME, found, found, timeout_s)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Remove the filter of a passt that has ended."""
        del layout
        nat.release(generation, entry.read(NatData).index)

    def seen(self) -> Seen:
        """Tables and their copies."""
        tables = {key: frozenset(self.families) for key in nat.tables()}
        return Seen(tables=tables, copies=owned.existing())

    def table(self, generation: Generation, index: int) -> str:
        """Name of a guest's table."""
        return nat.table_name(generation, index)

    def protect(self, layout: Layout, generation: Generation, entry: Entry, *, copy: bool) -> None:
        """Make the table again, or its copy."""
        del layout
        found = entry.read(NatData)
        make = nat.hold if copy else nat.protect
        make(generation, found.index, found.gid, found)

    def unprotect(self, generation: Generation, index: int) -> None:
        """Remove the table and its copy."""
        nat.release(generation, index)

    def protected(self, seen: Seen, key: Key, entry: Entry) -> str:
        """The guest's passt."""
        del seen, entry
        return f"passt of guest {key[1]} of generation {key[0]}"
