# SPDX-License-Identifier: Apache-2.0
"""From a guest's plan to its ``DomainSpec``: the only place that makes one, also for ``vhpc plan --xml``."""

from __future__ import annotations

from collections.abc import Sequence

from vhpc_slurm.config import Guests
from vhpc_slurm.domain.spec import DomainSpec, ShareSpec
from vhpc_slurm.model import GuestPlan, HostInventory, ImageIdentity, NodePlan, Share
from vhpc_slurm.node.host import accounts
from vhpc_slurm.node.store.layout import domain_name


def domain_spec(
    config: Guests,
    plan: NodePlan,
    guest: GuestPlan,
    host: HostInventory,
    image: ImageIdentity,
    *,
    uid: int,
    libvirt_version: int,
    shares: Sequence[Share],
) -> DomainSpec:
    """The domain of one guest.

    Args:
        config: the site's settings of guests.
        plan: of the node.
        guest: one of the plan's.
        host: this node.
        image: of the job.
        uid: that QEMU runs as; allocated when the guest is started.
        libvirt_version: of the running libvirt.
        shares: those of the plan that have a daemon.

    Raises:
        UserError: a value that comes from the image is not acceptable.
        NodeError: any other value is not, or the group of QEMU does not exist.
    """
    paths = guest.paths
    return DomainSpec(
        name=domain_name(plan.generation, guest.index),
        generation=plan.generation,
        guest=guest,
        hypervisor="kvm" if host.kvm else "qemu",
        cpu_vendor=host.cpu_vendor,
        invariant_tsc=host.invariant_tsc,
        libvirt_version=libvirt_version,
        emulator=config.emulator,
        kernel=paths.kernel,
        initrd=paths.initrd,
        root=paths.root,
        disk=paths.disk,
        root_format=image.manifest.root_format,
        cmdline=image.manifest.cmdline,
        uid=uid,
        gid=accounts.group_id(config.qemu_group),
        agent_socket=paths.agent_socket,
        console_log=paths.console_log,
        shares=tuple(ShareSpec(share.tag, paths.share_socket(share.tag)) for share in shares),
        partition=plan.partition,
    )
