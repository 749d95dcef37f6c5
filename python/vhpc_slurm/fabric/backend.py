# SPDX-License-Identifier: Apache-2.0
"""The port to a fabric: what the controller asks of any kind of network partition.

The controller owns the key assignments (``keys.KeySnapshot``) and passes all of them
in each call, so that a backend needs no memory between two calls: ``plan`` before the
lease is durable, ``apply`` for all generations that start or end together, then
``verify`` for those that start and ``strip`` for those that end and whose nodes have
all reported that they hold nothing. Each call may be repeated after a crash. ``plan``
runs in the database thread and may not wait; the others run one after the other in
the fabric thread, which may wait for a fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from typing import Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import keys, numbers, partitions
from vhpc_slurm.fabric.filewatch import FileWatch
from vhpc_slurm.fabric.keys import KeyAssignment, KeySnapshot, KeyState
from vhpc_slurm.fabric.numbers import KeyPool
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.model import Allocation, Generation, JobRequest, NetworkIdentity


class FabricRefusedError(FabricError):
    """The fabric rejects the configuration, and something in the configuration is the cause."""


@dataclass(frozen=True)
class Proof:
    """Results of reading the fabric's tables back.

    Attributes:
        epoch: of the snapshot that the fabric was compared with.
        scanned: ports of the fabric whose tables were read after the change.
        seen: ports of the generation among them; each had exactly its keys.
        absent: ports of the generation that the fabric does not show (yet).
        earlier: further ports of the fabric, whose tables were last read before the change.
    """

    epoch: int
    scanned: int = 0
    seen: int = 0
    absent: int = 0
    earlier: int = 0


ProofResults = dict[Generation, Proof | FabricError]
"""For each generation the proof, or why there is none; one job may fail and others not."""


@dataclass(frozen=True)
class FabricFinding:
    """One difference between the fabric and a snapshot.

    Attributes:
        port_guid: the port; 0 where the finding is not about a port.
        what: a line for an operator.
        open: whether isolation is broken: a port has more than its keys, or will have. (A port that
            lacks a key is isolated.)
        unread: whether this is something that could not be read, and that could therefore be open.
        blind: whether the tables of ports could not be read.
        lost: whether the port lacks the key of a job.
    """

    port_guid: int
    what: str
    open: bool = False
    unread: bool = False
    blind: bool = False
    lost: bool = False


class NetworkBackend(Protocol):
    """One kind of network partition.  All methods raise FabricError when the fabric fails or refuses."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """Whether this backend can serve here and now; before the first request."""

    def plan(
        self,
        generation: Generation,
        request: JobRequest,
        allocation: Allocation,
        snapshot: KeySnapshot,
        owner: str,
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """Choose a network identity and the key assignment for it; pure.

        ``owner`` is that of the key (``keys.owner_of``): generations with one owner share a key.
        """

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Make the fabric carry ``snapshot.carried()``, and nothing else.

        ``force``: also where the fabric seems to have been configured from another database.
        """

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back, after ``apply``, that each generation's ports have their keys, and no other port has.

        Raises FabricError when the fabric cannot be read at all.
        """

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Read back, after ``apply``, that nothing is left of generations that the snapshot does not carry.

        Raises FabricError when the fabric cannot be read at all.
        """

    def audit(self, snapshot: KeySnapshot, *, unsure: bool = False) -> tuple[FabricFinding, ...]:
        """Compare the whole fabric with what the snapshot carries; changes nothing.

        A part that cannot be read is a finding, and the other parts are read all the same.
        ``unsure``: a change was interrupted, so the fabric may or may not have the
        configuration of the snapshot; differences that this explains are left out,
        except keys that ports lack.
        """

    def repair(self, snapshot: KeySnapshot) -> None:
        """Configure the fabric with the snapshot again, whatever it was seen to carry before.

        Where one part of the fabric cannot be changed, the others are repaired before FabricError is raised.
        """

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Have ``notice`` called, from another thread, when ``disturbed`` should be called; None: never.

        Raises:
            FabricError: the backend cannot watch.
        """

    def disturbed(self) -> bool:
        """Whether a file was changed, or the subnet manager swept, since the fabric was last read."""


class NoNetwork:
    """No partition: guests have no network, there is nothing to plan or to strip."""

    def validate(self, snapshot: KeySnapshot) -> None:
        """FabricError while keys of another backend are in use: this one could not remove them."""
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
        self,
        generation: Generation,
        request: JobRequest,
        allocation: Allocation,
        snapshot: KeySnapshot,
        owner: str,
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """The identity ``none``, which any number of generations may hold."""
        del generation, request, allocation, snapshot, owner
        return NetworkIdentity(kind="none"), None

    def apply(self, snapshot: KeySnapshot, *, force: bool = False) -> None:
        """Nothing to apply."""

    def verify(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing to read back."""
        return {generation: Proof(snapshot.epoch) for generation in generations}

    def strip(self, generations: Collection[Generation], snapshot: KeySnapshot) -> ProofResults:
        """Nothing to strip; an error for generations that began under another backend."""
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
    """How network identities are chosen; shared by all backends that have keys.

    Attributes:
        pool: the keys for jobs.
        rails: ports of a guest are on this many rails.
        vfs: ports of a guest on each rail.
        limit: the most guests that one key can have.
        ports: the ports of nodes whose GUIDs are fixed; None where nodes set GUIDs.
        in_guests: whether ``ports`` are visible in guests.
        site: partitions of the site, in addition to those of jobs.
        network: the network for addresses of guests; None: they have none.
    """

    pool: KeyPool
    rails: int = 1
    vfs: int = 1
    limit: int = numbers.MAX_RANKS
    ports: PortMap | None = None
    in_guests: bool = False
    site: tuple[IbPartition, ...] = ()
    network: IPv4Network | None = None

    def plan(
        self,
        generation: Generation,
        request: JobRequest,
        allocation: Allocation,
        snapshot: KeySnapshot,
        owner: str,
    ) -> tuple[NetworkIdentity, KeyAssignment]:
        """As many guests on each node as were asked for, ranked node by node."""
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
    """Base of all backends except ``NoNetwork``: a policy chooses identities."""

    def __init__(self, policy: KeyPolicy) -> None:
        self._policy = policy

    def watch(self, notice: Callable[[], None]) -> FileWatch | None:
        """Nothing to watch; backends with files override this."""
        del notice
        return None

    def disturbed(self) -> bool:
        """Never; only audits see changes."""
        return False

    def plan(
        self,
        generation: Generation,
        request: JobRequest,
        allocation: Allocation,
        snapshot: KeySnapshot,
        owner: str,
    ) -> tuple[NetworkIdentity, KeyAssignment | None]:
        """Choose a key."""
        return self._policy.plan(generation, request, allocation, snapshot, owner)


def addresses_of(
    network: IPv4Network, assignment: KeyAssignment, names: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """(hostname, address) of an assignment's guests, by rank; guests with one key have different ones.

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
    """The assignment in the form of a lease: nodes take their GUIDs from it, or compute them."""
    place = NetworkIdentity(first_rank=assignment.first_rank, rails=assignment.rails, vfs=assignment.vfs)
    if numbers.VLANS.has(assignment.pkey):
        return replace(place, kind="ethernet", vlan=assignment.pkey - numbers.VLANS.base)
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
