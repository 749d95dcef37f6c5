# SPDX-License-Identifier: Apache-2.0
"""A guest's way to other networks through passt: the packet filter of its passt."""

from __future__ import annotations

import contextlib
import grp
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from vhpc_slurm.config import Config, Guests
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, GuestPlan, Lease, RunningGuest
from vhpc_slurm.node.checked import CheckResult, error, ok, warn
from vhpc_slurm.node.finding import Kind
from vhpc_slurm.node.guest.channel import GuestChannel
from vhpc_slurm.node.network import firewall, nat, owned, probe
from vhpc_slurm.node.resource.network import GuestNetwork, Key, Seen, configure_route
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

NAME = "nat0"
"""Name of the interface in guests."""
SUBGID = Path("/etc/subgid")
PROFILES = Path("/sys/kernel/security/apparmor/profiles")
TIMEOUT_S = 10.0


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

    def check(self, config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
        """Results where the site allows nat; the kernel is tried by root only."""
        del node
        if "nat" not in config.network.allowed:
            return
        yield passt(config.network.passt)
        yield packet_filter(root=root)
        yield gids(config.guests, grp.getgrall(), SUBGID)
        yield from apparmor(config, PROFILES)
        found = nat.resolvers(config.network)
        if found:
            yield ok("nat.dns", f"guests resolve names by {', '.join(found)}")
        else:
            what = "resolv.conf of this node names no IPv4 address that guests reach: they resolve no names"
            yield warn("nat.dns", what, "set network.nat_dns")


def passt(program: str) -> CheckResult:
    """Whether passt is there, and knows the mode that vhpc uses."""
    try:
        done = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return error(
            "nat.passt",
            f"{program} cannot be run, so jobs with nat fail here and drain this node: {err}",
            "apt install passt (Debian 13); or set network.passt",
        )
    if "--vhost-user" not in done.stdout + done.stderr:
        return error(
            "nat.passt",
            f"{program} does not know --vhost-user, so jobs with nat fail here and drain this node",
            "install passt 2024_11_27 or newer (Debian 13 has it, Debian 12 does not)",
        )
    return ok("nat.passt", f"{program} can be used")


def packet_filter(*, root: bool) -> CheckResult:
    """Whether the kernel takes the rules that keep guests away from the site."""
    if not firewall.available():
        return error(
            "nat.firewall",
            "nftables is not installed: jobs with nat fail here, and drain this node",
            "apt install nftables",
        )
    if not root:
        return warn("nat.firewall", "the packet filter was not tried", "run vhpc doctor as root")
    try:
        probe.run("nat")
    except NodeError as err:
        what = f"this node cannot make the packet filter of nat: {err.line()}"
        return error("nat.firewall", what, "it needs nf_tables with meta skgid and fib")
    return ok("nat.firewall", "a packet filter was created in a separate namespace, and removed")


def gids(config: Guests, groups: Iterable[grp.struct_group], subgid: Path) -> CheckResult:
    """Whether a group has a gid that only passt may have, or a user may map one (subgid(5))."""
    first, last = config.uid_base, config.uid_base + config.uid_count - 1
    taken = [f"{group.gr_name} ({group.gr_gid})" for group in groups if first <= group.gr_gid <= last]
    with contextlib.suppress(OSError):
        for line in subgid.read_text(errors="replace").splitlines():
            words = line.split(":")
            numbers = [int(word) for word in words[1:] if word.isascii() and word.isdigit()]
            if len(numbers) == 2 and numbers[0] <= last and first < sum(numbers):
                taken.append(f"{line.strip()} of {subgid}")
    if taken:
        return error(
            "nat.gids",
            f"gids {first} to {last} must belong to no group, and {', '.join(taken[:3])} exist",
            "change guests.uid_base",
        )
    return ok("nat.gids", f"no group has a gid from {first} to {last}")


def apparmor(config: Config, profiles: Path) -> Iterator[CheckResult]:
    """Whether a profile of AppArmor keeps passt from making its socket."""
    try:
        loaded = profiles.read_text(errors="replace").splitlines()
    except OSError:
        return  # no AppArmor
    if config.network.passt == "/usr/bin/passt" and "passt (enforce)" in loaded:
        yield warn(
            "nat.apparmor",
            "AppArmor's profile of passt may forbid sockets in vhpc's run folder",
            f"add to /etc/apparmor.d/usr.bin.passt: owner {config.paths.run}/** rw,",
        )
