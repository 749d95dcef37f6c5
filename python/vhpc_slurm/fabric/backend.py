# SPDX-License-Identifier: Apache-2.0
"""What the controller asks of a fabric, whatever the fabric is.

The controller keeps the key assignments (``keys.KeySnapshot``) and tells the fabric the
whole of it each time, so that nothing has to be remembered between two calls:
``plan`` before the lease is durable, ``apply`` for all generations that come or
go together, then ``verify`` for those that come and ``strip`` for those that
go, whose nodes have all said that they hold nothing.  Each may be repeated
after a crash.  ``plan`` is called while the database is locked, the others one
after the other in a thread of their own, which may wait for a fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from typing import Literal, Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers, partitions
from vhpc_slurm.fabric.filewatch import FileWatch
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.model import Allocation, Generation, JobRequest, NetworkIdentity


class FabricRefusedError(FabricError):
    """The fabric does not take what it was told, and something in that is the reason."""


@dataclass(frozen=True)
class Proof:
    """What was read back from the fabric.

    Attributes:
        epoch: of the snapshot that the fabric was compared with.
        scanned: ports of the fabric whose tables were read.
        seen: ports of the generation among them; each had exactly its keys.
        absent: ports of the generation that the fabric does not show (yet).
    """

    epoch: int
    scanned: int = 0
    seen: int = 0
    absent: int = 0


ProofResults = dict[Generation, Proof | FabricError]
"""For each generation the proof, or why there is none: one job's trouble is not that of all."""


@dataclass(frozen=True)
class FabricFinding:
    """One thing that is not as the snapshot says.

    Attributes:
        port_guid: 0 where it is no port's.
        what: a line for an operator.
        open: whether somebody may talk to whom he should not: a port has more than its keys, or
            will have.  (A port that lacks a key is closed.)
        unread: whether this is something that could not be read, and so could be open.
        blind: whether it is ports' tables that could not be read.
        lost: whether the port lacks the key of a job.
    """

    port_guid: int
    what: str
    open: bool = False
    unread: bool = False
    blind: bool = False
    lost: bool = False


class NetworkBackend(Protocol):
    """One kind of network partition.  All raise FabricError when the fabric will not."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """Whether this backend can serve here and now; before the first request."""

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, snapshot: KeySnapshot
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """Choose an identity and the assignment behind it; pure."""

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Make the fabric carry ``snapshot.carried()``, and nothing else.

        ``force``: also where the snapshot seems to be of another database than what the fabric has.
        """

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back, after ``apply``, that each generation's ports have their keys, and nobody else has.

        Raises FabricError when the fabric cannot be read at all.
        """

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back, after ``apply``, that nothing is left of generations that the snapshot does not carry.

        Raises FabricError when the fabric cannot be read at all.
        """

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Compare the whole fabric with what the snapshot carries; changes nothing.

        What cannot be read is a finding, and keeps nothing else from being read.
        ``unsure``: a change broke off, and the fabric may or may not have been told
        what the snapshot says; what differs only for that reason is left out, but for
        what ports lack.
        """

    def repair(self, snapshot: KeySnapshot) -> None:
        """Make the fabric carry the snapshot once more, whatever it was seen to carry before.

        Where a part of the fabric cannot be told, the others are put right before FabricError is raised.
        """

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Have ``notice`` called, from another thread, when ``disturbed`` should be asked; None: never.

        Raises:
            FabricError: nothing can be watched here.
        """

    def disturbed(self) -> bool:
        """Whether something was changed, or done by the subnet manager, since the fabric was read last."""


class NoNetwork:
    """No partition: guests have no network, there is nothing to plan or to strip."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """Refuse to serve while keys of another backend are in use: nobody would take them off."""
        held = [
            assignment for assignment in snapshot.assignments if assignment.state is not KeyState.QUARANTINE
        ]
        if held:
            raise FabricError(
                f"{len(held)} partition keys are in use, and fabric.backend is none",
                f"the first is {numbers.label(held[0].pkey)} of {held[0].generation}",
                "let these jobs end under the backend that they began with",
            )

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, snapshot: KeySnapshot
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """The identity ``none``, which any number of generations may hold."""
        del generation, request, allocation, snapshot
        return NetworkIdentity(kind="none"), None

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Nothing to apply."""

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing to read back."""
        return {generation: Proof(snapshot.epoch) for generation in generations}

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing to strip; an error for what began under another backend."""
        outcomes: ProofResults = {}
        for generation in generations:
            assignment = snapshot.of(generation)
            outcomes[generation] = Proof(snapshot.epoch)
            if assignment is not None:
                outcomes[generation] = FabricError(
                    f"the key {numbers.label(assignment.pkey)} cannot be taken off the fabric",
                    "fabric.backend is none now",
                )
        return outcomes

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Nothing to compare."""
        del snapshot, unsure
        return ()

    def repair(self, snapshot: KeySnapshot) -> None:
        """Nothing to repair."""

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Nothing to watch."""
        del notice
        return None

    def disturbed(self) -> bool:
        """Nothing can be."""
        return False


