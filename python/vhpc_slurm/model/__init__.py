# SPDX-License-Identifier: Apache-2.0
"""Frozen values that all rooms of the package exchange; no behaviour beyond checks.

Units are in the names: ``_mib`` is MiB (2**20 bytes), ``_s`` seconds.  CPU ids
called ``os_cpu`` are Linux logical CPU numbers (``/sys/devices/system/cpu/cpuN``);
ids called ``abstract`` count as Slurm does: socket by socket, core by core,
thread by thread, whatever numbers the firmware chose.

Decides nothing, reads nothing; every room may import it.
"""

from __future__ import annotations

from vhpc_slurm.model.host import HostCell, HostCpu, HostInventory
from vhpc_slurm.model.image import DIGEST, IMAGE_NAME, IMAGE_TAG, Blob, ImageIdentity, ImageManifest, ImageRef
from vhpc_slurm.model.job import (
    GENERATION,
    MAX_COMPONENTS,
    MAX_GUESTS_PER_NODE,
    NODE_NAME,
    Allocation,
    BatchPlace,
    Generation,
    GresAllocation,
    HetPlace,
    JobRequest,
    NodeAllocation,
    guest_hostname,
)
from vhpc_slurm.model.lease import (
    ALARM,
    Alarm,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
    Segment,
    SegmentPart,
    SshKeys,
    Stage,
    Timeline,
    TunnelKeyPairs,
    TunnelKeys,
)
from vhpc_slurm.model.plan import (
    GuestCell,
    GuestInterface,
    GuestPaths,
    GuestPlan,
    GuestTopology,
    MemoryBinding,
    NatInterface,
    NodePlan,
    NodeSegment,
    Share,
    SiteInterface,
    Tunnel,
    VcpuPin,
)

__all__ = [
    "ALARM",
    "DIGEST",
    "GENERATION",
    "IMAGE_NAME",
    "IMAGE_TAG",
    "MAX_COMPONENTS",
    "MAX_GUESTS_PER_NODE",
    "NODE_NAME",
    "Alarm",
    "Allocation",
    "BatchPlace",
    "Blob",
    "Generation",
    "GresAllocation",
    "GuestCell",
    "GuestInterface",
    "GuestPaths",
    "GuestPlan",
    "GuestTopology",
    "HetPlace",
    "HostCell",
    "HostCpu",
    "HostInventory",
    "ImageIdentity",
    "ImageManifest",
    "ImageRef",
    "JobRequest",
    "Lease",
    "LeaseRecord",
    "LeaseState",
    "MemoryBinding",
    "NatInterface",
    "NetworkIdentity",
    "NodeAllocation",
    "NodePlan",
    "NodeSegment",
    "Segment",
    "SegmentPart",
    "Share",
    "SiteInterface",
    "SshKeys",
    "Stage",
    "Timeline",
    "Tunnel",
    "TunnelKeyPairs",
    "TunnelKeys",
    "VcpuPin",
    "guest_hostname",
]
