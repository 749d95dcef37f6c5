# SPDX-License-Identifier: Apache-2.0
"""The job's networks in a boot: the node's part before guests start, their interfaces when they are up."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from vhpc_slurm import files
from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import GuestInterface, GuestPlan, Lease, NatInterface, SiteInterface
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.guest import passt
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel
from vhpc_slurm.node.guest.peers import give_ssh_keys
from vhpc_slurm.node.network import firewall, forwarding, nat, plan, segment, site
from vhpc_slurm.node.store import journal, kinds
from vhpc_slurm.node.store.journal import Entry
from vhpc_slurm.node.store.layout import Layout

NAME = "vhpc0"
"""Name of the interface in guests, which programs can select."""
OUTSIDE = "nat0"
"""Name of the interface to other networks."""
SITE = "site0"
"""Name of the interface on the bridge of the site."""
SLOTS_S = 30.0
PROBE_S = 10.0
"""How long a guest may take to probe its interface after its agent has started."""
AGAIN_S = 0.2
log = logging.getLogger("vhpc")
NODELIST_MAX = 120_000
"""Bytes of VHPC_NODELIST; a longer list is left out, as Linux takes no variable of more than 128 KiB."""


def connect(work: Boot) -> None:
    """Make bridge, VXLAN device, taps and firewall; the plan's interfaces get their MTU.

    Raises:
        FabricError: something of another job has the VNI here, or the segment is not encrypted as
            this node's configuration demands.
        NodeError: this node cannot do it.
        Stopped: the job was ended meanwhile.
    """
    found = work.plan.segment
    if found is None:
        return
    network = work.layout.config.network
    if network.encryption == "wireguard" and len(work.lease.segment_nodes) > 1 and not found.tunnel:
        raise FabricError(
            f"the network of {work.lease.generation} is not encrypted",
            "network.encryption of this node is wireguard, that of vhpcd is not",
            "all hosts must have the same vhpc.toml; restart vhpcd after a change",
        )
    room = segment.underlay_mtu(found)

    def sized(guest: GuestPlan) -> GuestPlan:
        assert guest.interface is not None
        mtu = guest.interface.mtu or room
        if mtu > room:
            raise NodeError(
                f"network.mtu is {mtu}, and the underlay of {work.plan.node} leaves {room}",
                "larger frames would be lost",
                "see network.mtu in vhpc.toml(5)",
            )
        return replace(guest, interface=replace(guest.interface, mtu=mtu))

    work.plan = replace(work.plan, guests=tuple(sized(guest) for guest in work.plan.guests))
    peers = plan.peers(work.lease, work.plan.node)
    work.journal.acquire(kinds.NETWORK, f"network:{found.vni}", **segment.entry(found, peers))
    with ExitStack() as held:
        if firewall.available():
            firewall.remember(work.layout.guarded_ports, found.port)
            held.enter_context(firewall.holding(work.lease.generation, found, peers))
        segment.build(work.lease, work.plan, trusted_underlay=network.trusted_underlay)
    if network.accept_bridged:
        _pass_chains_of_others()


def _pass_chains_of_others() -> None:
    """The ready barrier tells the user if frames do not arrive, so a refusal of nftables is no error here."""
    try:
        forwarding.accept()
    except NodeError as err:
        log.warning("rules of others may drop the frames of job networks: %s", err.line())


def connect_outside(work: Boot, guest: GuestPlan, uid: int) -> None:
    """Make the packet filter of a guest's passt, and start it; a guest without nat needs neither.

    Args:
        work: of this node.
        guest: that QEMU is started for next.
        uid: of its QEMU; passt has a gid of this number.

    Raises:
        UserError: the user has disturbed passt.
        NodeError: this node cannot do it.
        Stopped: the job was ended meanwhile.
    """
    if guest.nat is None:
        return
    config = work.layout.config
    nat.check_gid(uid)
    what = nat.rules(config, work.lease, guest.nat.dns)
    work.journal.acquire(
        kinds.NAT,
        f"nat:g{guest.index}",
        index=guest.index,
        gid=uid,
        dns=what.dns,
        allow=what.allow,
        deny=what.deny,
        port=what.port,
    )
    nat.protect(work.lease.generation, guest.index, uid, what)
    nat.hold(work.lease.generation, guest.index, uid, what)
    work.helpers[guest.index].start_passt(
        nat.command(config.network, guest.nat, Path(guest.paths.nat_socket))
    )


def configure_outside(found: NatInterface, channel: GuestChannel, timeout_s: float) -> None:
    """Give a guest's interface to other networks its name, its route and DNS servers.

    Raises:
        ChannelError: the guest does not do it.
    """
    _when_probed(lambda: passt.configure(channel, found, OUTSIDE, timeout_s))


def connect_site(work: Boot, guest: GuestPlan) -> GuestPlan:
    """Give a guest a slot of this node, and make its tap on the bridge of the site; the plan with both.

    Raises:
        NodeError: this node cannot do it.
        FabricError: guests of other jobs have all slots.
        Stopped: the job was ended meanwhile.
    """
    if guest.site is None:
        return guest
    config, layout = work.layout.config.network, work.layout
    mtu, key = site.bridge_mtu(config.site_bridge), f"site:g{guest.index}"
    fd = files.open_lock(layout.state / "site-slots")
    try:
        if not files.lock(fd, SLOTS_S):
            raise NodeError("another job's Prolog holds the lock of the site's slots for too long")
        slot = site.free_slot(config, {int(entry.data["slot"]) for entry in site_entries(layout)})
        tap = site.tap_name(slot)
        work.journal.acquire(kinds.SITE, key, index=guest.index, slot=slot, tap=tap, mac="", ipv4="")
    finally:
        os.close(fd)
    # a resolver may take long: not under the lock
    ipv4 = site.address(config, work.plan.node, slot)
    found = replace(guest.site, tap=tap, mac=site.mac(ipv4), mtu=mtu)
    found = replace(found, ipv4=f"{ipv4}/{config.site_network.prefixlen}")
    work.journal.update(key, mac=found.mac, ipv4=ipv4)
    site.make(work.lease.generation, guest.index, found, isolated=config.site_isolated)
    made = replace(guest, site=found)
    guests = tuple(made if one.index == guest.index else one for one in work.plan.guests)
    work.plan = replace(work.plan, guests=guests)
    return made


def site_entries(layout: Layout) -> Iterator[Entry]:
    """What journals of this node have of the site's bridge."""
    for generation in journal.generations(layout.journals):
        for entry in journal.read_entries(layout.journals, generation):
            if entry.kind == kinds.SITE:
                yield entry


