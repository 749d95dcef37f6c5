# SPDX-License-Identifier: Apache-2.0
"""The one place where a node's plan is made whole, for Prolog and for ``vhpc plan``.

Placement says which CPUs, memory and devices the guests get.  What follows
from the lease (network identities, ports) and from the node (paths, shares,
control group) is added here, so that the boot computes nothing of it again.
"""

from __future__ import annotations

from dataclasses import replace

from vhpc_slurm.config.network import Network
from vhpc_slurm.device import NodeDevices
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import (
    HostInventory,
    Lease,
    NodePlan,
    Share,
)
from vhpc_slurm.node.devices import identities
from vhpc_slurm.node.guest import ports
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.network import nat, site
from vhpc_slurm.node.network import plan as network
from vhpc_slurm.node.store import disks
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.plan import Refusal, fit
from vhpc_slurm.placement.usage import Usage
from vhpc_slurm.policy import bind_refusal, mount_refusal, unshared


def of_lease(
    lease: Lease,
    host: HostInventory,
    shares: tuple[Share, ...],
    usage: Usage,
    devices: NodeDevices,
    notes: tuple[str, ...] = (),
) -> PlanInput:
    """The input of a job that has a lease with an image."""
    assert lease.image is not None
    part = lease.allocation.on(host.node)
    return PlanInput(
        lease.generation, part, host, lease.request, lease.image, shares, usage, devices, lease, notes
    )


def make(layout: Layout, what: PlanInput) -> NodePlan | Refusal:
    """The whole plan of this node, or all reasons why there is none; changes nothing."""
    found = fit(what, layout.config)
    if isinstance(found, Refusal):
        return found
    asked, folders = what.request, [share.path for share in what.shares]
    if why := (
        mount_refusal(asked.disk_mount, folders)
        or bind_refusal(asked.mounts, asked.disk_mount, folders)
        or unshared(asked.mounts, folders)
    ):
        return Refusal((UserError(why),))
    if what.lease is not None:
        try:
            found = _with_network(what.lease, found, what.host, layout.config.network)
        except VhpcError as err:
            return Refusal((err,))
    job_id, root = what.generation.job_id, what.image.manifest.root.sha256
    owner = what.request.uid if what.image.ref.own else None
    disk_mib = what.request.disk_mib or 0
    disk_mount = what.request.disk_mount if disk_mib else ""
    guests = []
    for guest in found.guests:
        paths = layout.guest_paths(job_id, guest.index, root, owner)
        if disk_mib:
            paths = replace(paths, disk=str(disks.path(layout, what.generation, guest.index)))
        guests.append(replace(guest, paths=paths, disk_mib=disk_mib, disk_mount=disk_mount))
    grouped = layout.config.guests.cgroups != "off"
    partition = Cgroup.of(str(what.generation)).partition if grouped else ""
    return replace(found, guests=tuple(guests), shares=what.shares, partition=partition)


def _with_network(lease: Lease, plan: NodePlan, host: HostInventory, config: Network) -> NodePlan:
    """The plan with identities of virtual functions, ports that guests must show, and the job's networks."""
    known = identities.of_plan(lease, plan, host)
    guests = []
    for guest in plan.guests:
        devices = tuple(replace(device, identity=known.get(device.key)) for device in guest.devices)
        named = replace(guest, devices=devices)
        interface = network.interface(lease, plan.node, guest.index, len(guest.pins))
        expected = ports.expected(lease, plan, named)
        found = nat.interface(config) if lease.nat else None
        shared = site.interface(config, len(guest.pins)) if lease.site else None
        guests.append(replace(named, port_guids=expected, interface=interface, nat=found, site=shared))
    return replace(plan, guests=tuple(guests), segment=network.node_segment(lease, plan.node))
