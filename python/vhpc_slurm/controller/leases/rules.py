# SPDX-License-Identifier: Apache-2.0
"""The life of a lease: pure rules, no clock, no disk, no network.

::

    RESERVED ──> READY ──┐
        │                ├──> ENDING ──> RELEASED
        └──> REFUSED ────┘
             (also at birth)

RESERVED is durable before anything outside changes; READY is written last.
A node that *took* a lease may hold something of it until it has acknowledged that it
is clean; an ending lease is released when no such node is left. A node that never took
it needs no acknowledgement: Slurm runs no Epilog for a job that was cancelled during
PrologSlurmctld, and such a node knows nothing of the lease.
"""

from __future__ import annotations

from dataclasses import replace

from vhpc_slurm import policy
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.model import (
    MAX_COMPONENTS,
    NODE_NAME,
    Allocation,
    Generation,
    ImageIdentity,
    JobRequest,
    Lease,
    LeaseRecord,
    LeaseState,
    NetworkIdentity,
)
from vhpc_slurm.options import MAX_GUESTS_PER_NODE
from vhpc_slurm.placement import overhead

_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.RESERVED: frozenset({LeaseState.READY, LeaseState.REFUSED, LeaseState.ENDING}),
    LeaseState.READY: frozenset({LeaseState.ENDING}),
    LeaseState.REFUSED: frozenset({LeaseState.ENDING}),
    LeaseState.ENDING: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}
USABLE = frozenset({LeaseState.RESERVED, LeaseState.READY, LeaseState.REFUSED})
DECIDED = frozenset({LeaseState.READY, LeaseState.REFUSED})
LIVE = frozenset(LeaseState) - {LeaseState.RELEASED}


class TransitionError(Exception):
    """A transition that leases do not have: a programming error."""


def reserve(
    generation: Generation,
    request: JobRequest,
    allocation: Allocation,
    image: ImageIdentity,
    network: NetworkIdentity,
    now: float,
) -> LeaseRecord:
    """A new lease; the fabric is not configured yet."""
    lease = Lease(generation, LeaseState.RESERVED, request, allocation, image, network)
    return LeaseRecord(lease, now, now, ())


def refuse(
    generation: Generation, request: JobRequest, allocation: Allocation, reason: str, now: float
) -> LeaseRecord:
    """A new lease with a user's error; the nodes report it when the first task starts."""
    lease = Lease(generation, LeaseState.REFUSED, request, allocation, None, refusal=reason)
    return LeaseRecord(lease, now, now, ())


def move(record: LeaseRecord, state: LeaseState, now: float) -> LeaseRecord:
    """The record in another state; TransitionError when that transition does not exist."""
    if state not in _NEXT[record.lease.state]:
        raise TransitionError(f"{record.lease.generation}: {record.lease.state} -> {state}")
    return replace(record, lease=replace(record.lease, state=state), updated=now)


def serves(record: LeaseRecord, request: JobRequest, allocation: Allocation) -> bool:
    """Whether this lease answers that request; if not, a new generation is due.

    Values that may change on a running job (its name, its partition) do not count;
    with any other difference it is another incarnation. It is also another one if a
    node has released its part: a slurmctld that was killed starts a job that it had
    not saved a second time, under the same restart count, after the nodes have aborted
    the first.
    """
    lease = record.lease
    return (
        lease.state in USABLE
        and not record.acknowledged
        and not record.unclean
        and lease.allocation == allocation
        and lease.request.fixed() == request.fixed()
    )


def holders(record: LeaseRecord) -> frozenset[str]:
    """Nodes that may still hold something of this generation."""
    return frozenset(record.taken) - frozenset(record.acknowledged)


def releasable(record: LeaseRecord) -> bool:
    """Whether only the network identity must still be removed."""
    return record.lease.state is LeaseState.ENDING and not holders(record)


