# SPDX-License-Identifier: Apache-2.0
"""A job that continues a checkpoint: what it takes over, and why it cannot.  Pure.

The guests exist already, so all that they consist of comes from the checkpoint: image, memory, disks, shared
folders, networks.  The job itself, its account and the time that its boot may take are new.
"""

from __future__ import annotations

from dataclasses import replace

from vhpc_slurm.controller.store.checkpoints import StoredCheckpoint
from vhpc_slurm.model import (
    OF_CHECKPOINTS,
    WITHOUT_OPTIONS,
    Allocation,
    CheckpointState,
    JobRequest,
    Lease,
    Resume,
    SavedNode,
    Segment,
)
from vhpc_slurm.options import BY_FIELD


def merged(request: JobRequest, origin: Lease) -> JobRequest:
    """The request of a job with what its guests consist of."""
    saved = {field: getattr(origin.request, field) for field in OF_CHECKPOINTS}
    return replace(request, unset=(), defaults=origin.request.defaults, **saved)


def find_refusal(name: str, found: tuple[StoredCheckpoint, ...]) -> StoredCheckpoint | str:
    """The newest VALID one of a user's checkpoints of a name (newest first), or why there is none."""
    valid = next((one for one in found if one.state is CheckpointState.VALID), None)
    if valid is not None:
        return valid
    if not found or found[0].state is CheckpointState.REMOVED:
        return f"there is no checkpoint {name} of yours (see: vhpc checkpoint ls)"
    if found[0].state is CheckpointState.FAILED:
        return f"checkpoint {name} has failed: {found[0].error}"
    return f"checkpoint {name} is not complete: job {found[0].job_id} is being saved"


def refusal(request: JobRequest, allocation: Allocation, one: StoredCheckpoint) -> str:
    """Why a job cannot continue a checkpoint, as one line for the user; empty when it can.

    ``request`` is as the user has made it.
    """
    what, origin = f"checkpoint {one.name}", one.origin
    if request.het is not None:
        return f"a heterogeneous job cannot continue {what} (submit a job of one component)"
    if request.gid != origin.request.gid:
        return f"{what} is of a job with the group id {origin.request.gid}, this job has {request.gid}"
    for field in sorted(OF_CHECKPOINTS - {"image", "work_dir"}):
        given = getattr(request, field)
        if given not in (WITHOUT_OPTIONS[field], getattr(origin.request, field)):
            option = BY_FIELD[field].name if field in BY_FIELD else field
            return f"the guests of {what} exist already: submit the job without --vhpc-{option}"
    return other_shape(allocation, one)


def other_shape(allocation: Allocation, one: StoredCheckpoint) -> str:
    """Why the guests of a checkpoint do not fit the job's nodes, as one line; empty when they do."""
    what, origin = f"checkpoint {one.name}", one.origin.allocation
    count, saved = len(allocation.nodes), len(origin.nodes)
    if count != saved:
        return f"{what} has guests of {saved} nodes, the job has {count} (ask for --nodes={saved})"
    for part, old in zip(allocation.nodes, origin.nodes, strict=True):
        if len(part.cpu_ids) != len(old.cpu_ids):
            return (
                f"{what} needs {len(old.cpu_ids)} CPUs on {part.node}, in place of {old.node}; "
                f"the job has {len(part.cpu_ids)} there"
            )
        if part.memory_mib != old.memory_mib:
            return (
                f"{what} needs {old.memory_mib} MiB of memory on {part.node}, in place of {old.node}; "
                f"the job has {part.memory_mib} MiB there"
            )
    return ""


def record(one: StoredCheckpoint, saved: tuple[SavedNode, ...]) -> Resume:
    """The part of a lease about the checkpoint that it continues, without its key and single guests."""
    by_name = {node.node: replace(node, guests=()) for node in saved}
    nodes = tuple(by_name[node] for node in one.origin.allocation.node_names)
    return Resume(one.serial, one.name, one.generation, nodes)


def segment(new: Segment, origin: Segment | None) -> Segment:
    """A segment whose guests keep their addresses; its VNI is new."""
    if origin is None:
        return new
    return replace(
        new,
        ipv4=origin.ipv4,
        ipv6=origin.ipv6,
        mtu=origin.mtu,
        flood=origin.flood,
        mac_vni=origin.mac_vni or origin.vni,
    )