def configure_site(config: Network, found: SiteInterface, channel: GuestChannel, timeout_s: float) -> None:
    """Give a guest's interface on the site's bridge its name, its address, its route and DNS servers.

    Raises:
        ChannelError: the guest does not do it.
    """
    servers = config.site_dns[: nat.MAX_DNS]
    own = NatInterface(found.mac, found.ipv4, found.gateway, found.mtu, servers)
    _when_probed(lambda: passt.configure(channel, own, SITE, timeout_s))


def configure(lease: Lease, interface: GuestInterface, channel: GuestChannel, timeout_s: float) -> None:
    """Give a guest's interface its name and addresses, and tell programs the job's guests.

    Raises:
        ChannelError: the guest does not do it.
    """
    _when_probed(lambda: name_guests(lease, interface, channel, timeout_s))
    if lease.ssh is None:
        return
    try:
        give_ssh_keys(channel, lease.ssh, lease.request.uid, lease.request.gid, timeout_s)
    except ChannelRefusedError as err:
        # the job can run without it: an older agent, or a program of the image that has port 22
        log.warning("no ssh to a guest of %s: %s", lease.generation, err.why)


def name_guests(
    lease: Lease,
    interface: GuestInterface,
    channel: GuestChannel,
    timeout_s: float,
    left: Collection[str] = (),
) -> None:
    """Configure a guest's interface, and give it the names of all guests except those of nodes in ``left``.

    It can be repeated: an interface that is configured already keeps its addresses and connections.

    Raises:
        ChannelError: the guest does not do it.
    """
    slots = plan.slots(lease, left)
    names = tuple(name for name, _ in slots)
    nodelist = names if len(",".join(names)) <= NODELIST_MAX else ()
    channel.network(interface, NAME, nodelist, timeout_s, slots=slots)


def _when_probed(ask: Callable[[], None]) -> None:
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
