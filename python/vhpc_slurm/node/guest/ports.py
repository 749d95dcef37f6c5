# SPDX-License-Identifier: Apache-2.0
"""The InfiniBand ports that a guest must show, and the wait until it does."""

from __future__ import annotations

import errno
import logging

from vhpc_slurm.errors import UserError
from vhpc_slurm.fabric.numbers import DEFAULT_PKEY, FULL
from vhpc_slurm.model import GuestPlan, Lease, NodePlan
from vhpc_slurm.node.guest.channel import ChannelRefusedError, GuestChannel

log = logging.getLogger("vhpc")


def expected(lease: Lease, plan: NodePlan, guest: GuestPlan) -> tuple[int, ...]:
    """The port GUIDs of a guest, rail by rail; empty if it has no port.

    They are those of the virtual functions in its plan, or the lease's
    where the site's ports reach guests in another way (``fabric.in_guests``).
    """
    own = (device.identity.port_guid for device in guest.devices if device.identity)
    # a GUID of ours is made of key, rail, rank and function, in this order
    guids = sorted(guid for guid in own if guid)
    if guids or not lease.network.in_guests:
        return tuple(guids)
    place = lease.allocation.guests(len(plan.guests)).index(guest.hostname)
    return tuple(int(guid, 16) for guid in lease.network.port_guids[place])


def find(
    lease: Lease, name: str, guids: tuple[int, ...], channel: GuestChannel, *, wait_s: float, timeout_s: float
) -> None:
    """Have the guest wait until its ports are these, active, with exactly the job's keys.

    Raises:
        UserError: they are not so, or its agent cannot tell: the job may not start.
        ChannelError: the guest does not answer.
    """
    network = lease.network
    assert network.pkey is not None
    keys = (network.pkey | FULL, DEFAULT_PKEY, *network.site_keys)
    try:
        found = channel.fabric(keys, guids, wait_s, address_of(lease, name), timeout_s)
    except ChannelRefusedError as err:
        if err.errno == errno.ENOSYS:
            why, hint = "the image's agent is older than this check", "rebuild the image"
        else:
            why, hint = f"its guest sees: {err.why}", "nothing was started; tell your operator"
        raise UserError(f"the job's InfiniBand is not isolated on {name}", why, hint) from err
    where = ", ".join(f"{name} index {index}" for name, index in found.ports)
    log.info("key %#06x is on %s %s", network.pkey, where, found.interface)


def address_of(lease: Lease, name: str) -> str:
    """The address of a guest on the job's key, with its prefix; empty where it has none."""
    address = dict(lease.network.addresses).get(name)
    return f"{address}/{lease.network.prefix}" if address else ""
