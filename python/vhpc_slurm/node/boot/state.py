# SPDX-License-Identifier: Apache-2.0
"""The input and the results of a boot; they are immutable."""

from __future__ import annotations

from vhpc_slurm.model import HostInventory, ImageIdentity, Lease, NodePlan, RunningGuest, Share
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.guest.libvirtd import Hypervisor
from vhpc_slurm.node.host.accounts import Account
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.resource.memory import GuestMemory
from vhpc_slurm.node.store.images import StagedImage
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.node.store.timeline import Recorder
from vhpc_slurm.record import Record


class Boot(Record, frozen=True):
    """Everything that one boot is given."""

    layout: Layout
    lease: Lease
    image: ImageIdentity
    plan: NodePlan
    host: HostInventory
    journal: Journal
    recorder: Recorder
    account: Account
    hypervisor: Hypervisor


class Common(Record, frozen=True):
    """The resources that the guests of a node share.

    Attributes:
        staged: the image on this node.
        shares: the plan's folders; some of them have a snapshot.
        cgroup: None if the site has control groups switched off.
        memory: of the guests and their helpers.
        mtu: of the guests' interfaces on the network of the job; 0 without one.
    """

    staged: StagedImage
    shares: tuple[Share, ...]
    cgroup: Cgroup | None
    memory: GuestMemory
    mtu: int


class Started(Record, frozen=True):
    """A guest that was started, its helper processes, and the time of its start by the monotonic clock."""

    guest: RunningGuest
    helpers: Helpers
    since: float
