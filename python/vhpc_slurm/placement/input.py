# SPDX-License-Identifier: Apache-2.0
"""The inputs of a node's plan."""

from __future__ import annotations

from vhpc_slurm.device import NodeDevices
from vhpc_slurm.model import (
    Generation,
    HostInventory,
    ImageIdentity,
    JobRequest,
    Lease,
    NodeAllocation,
    Share,
)
from vhpc_slurm.placement.usage import NOTHING, Usage
from vhpc_slurm.record import Record


class PlanInput(Record, frozen=True):
    """All inputs of a plan, except the configuration.

    Attributes:
        generation: of the job.
        allocation: what Slurm gave the job on this node.
        host: this node.
        request: what the user asked for.
        image: the image of the guests.
        shares: folders of the host that the guests see.
        usage: what guests of other generations hold.
        devices: which functions may be handed out; None where the site hands out none.
        lease: network identities come from it; None for a job that does not exist.
        notes: lines for people about this input.
    """

    generation: Generation
    allocation: NodeAllocation
    host: HostInventory
    request: JobRequest
    image: ImageIdentity
    shares: tuple[Share, ...] = ()
    usage: Usage = NOTHING
    devices: NodeDevices | None = None
    lease: Lease | None = None
    notes: tuple[str, ...] = ()
