# SPDX-License-Identifier: Apache-2.0
"""A lease and what nodes report about it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from vhpc_slurm.model.checkpoint import Resume
from vhpc_slurm.model.host import HostInventory
from vhpc_slurm.model.image import ImageIdentity
from vhpc_slurm.model.job import Allocation, Generation, JobRequest
from vhpc_slurm.record import Record

TOLD = "told: "
"""How the note of an acknowledgement begins that is for the job's user."""
ALARM = "alarm: "
"""Prefix of a node's note about a job that an operator has to see although the node works."""


class LeaseState(StrEnum):
    """Life of a lease.  READY is written last; REFUSED carries a user's error."""

    RESERVED = "reserved"
    READY = "ready"
    REFUSED = "refused"
    ENDING = "ending"
    RELEASED = "released"


class NetworkIdentity(Record, frozen=True):
    """The job's own network partition; ``kind`` is ``none`` if the job has no partition.

    With ``ib`` the job's guest number *i*, counted node by node, has the rank ``first_rank``
    + *i*, and ``vfs`` ports on each of ``rails`` rails, whose GUIDs follow from
    these numbers (``fabric.keys.port_guid``), or are in ``port_guids``, a row of
    words for each guest, where nodes do not set them; ``in_guests`` says that these
    reach the guests.  ``site_keys`` are entries that all ports of the job have
    in addition to its own key and the default one, from partitions of the site.

    ``addresses`` are (hostname, IPv4 address) of guests on IP over InfiniBand, in a
    network of ``prefix`` bits.

    With ``ethernet`` the Ethernet functions of the guests are on ``vlan``; their
    addresses follow from these numbers as well (``fabric.numbers.mac``).
    """

    kind: str = "none"
    pkey: int | None = None
    vlan: int | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    first_rank: int = 0
    rails: int = 0
    vfs: int = 0
    port_guids: tuple[tuple[str, ...], ...] = ()
    in_guests: bool = False
    site_keys: tuple[int, ...] = ()
    prefix: int = 0


class SegmentPart(Record, frozen=True):
    """The guests of one component of a heterogeneous job on its segment.

    ``cpus`` are the numbers of CPUs that the component has on each of its ``nodes``.
    """

    generation: Generation
    nodes: tuple[str, ...]
    cpus: tuple[int, ...]
    guests_per_node: int

    @classmethod
    def of(cls, generation: Generation, allocation: Allocation, guests_per_node: int) -> SegmentPart:
        """A component, with its allocation, as a part of a segment."""
        cpus = tuple(len(part.cpu_ids) for part in allocation.nodes)
        return cls(generation, allocation.node_names, cpus, guests_per_node)


class Segment(Record, frozen=True):
    """The network between the guests of a job: a VXLAN segment that no other job is on.

    The job's guest number *r*, counted node by node from 0, has address number ``first`` + *r* + 1 of
    each network (``node.network.plan``).  In a heterogeneous job the guests of all components
    are counted, in the order of the components.

    Attributes:
        vni: VXLAN network identifier (24 bits), of no other generation until its quarantine is over.
        ipv4: network of the guests, such as ``10.200.0.0/16``.
        ipv6: network of the guests, with 64 bits.
        port: UDP port that nodes send the segment's frames to.
        mtu: of the guests' interfaces; 0: what the node's underlay interface leaves.
        underlay: addresses of the nodes, in the order of the allocation, or of ``parts``.
        tunnel_port: UDP port of the WireGuard tunnels between the nodes, through which the segment's
            frames go; 0: they are not encrypted.
        flood: broadcast and multicast frames reach all guests of the job, not only those of the node.
        parts: the components of a heterogeneous job that are on the segment, in their order; empty for
            other jobs.
        mac_vni: the VNI in the guests' MAC addresses, which a resumed guest keeps; 0: that of the segment.
        first: number of the first guest's address; in a cluster each member has a range of its own.
    """

    vni: int
    ipv4: str
    ipv6: str
    port: int
    mtu: int
    underlay: tuple[str, ...]
    tunnel_port: int = 0
    flood: bool = False
    parts: tuple[SegmentPart, ...] = ()
    mac_vni: int = 0
    first: int = 0


