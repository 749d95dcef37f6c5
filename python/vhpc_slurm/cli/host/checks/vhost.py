# SPDX-License-Identifier: Apache-2.0
"""vhost-net: whether the kernel itself passes packets of guests with KVM, or QEMU has to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.host import inventory

DEVICE = Path("/dev/vhost-net")
"""Not configurable: libvirt and QEMU use this path."""
NETWORKS = frozenset(("job", "site"))
"""Networks whose interface is a tap; that of nat is passt's."""


def check(config: Config, host: HostInventory, *, root: bool, device: Path = DEVICE) -> Iterator[CheckResult]:
    """The result on a node with KVM, where guests may have a tap.

    Root opens the device, as libvirt does at each start of a guest: this also loads the
    module, unless the host forbids that.
    """
    if not host.kvm or NETWORKS.isdisjoint(config.network.allowed):
        return
    problem = inventory.open_problem(device) if root or not device.exists() else ""
    if not problem:
        yield ok("network.vhost", f"packets of guests pass through the kernel: {device}")
        return
    yield warn(
        "network.vhost",
        f"packets of guests pass through QEMU, which takes nearly twice as long: {problem}",
        "modprobe vhost_net, and list it in /etc/modules-load.d",
    )
