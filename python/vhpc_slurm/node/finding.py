# SPDX-License-Identifier: Apache-2.0
"""A difference between a node and what should be on it, with its repair."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from vhpc_slurm.errors import VhpcError
from vhpc_slurm.record import Record


class Kind(StrEnum):
    """Kinds of findings; programs read these words in the JSON of ``vhpc reconcile``."""

    STALE_GENERATION = "stale-generation"
    """A generation with a journal and without a live lease."""
    UNACKNOWLEDGED = "unacknowledged"
    """An ended generation that left nothing here, and vhpcd has no acknowledgement."""
    LIBVIRT = "libvirt"
    """libvirt does not run, or has not answered for some minutes."""
    LIBVIRT_BUSY = "libvirt-busy"
    """libvirt did not answer; perhaps it has too many clients at the moment."""
    ORPHAN_DOMAIN = "orphan-domain"
    ORPHAN_PROCESS = "orphan-process"
    ORPHAN_UID = "orphan-uid"
    ORPHAN_CGROUP = "orphan-cgroup"
    ORPHAN_FOLDER = "orphan-folder"
    ORPHAN_PIN = "orphan-pin"
    ORPHAN_DISK = "orphan-disk"
    """Objects of a generation without a journal: a domain, process, uid, control group, run folder,
    image pin or disk."""
    ORPHAN_NETWORK = "orphan-network"
    """Interfaces or nftables tables of a segment of a generation without a journal."""
    LEFT_NODE = "left-node"
    """A segment in use that still contains a node which Slurm has taken from the job."""
    FIREWALL = "firewall"
    """A segment in use whose nftables tables are not there."""
    UNPARKED_FUNCTION = "unparked-function"
    """A virtual function that is on a network, and no generation holds it."""
    OPEN_FABRIC = "open-fabric"
    """Guests with a key on a fabric that does not keep jobs apart."""
    LOST_KEY = "lost-key"
    """Guests of a job whose port has lost its partition key."""
    LOST_START = "lost-start"
    """A job that runs according to Slurm, but not on this node."""
    LOST_KEEPER = "lost-keeper"
    """A job whose keeper has ended, which may have held its guests for a checkpoint."""
    LOST_FOLLOWER = "lost-follower"
    """A job whose follower has ended: its guests do not see changes of their cluster."""
    ORPHAN_CHECKPOINT = "orphan-checkpoint"
    """A folder with the files of a checkpoint that vhpcd does not keep; the folder of all cannot be used."""
    CONTROLLER = "controller"
    """vhpcd does not answer."""
    OUTBOX = "outbox"
    """Acknowledgements that have not reached vhpcd."""
    REFUSED_ACKNOWLEDGEMENT = "refused-acknowledgement"
    """An acknowledgement that vhpcd cannot use."""


class NodeFinding(Record, frozen=True):
    """A difference between this node and what should be on it.

    Attributes:
        kind: its kind.
        what: one line for people.
        repair: removes the difference; raises VhpcError when it cannot.
    """

    kind: Kind
    what: str
    repair: Callable[[], object]


def of_error(kind: Kind, err: VhpcError) -> NodeFinding:
    """An error that kept the node from being examined; its repair raises it again."""
    return NodeFinding(kind, err.line(), partial(_raise, err))


def _raise(err: VhpcError) -> None:
    raise err
