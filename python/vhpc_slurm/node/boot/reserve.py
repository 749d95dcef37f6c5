# SPDX-License-Identifier: Apache-2.0
"""Reserving CPUs, memory and devices of the node for a job, and binding its devices."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from vhpc_slurm.model import HostInventory, Lease, NodePlan, Share
from vhpc_slurm.node import plan
from vhpc_slurm.node.boot.state import Boot
from vhpc_slurm.node.devices import assignment, gpumap, mig
from vhpc_slurm.node.devices.device_class import HostState
from vhpc_slurm.node.devices.nvswitch import Fmpm
from vhpc_slurm.node.host import attribute
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.resource.nvswitch import NvSwitch
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import fold

PLAN_LOCK_S = 30.0
"""Longest wait for Prologs of other jobs that are planning."""
log = logging.getLogger("vhpc")


def reserve(
    layout: Layout,
    lease: Lease,
    host: HostInventory,
    shares: tuple[Share, ...],
    journal: Journal,
    avoid: frozenset[str] = frozenset(),
) -> NodePlan:
    """Plan from what other jobs leave, and write down what this one takes, before any other may plan.

    Args:
        layout: of this node.
        lease: of the job.
        host: this node.
        shares: folders of the host that the guests see.
        journal: the job's journal; an earlier reservation in it is replaced.
        avoid: keys of devices that are busy, whatever reservations say.

    Raises:
        UserError: the job cannot run as it was asked for, on any node.
        NodeError: this node does not match what Slurm or the site says of it.
        FabricError: guests of another job still hold what Slurm gave this one.
        Stopped: the job was ended meanwhile.
    """
    with reservations.plan_lock(layout, PLAN_LOCK_S):
        devices = assignment.handed_out(layout)
        usage = fold(reservations.live(layout, excluding=lease.generation))
        devices = replace(devices, quarantined=(*devices.quarantined, *avoid))
        made = plan.make(layout, plan.of_lease(lease, host, shares, usage, devices))
        if isinstance(made, Refusal):
            raise made.error()
        reservations.Reservations().take(journal, made)
    return made


def take_devices(work: Boot) -> NodePlan:
    """Bind the job's devices; libvirt takes them as they are (``managed="no"``).

    Returns the plan whose devices were bound.  If virtual functions turn out to be
    unfit, this is one that was made again without them; that ends, since each time
    there are fewer to choose from.

    Raises:
        NodeError: a device of the plan cannot be handed out, or no functions are left.
        QuarantinedError: a device got stuck; it is in quarantine.
        Stopped: the job was ended meanwhile.
    """
    avoid: frozenset[str] = frozenset()
    layout, lease, plan_ = work.layout, work.lease, work.plan
    while True:
        held = fold(reservations.live(layout, excluding=lease.generation)).devices
        wanted = [device for guest in plan_.guests for device in guest.devices]
        try:
            AssignedDevice().take(layout, work.journal, wanted, HostState(held))
            break
        except assignment.UnfitError as err:
            log.warning("%s; planning again without them", err.line())
            avoid |= err.busy
            plan_ = reserve(layout, lease, work.host, plan_.shares, work.journal, avoid)
    config = layout.config
    if config.devices.fmpm:
        until = attribute.Until(config.devices.timeout_s)
        for device in wanted:
            if device.traits.nvswitch:
                mig.check(config.host.sysfs_root, device.key, until)
        modules = gpumap.modules(Path(config.placement.gpu_map))
        NvSwitch().take(Fmpm(config.devices), work.journal, plan_, modules)
    return plan_
