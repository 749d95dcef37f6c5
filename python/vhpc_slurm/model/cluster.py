# SPDX-License-Identifier: Apache-2.0
"""Named clusters: jobs of a user, or of an account, whose guests form one private network.

Each job (a *member*) keeps its own segment with its own VNI. The nodes of the other members send
to it with that VNI, so a member that ends takes its VNI with it, and the others are not touched.
"""

from __future__ import annotations

from vhpc_slurm.model.job import Generation
from vhpc_slurm.model.lease import Segment, SegmentPart
from vhpc_slurm.record import Record


class ClusterMember(Record, frozen=True):
    """A job of a cluster, as the nodes and guests of the other members need to know it.

    Attributes:
        generation: of the job; of the first component of a heterogeneous one.
        segment: of the job.
        parts: guests on the segment.
        host_public: public key of the guests' ssh servers, one line; empty: they have none.
        user_public: public key of the job's user in these guests; empty for members of other users.
        gone: ranks of guests that have ended before the job, or whose node is silent.
    """

    generation: Generation
    segment: Segment
    parts: tuple[SegmentPart, ...]
    host_public: str = ""
    user_public: str = ""
    gone: tuple[int, ...] = ()

    @property
    def segment_nodes(self) -> tuple[str, ...]:
        """Nodes with guests, in the order of the segment's ``underlay``."""
        return tuple(node for part in self.parts for node in part.nodes)

    @property
    def living_places(self) -> tuple[int, ...]:
        """Indexes in ``segment_nodes`` of nodes with guests that are not gone."""
        gone, rank, found = set(self.gone), 0, []
        counts = [part.guests_per_node for part in self.parts for _ in part.nodes]
        for place, count in enumerate(counts):
            if not gone.issuperset(range(rank, rank + count)):
                found.append(place)
            rank += count
        return tuple(found)

    @property
    def living_nodes(self) -> tuple[str, ...]:
        """These nodes."""
        nodes = self.segment_nodes
        return tuple(nodes[place] for place in self.living_places)


class Cluster(Record, frozen=True):
    """A cluster as its user sees it.

    Attributes:
        serial: its number in vhpcd's database.
        name: that its user has given; ACCOUNT/NAME if it belongs to all users of an account.
        uid: of the user, or of who made it for the account.
        created: seconds since the epoch.
        kept: it stays while it has no jobs.
        until: end of that, in seconds since the epoch; None: until the user removes it.
        jobs: its members.
        guests: of all of them.
    """

    serial: int
    name: str
    uid: int
    created: float
    kept: bool = False
    until: float | None = None
    jobs: int = 0
    guests: int = 0


class ClusterJob(Record, frozen=True):
    """A member as users of the cluster see it.

    Attributes:
        member: the job.
        joined: the guests of the others know it.
        uid: of the job's user.
        since: when the job began, in seconds since the epoch.
    """

    member: ClusterMember
    joined: bool
    uid: int | None = None
    since: float = 0.0


class Roster(Record, frozen=True):
    """The changes in a cluster since a version of it.

    Attributes:
        version: of the cluster after these changes, for the next question.
        members: those that have joined, or whose guests have changed.
        left: members that have ended.
        more: there are further changes; ask again at once.
        over: the job that asks is no member any more.
    """

    version: int
    members: tuple[ClusterMember, ...] = ()
    left: tuple[Generation, ...] = ()
    more: bool = False
    over: bool = False
