# SPDX-License-Identifier: Apache-2.0
"""Which jobs can be in a cluster, and which addresses they get.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.leases import savable, segments
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import Generation, JobRequest, Segment, SegmentPart
from vhpc_slurm.options import cluster_account

RESERVED_S = 3600.0
"""An address is not used again for so long after its member has left."""
MOST_KEPT = 64
"""Clusters of a user or account that stay without jobs."""


def refusal(requests: Sequence[JobRequest], network: Network) -> str:
    """Why a job cannot be in the cluster that it asks for, as one line; empty if it can, or asks for none.

    ``requests`` are those of all components with a network of a heterogeneous job.
    """
    asked = next((one for one in requests if one.cluster is not None), None)
    if asked is None:
        return ""
    option = f"--vhpc-cluster={asked.cluster}"
    if any(one.cluster != asked.cluster for one in requests):
        return (
            f"{option}: all components of a heterogeneous job with a job network are in one cluster, or none "
            "(give each of them the same --vhpc-cluster)"
        )
    for one in requests:
        if why := _why_not(one, network):
            return f"{option}: {why}"
    return ""


def _why_not(request: JobRequest, network: Network) -> str:
    account = cluster_account(request.cluster or "")
    has = f"is one of account {request.account}" if request.account else "has no account"
    found = (
        (
            account not in ("", request.account),
            f"only jobs of account {account} can be in this cluster, and the job {has} "
            f"(submit it with -A {account})",
        ),
        (
            "job" not in network.allowed,
            "a cluster needs job networks, which this site does not have (submit the job without it)",
        ),
        (
            not segments.wanted(request, network),
            f"a cluster needs a job network, and --vhpc-network={request.network} has none "
            "(use --vhpc-network=job, or remove --vhpc-network)",
        ),
        (
            segments.flood_wanted(request, network),
            "there is no multicast in a cluster (use --vhpc-network=job)",
        ),
        (
            network.encryption != "none",
            "this site encrypts job networks, and clusters cannot be encrypted (submit the job without it)",
        ),
        (
            request.resume is not None,
            "a job that continues a checkpoint cannot be in a cluster (remove one of the two options)",
        ),
        (
            savable.is_asked(request),
            "a job in a cluster cannot be saved (remove --vhpc-checkpoint or --vhpc-cluster)",
        ),
    )
    return next((line for applies, line in found if applies), "")


class NotOfAccountError(UserError):
    """A job asks for a cluster of its account, which Slurm does not permit its user to use."""

    def __init__(self, request: JobRequest) -> None:
        super().__init__(
            f"--vhpc-cluster={request.cluster}: Slurm has no association of {request.user} with account "
            f"{request.account}",
            "",
            "operators: see sacctmgr add user",
        )


def apart(segment: Segment, other: Segment) -> str:
    """Why nodes of two jobs cannot send to each other, as one line; empty if they can."""
    ours, theirs = (ip_address(one.underlay[0]).version for one in (segment, other))
    if ours != theirs:
        return (
            f"the job's nodes have underlay addresses of IPv{ours}, and those of the cluster's other jobs of "
            f"IPv{theirs} (choose nodes like theirs; operators: see network.underlay in vhpc.toml(5))"
        )
    if any(getattr(segment, name) != getattr(other, name) for name in ("ipv4", "ipv6", "port")):
        return (
            "the site has changed its job networks since the cluster's other jobs began "
            "(use another name, or wait for their end)"
        )
    return ""


def choose(taken: Iterable[tuple[int, int]], guests: int, most: int) -> int | None:
    """The number of the first address for the guests of a job; None if there are not so many in a row.

    ``taken`` are (first number, count) of others, in the order of the numbers.
    """
    first = 0
    for start, count in taken:
        if start - first >= guests:
            return first
        first = max(first, start + count)
    return first if first + guests <= most else None


def ranks(parts: Iterable[SegmentPart], generation: Generation, node: str) -> frozenset[int]:
    """The ranks that the guests of a component have on a node; empty if it is not on that node."""
    found: set[int] = set()
    rank = 0
    for part in parts:
        for one in part.nodes:
            if one == node and part.generation == generation:
                found.update(range(rank, rank + part.guests_per_node))
            rank += part.guests_per_node
    return frozenset(found)
