# SPDX-License-Identifier: Apache-2.0
"""A checkpoint: the saved state of all guests of a job, and what a job gets that is resumed from it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from vhpc_slurm.model.job import Generation
from vhpc_slurm.model.usage import SUM_MAX
from vhpc_slurm.record import Record

MAX_CHECKPOINT_NAME = 64
JOB_ENDED = "the job has ended"
"""The error of a checkpoint that was not complete when its job ended."""


class CheckpointState(StrEnum):
    """Life of a checkpoint; it can be resumed in the state VALID only.

    HOLDING: its guests are being stopped.  SAVING: all have been, and are written.  FAILED: it was given up.
    REMOVED: its files will be deleted.
    """

    HOLDING = "holding"
    SAVING = "saving"
    VALID = "valid"
    FAILED = "failed"
    REMOVED = "removed"


UNFINISHED = (CheckpointState.HOLDING, CheckpointState.SAVING)


class Seal(Record, frozen=True):
    """Proof of the content of one file of a checkpoint; vhpcd keeps it.

    Attributes:
        size: bytes of the file.
        root: keyed hash of the tags of all its chunks.
        encrypted: its chunks are.
    """

    size: int
    root: bytes
    encrypted: bool = False


class SavedGuest(Record, frozen=True):
    """The saved state of one guest.

    Attributes:
        rank: the guest's number in the job, counted node by node from 0.
        hostname: of the guest.
        vcpus: number of its vCPUs.
        memory_mib: of the guest.
        state: of the file with its memory and its devices.
        disk: of the file with its own disk; None if it has none.
        snapshots: folders whose snapshots it has mounted, and their files.
    """

    rank: int
    hostname: str
    vcpus: int
    memory_mib: int
    state: Seal
    disk: Seal | None = None
    snapshots: tuple[tuple[str, str], ...] = ()


class SavedNode(Record, frozen=True):
    """The part of a checkpoint that one node has saved.

    Attributes:
        node: the node.
        qemu: version of its QEMU, as libvirt's number.
        cpu: the CPU that its guests have seen: "emulated", or vendor and model of the host's.
        seconds: how long its guests were stopped until their state was on storage.
        guests: in the order of their ranks.
    """

    node: str
    qemu: int
    cpu: str
    seconds: float
    guests: tuple[SavedGuest, ...]


def saved_bytes(nodes: Iterable[SavedNode]) -> int:
    """Bytes of all files that nodes have saved."""
    guests = (guest for node in nodes for guest in node.guests)
    return min(sum(guest.state.size + (guest.disk.size if guest.disk else 0) for guest in guests), SUM_MAX)


class Resume(Record, frozen=True):
    """The checkpoint that a job continues.

    Attributes:
        serial: of the checkpoint; it names the folder of its files.
        name: of the checkpoint.
        origin: the generation that was saved.
        nodes: what its nodes have saved, in their order: node number *i* of the job continues node *i*.
        key: of the checkpoint's seals; secret, known only to a node that has taken the lease.
    """

    serial: int
    name: str
    origin: Generation
    nodes: tuple[SavedNode, ...]
    key: bytes = b""

    def __repr__(self) -> str:
        return f"Resume(serial={self.serial}, name={self.name!r})"


class OrderKind(StrEnum):
    """An order of vhpcd to the keeper of a job on a node.

    WAIT: nothing; ask again.  PREPARE: let nothing begin in the guests that the host takes part in.
    HOLD: all nodes have done that; stop the programs.  SAVE: all nodes have done that; write the state of the
    guests.  CONTINUE: let them continue; a checkpoint that was not completed was given up.  END: the
    checkpoint is valid, and vhpcd ends the job: the guests never continue.  OVER: the job has ended, and so
    does the keeper.
    """

    WAIT = "wait"
    PREPARE = "prepare"
    HOLD = "hold"
    SAVE = "save"
    CONTINUE = "continue"
    END = "end"
    OVER = "over"


class KeeperOrder(Record, frozen=True):
    """An order of vhpcd to a keeper, about one checkpoint.

    ``key`` seals its files, and is secret; with ``encrypt`` they are encrypted, too.
    ``comment`` is the AdminComment that this node gives the job, whose checkpoint is valid.
    """

    kind: OrderKind
    serial: int = 0
    name: str = ""
    key: bytes = b""
    comment: str = ""
    encrypt: bool = False

    def __repr__(self) -> str:
        return f"KeeperOrder({self.kind.value}, serial={self.serial})"


class KeeperState(StrEnum):
    """A report of the keeper of a job on a node about a checkpoint."""

    PREPARED = "prepared"
    HELD = "held"
    SAVED = "saved"
    CONTINUED = "continued"
    FAILED = "failed"


class KeeperReport(Record, frozen=True):
    """A report of a keeper; ``line`` is the reason of FAILED, ``saved`` belongs to SAVED.

    ``paused_s`` belongs to CONTINUED and FAILED: for how many seconds the programs were stopped; None if they
    were not, or if the keeper was started again meanwhile.
    """

    serial: int
    state: KeeperState
    saved: SavedNode | None = None
    line: str = ""
    paused_s: float | None = None


class Checkpoint(Record, frozen=True):
    """A checkpoint as vhpcd shows it; it has no secrets.

    Attributes:
        serial: its number, unique for the site.
        name: its name, which a later checkpoint of the user may have, too.
        uid: its owner.
        generation: that was saved.
        image: of the job, as a reference with its digest.
        state: of the checkpoint.
        created: seconds since the epoch.
        stop: this run of the job ends when it is valid.
        node_count: how many nodes the job has.
        held: how many of them have stopped their guests.
        nodes: those that have saved, in the order of the allocation.
        error: why it was given up.
        resumed_by: the generation that continues it now, if there is one.
        requeue: the job is put back into the queue when it is valid, and its next run continues it.
        paused_s: how many seconds the job's programs were stopped, on the node where it was longest; None if
            no node has reported that they continue.
        running: the run that was saved has not ended.
    """

    serial: int
    name: str
    uid: int
    generation: Generation
    image: str
    state: CheckpointState
    created: float
    stop: bool
    node_count: int
    held: int = 0
    nodes: tuple[SavedNode, ...] = ()
    error: str = ""
    resumed_by: Generation | None = None
    requeue: bool = False
    paused_s: float | None = None
    running: bool = False

    @property
    def seconds(self) -> float:
        """How long the slowest node took to write its files."""
        return max((node.seconds for node in self.nodes), default=0.0)

    @property
    def encrypted(self) -> bool:
        """Whether its files are encrypted."""
        return any(guest.state.encrypted for node in self.nodes for guest in node.guests)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return saved_bytes(self.nodes)


class InUse(Record, frozen=True):
    """A checkpoint that was not removed, and why its files are needed."""

    name: str
    why: str


class Removed(Record, frozen=True):
    """The result of a request to remove checkpoints, by their names.

    Attributes:
        removed: these are gone.
        missing: the user has no checkpoints of these names.
        in_use: these stay.
    """

    removed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    in_use: tuple[InUse, ...] = ()


class CheckpointTotal(Record, frozen=True):
    """The bytes of all checkpoints of a user or of an account, as vhpcd compares them with the policy.

    Attributes:
        owner: "user" or "account".
        name: of the user, or of the account.
        bytes: of the valid ones, and what those that are being made will probably need.
        limit: the most that the policy permits; None without a limit.
        rule: of the policy that has the limit; that of the owner's newest checkpoint.
    """

    owner: str
    name: str
    bytes: int
    limit: int | None = None
    rule: str = ""