@dataclass(frozen=True)
class KeyPolicy:
    """How identities on an InfiniBand fabric are chosen; the part that its backends share.

    ``owner`` is who shares a key: the generations of a job that are alive
    together (there is one), or of a user.  ``limit`` is how many guests one key
    can have at most, ``ports`` are those of the nodes where these set no GUIDs,
    ``in_guests`` says whether these reach guests, ``site`` are partitions beside the jobs', and
    ``network`` is where addresses of guests come from.
    """

    pool: KeyPool
    owner: Literal["job", "user"] = "job"
    rails: int = 1
    vfs: int = 1
    limit: int = numbers.MAX_RANKS
    ports: PortMap | None = None
    in_guests: bool = False
    site: tuple[IbPartition, ...] = ()
    network: IPv4Network | None = None

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, snapshot: KeySnapshot
    ) -> tuple[NetworkIdentity, KeyAssignment]:
        """As many guests on each node as were asked for, ranked node by node."""
        owner = f"user {request.uid}" if self.owner == "user" else f"job {generation}"
        names, each = allocation.guests(request.guests_per_node), request.guests_per_node
        assignment = keys.assign(
            self.pool,
            snapshot,
            generation,
            owner,
            ranks=len(names),
            rails=self.rails,
            vfs=self.vfs,
            limit=self.limit,
        )
        if self.ports is not None:
            nodes = [part.node for part in allocation.nodes for _ in range(each)]
            taken = snapshot.ports_held()
            assignment = replace(
                assignment, ports=self.ports.choose(nodes, rails=self.rails, vfs=self.vfs, taken=taken)
            )
        found = identity(assignment, in_guests=self.in_guests, site=self.site)
        if self.network is not None:
            addresses = addresses_of(self.network, assignment, names)
            found = replace(found, addresses=addresses, prefix=self.network.prefixlen)
        return found, assignment


class ByPolicy:
    """What all backends but ``NoNetwork`` share: their policy chooses."""

    def __init__(self, policy: KeyPolicy) -> None:
        self._policy = policy

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Nothing to watch, but for backends that have files."""
        del notice
        return None

    def disturbed(self) -> bool:
        """Only the auditor will see it."""
        return False

    def plan(
        self, generation: Generation, request: JobRequest, allocation: Allocation, snapshot: KeySnapshot
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """Choose a key."""
        return self._policy.plan(generation, request, allocation, snapshot)


def addresses_of(
    network: IPv4Network, assignment: KeyAssignment, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """(hostname, address) of an assignment's guests, by their ranks: guests with one key have different ones.

    Raises:
        FabricError: the network is too small.
    """
    last = assignment.first_rank + assignment.ranks
    if last > network.num_addresses - 2:
        raise FabricError(
            f"{network} has no address for guest {last} on key {assignment.pkey:#06x}",
            f"it has {network.num_addresses - 2}",
            "see fabric.ipoib_network in vhpc.toml(5)",
        )
    return tuple((name, str(network[assignment.first_rank + place])) for place, name in enumerate(names, 1))


def identity(
    assignment: KeyAssignment, *, in_guests: bool = False, site: tuple[IbPartition, ...] = ()
) -> NetworkIdentity:
    """The assignment as a lease carries it to the nodes, which find their GUIDs in it or compute them."""
    place = NetworkIdentity(first_rank=assignment.first_rank, rails=assignment.rails, vfs=assignment.vfs)
    if numbers.VLANS.has(assignment.pkey):
        return replace(place, kind="ethernet", vlan=assignment.pkey - numbers.VLANS.base)
    if numbers.VNIS.has(assignment.pkey):
        return replace(place, kind="vxlan", vni=assignment.pkey - numbers.VNIS.base)
    words = [f"{guid:#018x}" for guid in assignment.ports]
    each = assignment.rails * assignment.vfs
    return replace(
        place,
        kind="ib",
        pkey=assignment.pkey,
        port_guids=tuple(tuple(words[first : first + each]) for first in range(0, len(words), each)),
        in_guests=in_guests,
        site_keys=partitions.common_entries(site, assignment.port_guids()),
    )
