# SPDX-License-Identifier: Apache-2.0
"""A guest's place on the bridge of the site: its slot, its tap and the packet filter of the tap."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, Lease, RunningGuest, SiteInterface, SitePort
from vhpc_slurm.node.checked import CheckResult, error, ok, warn
from vhpc_slurm.node.finding import Kind, NodeFinding
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.network import firewall, owned, probe, site
from vhpc_slurm.node.resource.network import GuestNetwork, Key, Seen, configure_route
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

NAME = "site0"
"""Name of the interface in guests."""
SLOTS_S = 30.0


class SiteData(Record, frozen=True):
    """The entry of a guest's place: addresses are empty until they are known."""

    index: int
    slot: int
    tap: str
    mac: str = ""
    ipv4: str = ""


class Site(GuestNetwork):
    """The tap of a guest on the bridge of the site."""

    kind = "site"
    families = site.FAMILIES
    unseen = Kind.FIREWALL

    def take(self, layout: Layout, journal: Journal, node: str, index: int, found: SiteInterface) -> SitePort:
        """Give a guest a slot of this node, and make its tap on the bridge of the site.

        Raises:
            NodeError: this node cannot do it.
            FabricError: guests of other jobs have all slots.
            Stopped: the job was ended meanwhile.
        """
        config = layout.config.network
        mtu, key = site.bridge_mtu(config.site_bridge), f"{self.kind}:g{index}"
        fd = files.open_lock(layout.state / "site-slots")
        try:
            if not files.lock(fd, SLOTS_S):
                raise NodeError("another job's Prolog holds the lock of the site's slots for too long")
            slot = site.free_slot(config, {entry.read(SiteData).slot for _, entry in self.entries(layout)})
            tap = site.tap_name(slot)
            journal.announce(self.kind, key, SiteData(index, slot, tap))
        finally:
            os.close(fd)
        # a resolver may take long: not under the lock
        ipv4 = site.address(config, node, slot)
        port = SitePort(tap, site.mac(ipv4), f"{ipv4}/{config.site_network.prefixlen}", mtu)
        journal.update(key, mac=port.mac, ipv4=ipv4)
        site.make(journal.generation, index, found, port, isolated=config.site_isolated)
        return port

    def configure(self, lease: Lease, guest: RunningGuest, channel: GuestChannel, timeout_s: float) -> None:
        """Give the interface its name, its address, its route and DNS servers."""
        del lease
        if guest.plan.site is not None and guest.site_port is not None:
            configure_route(channel, NAME, guest.site_port, guest.plan.site, timeout_s)

    def release(self, layout: Layout, generation: Generation, entry: Entry) -> None:
        """Remove the tap from the bridge, and its packet filter; the guest has ended."""
        del layout
        found = entry.read(SiteData)
        site.release(generation, found.index, found.tap)

    def seen(self) -> Seen:
        """Taps, tables and their copies."""
        taps = dict(site.taps())
        return Seen(taps, {key: frozenset(self.families) for key in site.tables()}, owned.existing())

    def table(self, generation: Generation, index: int) -> str:
        """Name of a guest's table."""
        return site.table_name(generation, index)

    def protect(self, layout: Layout, generation: Generation, entry: Entry, *, copy: bool) -> None:
        """Make the table again, or its copy."""
        del layout
        make = site.hold if copy else site.protect
        found = entry.read(SiteData)
        make(generation, found.index, SitePort(found.tap, found.mac, found.ipv4))

    def unprotect(self, generation: Generation, index: int) -> None:
        """Remove the table and its copy."""
        site.release(generation, index, "")

    def protected(self, seen: Seen, key: Key, entry: Entry) -> str:
        """The guest's tap."""
        there = entry.read(SiteData).tap in seen.interfaces
        return f"the tap of guest {key[1]} of generation {key[0]}" if there else ""

    def stray_interfaces(
        self, layout: Layout, seen: Seen, known: Mapping[Key, Entry]
    ) -> Iterator[NodeFinding]:
        """Taps that no journal has."""
        for tap in seen.interfaces.keys() - _taps(known):
            of = f"generation {seen.interfaces[tap] or 'unknown'}, which has no journal"
            repair = partial(self._remove, layout, tap)
            yield NodeFinding(Kind.ORPHAN_NETWORK, f"network interface {tap} of {of}", repair)

    def _remove(self, layout: Layout, tap: str) -> None:
        if tap not in _taps(self.announced(layout)):
            site.remove(tap)

    def check(self, config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
        """Results where the site allows its bridge; the kernel is tried by root only."""
        network = config.network
        if "site" not in network.allowed:
            return
        try:
            mtu = site.bridge_mtu(network.site_bridge)
        except NodeError as err:
            what = f"{err.line()}: jobs with --vhpc-network=site fail here, and drain this node"
            yield error("site.bridge", what, err.hint)
        else:
            yield ok("site.bridge", f"{network.site_bridge} is up and has an MTU of {mtu}")
        try:
            first, last = (site.address(network, node, slot) for slot in (0, network.site_guests - 1))
        except NodeError as err:
            yield error("site.names", err.line(), err.hint)
        else:
            yield ok("site.names", f"guests of this node have addresses such as {first} and {last}")
        if not firewall.available():
            what = "nftables is not installed: jobs with --vhpc-network=site fail here, and drain this node"
            yield error("site.firewall", what, "apt install nftables")
        elif not root:
            yield warn("site.kernel", "a locked bridge port was not tried", "run vhpc doctor as root")
        else:
            yield kernel()


def _taps(known: Mapping[Key, Entry]) -> set[str]:
    return {entry.read(SiteData).tap for entry in known.values()}


def kernel() -> CheckResult:
    """Whether the kernel makes locked bridge ports and the packet filter."""
    try:
        probe.run("site")
    except NodeError as err:
        what = f"this node cannot make a guest's port on a bridge: {err.line()}"
        return error(
            "site.kernel", what, "it needs Linux 5.18 with bridge, tun and nf_tables, and iproute2 5.18"
        )
    return ok("site.kernel", "a locked port was created in a separate namespace, and removed")