def impatient(request: JobRequest, allocation: Allocation, config: Config) -> str:
    """Why a boot may not take as long as the user asks, as one line for the user; empty when it may.

    Slurm kills a Prolog that takes longer than the site allows, and drains its node.
    """
    if request.timeout_s is None:
        return ""
    gres = config.placement.gpu_gres
    counts = [sum(one.count for one in part.gres if one.name == gres) for part in allocation.nodes]
    most = config.guests.longest_boot_s(min(counts, default=0) // request.guests_per_node)
    if request.timeout_s <= most:
        return ""
    return (
        f"--vhpc-timeout={request.timeout_s} is longer than a boot may take here: {most} s "
        "(ask for less; for more, ask your administrator to raise guests.boot_timeout_max_s)"
    )


def oversized(request: JobRequest, config: Config) -> str:
    """Why the guests cannot have the disks that the user asks for, as one line; empty when they can."""
    most = config.disks.max_mib
    if request.disk_mib is None or request.disk_mib <= most:
        return ""
    if most == 0:
        return "--vhpc-disk is not allowed here (this site gives guests no disks: disks.max_mib is 0)"
    return (
        f"--vhpc-disk={request.disk_mib}M is larger than a guest's disk may be here: {most} MiB "
        "(ask for less; for more, ask your administrator to raise disks.max_mib)"
    )


def misplaced(request: JobRequest, config: Config) -> str:
    """Why a disk or folder cannot be mounted where the user asks for it, as one line; empty when it can.

    Of the folders that guests have, those of the site are known here; nodes know the others.
    """
    shares = policy.visible_shares(config, request)
    why = policy.mount_refusal(request.disk_mount, shares.site)
    why = why or policy.bind_refusal(request.mounts, request.disk_mount, shares.site)
    if not why and not shares.home and not shares.work_dir:
        why = policy.unshared(request.mounts, shares.site)
    return why


def misfit(request: JobRequest, allocation: Allocation, image: ImageIdentity, config: Config) -> str:
    """Why the image cannot run in this allocation, as one line for the user; empty when it can.

    By the nodes' own formula, but for the BARs of their devices, which are not
    known here: what is refused here no node would have taken.
    """
    need_mib, guests = image.manifest.min_memory_mib, request.guests_per_node
    for part in allocation.nodes:
        need = image.manifest.min_cpus * guests
        # a guest without any CPU is the fault of --vhpc-guests-per-node, which the node's planner says
        if image.manifest.min_cpus > 1 and len(part.cpu_ids) < need:
            whose = "" if guests == 1 else f" for each of {guests} guests"
            return (
                f"image {image.ref} needs {image.manifest.min_cpus} CPUs{whose}: the job has "
                f"{len(part.cpu_ids)} on {part.node} (ask for {need} or more, such as --cpus-per-task={need})"
            )
        if part.memory_mib == 0:
            return (
                f"Slurm accounts no memory for this job on {part.node}: guests cannot be sized "
                "(SelectTypeParameters needs a _Memory choice; tell your administrator)"
            )
        reasons: list[VhpcError] = []
        size = overhead.at_least(part, request, config, reasons)
        if size is None:
            return reasons[0].line()
        left_mib = size.guests_mib // guests
        if left_mib < need_mib:
            whose, left = "the guest", str(left_mib)
            if guests > 1:
                whose, left = f"its {guests} guests", f"{left_mib} for each"
            return (
                f"image {image.ref} needs {need_mib} MiB of memory: the job has {part.memory_mib} MiB on "
                f"{part.node}, of which {size.reserve_mib} MiB stay outside {whose}, leaving {left} "
                f"(ask for --mem={need_mib * guests + size.reserve_mib}M or more)"
            )
    return ""


def check_sizes(request: JobRequest, allocation: Allocation) -> None:
    """FabricError when numbers or names of a request are out of their ranges."""
    names = allocation.node_names
    what = f"cannot make a lease for job {request.job_id}"
    if not (0 < request.job_id < 1 << 32 and 0 <= request.restart < 10**9):
        raise FabricError(what, "its job id or restart count is out of range")
    if not (0 <= request.uid < 1 << 32 and 0 <= request.gid < 1 << 32):
        raise FabricError(what, "its uid or gid is out of range")
    if not 1 <= request.guests_per_node <= MAX_GUESTS_PER_NODE:
        raise FabricError(what, f"a node has 1 to {MAX_GUESTS_PER_NODE} guests")
    place = request.het
    if place is not None and not (
        0 < place.leader < 1 << 32 and 0 <= place.offset < place.components <= MAX_COMPONENTS
    ):
        raise FabricError(what, "its place in a heterogeneous job is out of range")
    if not names:
        raise FabricError(what, "it has no nodes (yet)")
    if len(set(names)) != len(names) or not all(NODE_NAME.match(name) for name in names):
        raise FabricError(what, "a node name is invalid, or occurs twice")
    if not all(part.cpu_ids for part in allocation.nodes):
        raise FabricError(what, "it has a node without CPUs")
