# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol about clusters; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import Serial, Wire
from vhpc_slurm.model import Cluster, ClusterJob, Roster
from vhpc_slurm.options import CLUSTER_NAME

Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class AskRoster(Wire, frozen=True, tag="roster"):
    """A node of a member: what has changed in the cluster since version ``applied``; 0: all of it.

    The node has applied that version to its network, its firewall and its guests. ``gone`` are the ranks of
    the guests of this node that have ended.  With ``wait_s`` > 0 the answer comes when there is a change, or
    after that time.
    """

    generation: str
    node: str
    applied: Version = 0
    gone: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=64)] = ()
    wait_s: float = 0.0


class ListClusters(Wire, frozen=True, tag="clusters"):
    """A user, or root for all users: clusters after ``after``."""

    after: Serial = 0


class ListClusterJobs(Wire, frozen=True, tag="cluster-jobs"):
    """A user, or root for all users: members of a cluster after ``after``."""

    cluster: Serial
    after: Serial = 0


class KeepCluster(Wire, frozen=True, tag="keep-cluster"):
    """A user: make a cluster, or keep one, for so long without jobs; None: as long as the site permits."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{CLUSTER_NAME}\Z")]
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class RemoveCluster(Wire, frozen=True, tag="remove-cluster"):
    """A user, or root for all users: remove a cluster without members."""

    cluster: Serial


class RosterAnswer(Wire, frozen=True, tag="roster"):
    """To AskRoster."""

    roster: Roster


class ClusterPage(Wire, frozen=True, tag="clusters"):
    """To ListClusters; ``more`` is the next ``after``, None at the end."""

    clusters: tuple[Cluster, ...]
    more: int | None


class ClusterJobPage(Wire, frozen=True, tag="cluster-jobs"):
    """To ListClusterJobs; ``more`` as there."""

    jobs: tuple[ClusterJob, ...]
    more: int | None


class ClusterAnswer(Wire, frozen=True, tag="cluster"):
    """To KeepCluster and RemoveCluster: the cluster after the one, before the other."""

    cluster: Cluster


ClusterLists = ListClusters | ListClusterJobs
"""Requests whose answers have what a user may see."""
ByUsers = ListClusters | ListClusterJobs | KeepCluster | RemoveCluster
"""Requests of ordinary users about their own clusters."""
OfClusters = AskRoster | ByUsers
"""Requests about clusters."""
AboutClusters = RosterAnswer | ClusterPage | ClusterJobPage | ClusterAnswer
"""Answers to them."""