class ClusterPlace(Record, frozen=True):
    """The cluster of a job: its number in vhpcd's database, and the name that its user has given."""

    serial: int
    name: str


class SshKeys(Record, frozen=True):
    """Keys of one generation, for ssh between its guests; secret: no log and no list may have them.

    Private keys are in OpenSSH's format, public keys are one line each.  All guests have the same
    host key.
    """

    host_key: str
    host_public: str
    user_key: str
    user_public: str

    def __repr__(self) -> str:
        return "SshKeys()"


class TunnelKeys(Record, frozen=True):
    """The keys of one node of a generation for its WireGuard tunnels, in base64, 44 characters each.

    ``private_key`` is this node's own, and secret: no log and no list may have it.  ``public_keys``
    are those of all nodes, in the order of ``Segment.underlay``.
    """

    private_key: str
    public_keys: tuple[str, ...]

    def __repr__(self) -> str:
        return f"TunnelKeys(public_keys={self.public_keys})"


class TunnelKeyPairs(Record, frozen=True):
    """The keys of all nodes of a segment, in the order of its ``underlay``; secret, as ``TunnelKeys``."""

    private_keys: tuple[str, ...]
    public_keys: tuple[str, ...]

    def __repr__(self) -> str:
        return f"TunnelKeyPairs(public_keys={self.public_keys})"

    def of(self, place: int) -> TunnelKeys:
        """The keys for the node at a place of ``Segment.underlay``."""
        return TunnelKeys(self.private_keys[place], self.public_keys)


class Lease(Record, frozen=True, eq=False):
    """The resources that a generation holds: decided once, the same for all its nodes.

    ``nat``: the guests reach other networks through passt; ``site``: they are on the bridge of the site.
    ``cluster``: the job is a member of this cluster.
    ``resume``: the guests continue a checkpoint.  ``ssh``, ``tunnel`` and the key in ``resume`` are known
    only to a node that has taken the lease.
    """

    generation: Generation
    state: LeaseState
    request: JobRequest
    allocation: Allocation
    image: ImageIdentity | None
    network: NetworkIdentity = field(default_factory=NetworkIdentity)
    refusal: str = ""
    segment: Segment | None = None
    nat: bool = False
    site: bool = False
    ssh: SshKeys | None = None
    tunnel: TunnelKeys | None = None
    resume: Resume | None = None
    cluster: ClusterPlace | None = None

    def _compared(self) -> tuple[object, ...]:
        """All fields but the keys, which not everybody who knows the lease has."""
        names = (name for name in self.__struct_fields__ if name not in ("ssh", "tunnel", "resume"))
        resumed = None if self.resume is None else self.resume.serial
        return (*(getattr(self, name) for name in names), resumed)

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, Lease) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())

    @property
    def parts(self) -> tuple[SegmentPart, ...]:
        """The components on the job's segment; a job that is not heterogeneous is the only one."""
        if self.segment is not None and self.segment.parts:
            return self.segment.parts
        return (SegmentPart.of(self.generation, self.allocation, self.request.guests_per_node),)

    @property
    def segment_nodes(self) -> tuple[str, ...]:
        """Nodes with guests on the segment, also of other components, in the order of its ``underlay``."""
        return tuple(node for part in self.parts for node in part.nodes)


class Stage(Record, frozen=True):
    """One stage of a boot or a teardown on one node; times are seconds since the epoch."""

    name: str
    began: float
    ended: float
    detail: str = ""


TEARDOWN = ("power off", "release")
"""Stages of a job's end; all others belong to its boot."""
FAILED = "failed:"
"""How the detail of a stage begins that has failed."""


