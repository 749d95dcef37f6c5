# SPDX-License-Identifier: Apache-2.0
"""What one boot works with."""

from __future__ import annotations

from msgspec import Struct, field

from vhpc_slurm.model import HostInventory, ImageIdentity, Lease, NodePlan
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.guest.libvirtd import Hypervisor
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.resource.memory import GuestMemory
from vhpc_slurm.node.store.images import StagedImage
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder


class Boot(Struct):
    """Everything that one boot works with.  The boot fills in staged, cgroup, memory and helpers.

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
    memory: GuestMemory | None = None
    helpers: dict[int, Helpers] = field(default_factory=dict)
