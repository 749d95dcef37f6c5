# SPDX-License-Identifier: Apache-2.0
"""What one boot works with."""

from __future__ import annotations

from msgspec import Struct, field

from vhpc_slurm.model import HostInventory, ImageIdentity, Lease, NodePlan
from vhpc_slurm.node.guest import memory
from vhpc_slurm.node.guest.helpers import Helpers
from vhpc_slurm.node.guest.libvirtd import Hypervisor
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.store.images import StagedImage
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder


class GuestMemory(Struct):
    """Memory of all guests: uids whose processes may have it, and its memfds."""

    owners: list[int]
    inodes: set[memory.Inode]


class Boot(Struct):
    """Everything that one boot works with; the last four are filled in as it goes on.

    Attributes:
        plan: replaced when virtual functions turn out to be unfit (``reserve.take_devices``).
        helpers: by the guest's index.
    """

    layout: Layout
    lease: Lease
    image: ImageIdentity
    plan: NodePlan
    host: HostInventory
    journal: Journal
    recorder: Recorder
    account: Account
    hypervisor: Hypervisor
    staged: StagedImage | None = None
    cgroup: Cgroup | None = None
    memory: GuestMemory = field(default_factory=lambda: GuestMemory([], set()))
    helpers: dict[int, Helpers] = field(default_factory=dict)