class Timeline(Record, frozen=True):
    """The events on one node of a generation, in order."""

    generation: Generation
    node: str
    stages: tuple[Stage, ...]

    @property
    def boot(self) -> tuple[Stage, ...]:
        """Stages from the start of Prolog until the guests are ready."""
        return tuple(stage for stage in self.stages if stage.name not in TEARDOWN)

    @property
    def teardown(self) -> tuple[Stage, ...]:
        """Stages from the end of the job until everything is released."""
        return tuple(stage for stage in self.stages if stage.name in TEARDOWN)

    @property
    def ready_s(self) -> float | None:
        """Seconds from the first stage until all guests are ready; None if they never were."""
        stages = self.boot
        setups = [stage for stage in stages if stage.name.startswith("setup ")]
        started = [stage for stage in stages if stage.name.startswith("start ")]
        if not setups or len(setups) < len(started) or any(s.detail.startswith(FAILED) for s in stages):
            return None
        return max(stage.ended for stage in setups) - min(stage.began for stage in stages)


class GuestPlacement(Record, frozen=True):
    """Where a guest ran on its node, and what it had.

    Attributes:
        index: among the job's guests on the node, from 0.
        hostname: of the guest.
        cpus: OS CPU of each vCPU, in their order.
        cells: (host cell, MiB): where its memory was planned; cell -1 is no cell in particular.
        hugepage_kib: size of the huge pages that back it, 0 for ordinary pages.
        devices: key and class of each device of the host.
        disk_mib: size of its own disk; 0: none.
    """

    index: int
    hostname: str
    cpus: tuple[int, ...]
    cells: tuple[tuple[int, int], ...]
    hugepage_kib: int = 0
    devices: tuple[tuple[str, str], ...] = ()
    disk_mib: int = 0


class NodeReport(Record, frozen=True):
    """The report of a node to the owner of a job when its Prolog ends, in addition to the timeline.

    Attributes:
        generation: of the job.
        node: the node.
        host: its CPUs and cells, and the PCI functions that guests have; None if that was too long.
        guests: in the order of their indexes; empty if the job was refused before they were planned.
        lines: errors, warnings and notes, as the node said them.
    """

    generation: Generation
    node: str
    host: HostInventory | None
    guests: tuple[GuestPlacement, ...] = ()
    lines: tuple[str, ...] = ()


class Viewer(Record, frozen=True):
    """An ordinary user who asks vhpcd: whose jobs the answers may have.

    Attributes:
        uid: the user's own jobs.
        accounts: also all jobs of these accounts, which the user coordinates.
        everything: all jobs: an operator or administrator of Slurm.
        user: name of the user; empty: Slurm has not been asked, or does not answer.
        member_of: accounts of the user's associations, which permit no look at the jobs of others.
    """

    uid: int
    accounts: tuple[str, ...] = ()
    everything: bool = False
    user: str = ""
    member_of: tuple[str, ...] = ()

    def sees(self, request: JobRequest) -> bool:
        """Whether answers may have this job."""
        return self.everything or request.uid == self.uid or request.account in self.accounts


class Alarm(Record, frozen=True):
    """A problem of a job on a node that is well; ``time`` in seconds since the epoch."""

    job_id: int
    node: str
    time: float
    what: str


class LeaseRecord(Record, frozen=True):
    """A lease as the controller keeps it and shows it to operators.

    ``taken`` are the nodes that fetched the lease to act on it: only these can
    hold something of it.  ``acknowledged`` are the nodes that said they hold
    nothing, ``unclean`` those that could not, each with its note.  ``told``
    has what nodes tell the job's user about its end.
    """

    lease: Lease
    created: float
    updated: float
    acknowledged: tuple[str, ...]
    timelines: tuple[Timeline, ...] = ()
    taken: tuple[str, ...] = ()
    unclean: tuple[tuple[str, str], ...] = ()
    told: tuple[tuple[str, str], ...] = ()

    @property
    def note(self) -> str:
        """A note on it for a table; usually empty."""
        notes = (f"{node}: {note}" for node, note in self.unclean)
        return self.lease.refusal or "; ".join(notes) or next((line for _, line in self.told), "")

    @property
    def ready_s(self) -> float | None:
        """Seconds until the guests of the slowest node were ready; None if those of a node were not.

        Clocks of nodes differ, so each node is measured by its own.
        """
        lines = {line.node: line.ready_s for line in self.timelines}
        ready = [lines.get(node) for node in self.taken]
        known = [seconds for seconds in ready if seconds is not None]
        return max(known) if known and len(known) == len(ready) else None
