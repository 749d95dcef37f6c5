# SPDX-License-Identifier: Apache-2.0
"""Fields of a job's state file that follow from its lease and the plan of the node."""

from __future__ import annotations

from vhpc_slurm.model import Lease, NodePlan
from vhpc_slurm.node.devices import assignment
from vhpc_slurm.node.store import statefile
from vhpc_slurm.node.store.layout import Layout


def components(lease: Lease, plan: NodePlan) -> int:
    """How many components of a heterogeneous job have one network for MPI; 0 if it is not such a job.

    Components have different keys, so guests with InfiniBand ports cannot use these.  Slurm's process
    mapping does not say which nodes have how many guests, so all must have the same number.
    """
    parts = lease.parts
    if len(parts) == 1 or any(guest.port_guids for guest in plan.guests):
        return 0
    return len(parts) if len({part.guests_per_node for part in parts}) == 1 else 0


def pins(plan: NodePlan) -> str:
    """The OS CPU of each vCPU, in their order; empty if the plugin could not read such a long line."""
    guests = (sorted(guest.pins, key=lambda pin: pin.vcpu) for guest in plan.guests)
    text = ",".join(":".join(str(pin.os_cpu) for pin in pins) for pins in guests)
    return text if len(text) <= statefile.LIMIT else ""


def gpu_indexes(layout: Layout, plan: NodePlan) -> list[list[int]]:
    """Slurm's indexes of each guest's GPUs, in the guest's order."""
    indexes = {key: index for index, key in enumerate(assignment.handed_out(layout).gpus)}
    return [
        [indexes[device.key] for device in guest.devices if device.traits.indexed] for guest in plan.guests
    ]
