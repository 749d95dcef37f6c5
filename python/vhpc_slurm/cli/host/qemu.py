# SPDX-License-Identifier: Apache-2.0
"""The version of this node's QEMU."""

from __future__ import annotations

from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError


def version(config: Config) -> int:
    """QEMU's version as libvirt encodes it (10.1.2: 10001002); 0 if libvirt cannot be asked."""
    from vhpc_slurm.node.guest import libvirtd

    try:
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
            return hypervisor.version()[1]
    except (VhpcError, ImportError):
        return 0
