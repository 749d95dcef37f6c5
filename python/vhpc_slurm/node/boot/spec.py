# SPDX-License-Identifier: Apache-2.0
"""From a guest to its ``DomainSpec``: the only place that makes one, also for ``vhpc plan --xml``."""

from __future__ import annotations

from pathlib import Path

from vhpc_slurm.architecture import Architecture, of_machine
from vhpc_slurm.config import Config
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.model import HostInventory, ImageIdentity, NodePlan, RunningGuest
from vhpc_slurm.node.checkpoint.facts import is_saveable
from vhpc_slurm.node.host import accounts
from vhpc_slurm.node.store.layout import domain_name


def domain_spec(
    config: Config,
    plan: NodePlan,
    running: RunningGuest,
    host: HostInventory,
    image: ImageIdentity,
    libvirt_version: int,
) -> DomainSpec:
    """The domain of one guest.

    Args:
        config: of the site.
        plan: of the node.
        running: one of the plan's guests; for ``vhpc plan`` with what can be known before the boot.
        host: this node.
        image: of the job.
        libvirt_version: of the running libvirt.

    Raises:
        UserError: a value that comes from the image is not acceptable.
        NodeError: any other value is not, or the group of QEMU does not exist.
    """
    arch = of_machine(image.manifest.arch)
    return DomainSpec(
        name=domain_name(plan.generation, running.plan.index),
        generation=plan.generation,
        running=running,
        host=host,
        manifest=image.manifest,
        gid=accounts.group_id(config.guests.qemu_group),
        libvirt_version=libvirt_version,
        emulator=config.guests.emulator if arch.name == host.arch else "",
        firmware=_firmware(arch) if running.plan.devices else "",
        partition=plan.partition,
        saveable=is_saveable(config, plan.guests),
    )


def _firmware(architecture: Architecture) -> str:
    """The UEFI of this node for guests with devices; empty if the node has none, or they need none."""
    return next((path for path in architecture.firmware if Path(path).is_file()), "")
