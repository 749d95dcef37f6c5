# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol about checkpoints; ``protocol`` has all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vhpc_slurm.controller.wire_types import JobId, Serial, Wire
from vhpc_slurm.model import (
    MAX_CHECKPOINT_NAME,
    Checkpoint,
    CheckpointTotal,
    KeeperOrder,
    KeeperReport,
    Removed,
)

MAX_SERIALS = 4096
"""Checkpoints in one message."""
Name = Annotated[str, msgspec.Meta(pattern=f"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CHECKPOINT_NAME - 1}}}$")]


class SaveJob(Wire, frozen=True, tag="save-job"):
    """The owner of a job, or root: make a checkpoint; without a name it is called JOBID.NUMBER.

    With ``stop`` vhpcd ends the job when the checkpoint is valid. With ``requeue`` it puts the job back into
    the queue then.
    """

    job_id: JobId
    name: Name | None = None
    stop: bool = False
    requeue: bool = False


class ListCheckpoints(Wire, frozen=True, tag="checkpoints"):
    """Checkpoints after ``after``, oldest first, of one job or of all; at most ``limit``, if it is not 0."""

    after: Serial = 0
    job_id: JobId | None = None
    limit: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0


class RemoveCheckpoints(Wire, frozen=True, tag="remove-checkpoints"):
    """A user, or root for all users: remove checkpoints.

    A name means its newest checkpoint, if possible a valid one. With ``older_s`` also all valid ones of that
    age are removed that no job in Slurm's queue can continue.
    """

    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_SERIALS)] = ()
    older_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class AskOrder(Wire, frozen=True, tag="keeper"):
    """The keeper of a job on a node: what it has done, and a question what to do.

    A keeper whose guests are stopped repeats its report with each request.  With ``wait_s`` > 0 the answer
    comes when there is something to do, or after that time.
    """

    generation: str
    node: str
    report: KeeperReport | None = None
    wait_s: float = 0.0


class KnownCheckpoints(Wire, frozen=True, tag="known-checkpoints"):
    """A node: which of these checkpoints are needed; the files of the others can be deleted."""

    serials: Annotated[tuple[Serial, ...], msgspec.Meta(max_length=MAX_SERIALS)]


class CheckpointAnswer(Wire, frozen=True, tag="checkpoint"):
    """To SaveJob."""

    checkpoint: Checkpoint


class CheckpointPage(Wire, frozen=True, tag="checkpoints"):
    """To ListCheckpoints; ``more`` is the next ``after``, None at the end.

    The last page of a list without ``limit`` has the totals of users and accounts.
    """

    checkpoints: tuple[Checkpoint, ...]
    more: int | None
    totals: tuple[CheckpointTotal, ...] = ()


class CheckpointsRemoved(Wire, frozen=True, tag="checkpoints-removed"):
    """To RemoveCheckpoints."""

    done: Removed


class OrderAnswer(Wire, frozen=True, tag="order"):
    """To AskOrder; the key of an order is secret."""

    order: KeeperOrder


class CheckpointsKept(Wire, frozen=True, tag="checkpoints-kept"):
    """To KnownCheckpoints: those whose files are needed."""

    serials: tuple[int, ...]


OfCheckpoints = SaveJob | RemoveCheckpoints | AskOrder | KnownCheckpoints
"""Requests about checkpoints but lists."""
AboutCheckpoints = CheckpointAnswer | CheckpointsRemoved | OrderAnswer | CheckpointsKept
"""Answers to them."""
Changing = SaveJob | RemoveCheckpoints
"""Requests with which ordinary users change what is theirs."""
