# SPDX-License-Identifier: Apache-2.0
"""The port to Slurm: what the rest of vhpc asks of it, in vhpc's own types.

Two adapters stand behind it: ``scontrol`` (every version from 22.05) and
``pyslurm_adapter`` (where a pyslurm of Slurm's own version is installed).  One
contract test holds both to the same answers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Allocation

PENDING, RUNNING, CONFIGURING, COMPLETING = "PENDING", "RUNNING", "CONFIGURING", "COMPLETING"
REASON_PROLOG = "Prolog"
"""squeue's reason of a job whose node Prologs have not all reported (WAIT_PROLOG)."""


class SlurmError(FabricError):
    """Slurm did not answer, or answered what cannot be understood."""


class NoSuchJobError(SlurmError):
    """slurmctld knows no job of this id, or will not show it to this user."""


class NotRequeueableError(SlurmError):
    """A job without a batch script, or one whose user asked for --no-requeue."""


@dataclass(frozen=True)
class SlurmJob:
    """One job with the identity Slurm vouches for.

    ``allocation`` has no nodes while the job has none.  ``batch_host`` is
    where its batch script runs, empty when it has none.  ``name``, ``work_dir``
    and ``features`` are the user's own text: data, never to be trusted.
    """

    job_id: int
    restarts: int
    state: str
    reason: str
    uid: int
    gid: int
    user: str
    partition: str
    name: str
    work_dir: str
    features: str
    allocation: Allocation
    batch_host: str = ""


@dataclass(frozen=True)
class JobStatus:
    """A job as squeue lists it; ``started`` in seconds since the epoch, None before the start."""

    job_id: int
    restarts: int
    state: str
    reason: str
    started: float | None


@dataclass(frozen=True)
class JobRef:
    """One job in the words in which Slurm's commands take it for that job alone.

    The last element of an array to start has the array's own id, and that
    number means all its elements to ``scontrol requeue``, ``scontrol update``
    and ``scancel``; so an element is called by its array and task.  The id of a
    heterogeneous job's first component means all components to ``update`` and
    ``scancel``, and to ``requeue`` it is the only name that they have.  All
    measured with 22.05, 24.11 and 26.05.

    Attributes:
        job_id: its JobId.
        array: (ArrayJobId, ArrayTaskId) of an element.
        het: (HetJobId, HetJobOffset) of a component.
    """

    job_id: int
    array: tuple[int, int] | None = None
    het: tuple[int, int] | None = None

    @property
    def alone(self) -> str:
        """This job and nothing else: to change a field of it."""
        return f"{self.het[0]}+{self.het[1]}" if self.het else self.whole

    @property
    def whole(self) -> str:
        """The least that can be requeued or cancelled with it: of a heterogeneous job all components."""
        if self.array:
            return f"{self.array[0]}_{self.array[1]}"
        return str(self.het[0] if self.het else self.job_id)


@dataclass(frozen=True)
class SlurmNode:
    """A node and where Slurm reaches it: NodeAddr and NodeHostName, each a name or an address."""

    name: str
    address: str
    hostname: str


class Slurm(Protocol):
    """What vhpc asks of Slurm.  Every call ends within a deadline and raises SlurmError at its end.

    Jobs are named by their JobId, also elements of arrays and components of
    heterogeneous jobs; what is done to one of them is done to no other, but
    that a heterogeneous job is cancelled and requeued as a whole.
    """

    def load(self, job_id: int) -> SlurmJob:
        """Return one job with its allocation; NoSuchJobError when there is none.

        One RPC; two for an element of an array or of a heterogeneous job.
        """

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return all pending, running and completing jobs of the cluster.

        SlurmError where some are hidden from this user.
        """

    def knows(self, job_id: int) -> bool:
        """Whether slurmctld has this job, and the job has not ended; one RPC."""

    def nodes(self) -> tuple[SlurmNode, ...]:
        """Return all nodes that are in a partition, in one RPC."""

    def controllers(self) -> tuple[str, ...]:
        """Return names and addresses of the hosts that slurmctld may run on."""

    def cancel(self, job_id: int) -> None:
        """End a job that has started; one that is gone already is no error."""

    def set_admin_comment(self, job_id: int, text: str) -> None:
        """Set AdminComment, which users can read and not write; NoSuchJobError when the job is gone."""

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue.

        Raises:
            NoSuchJobError: it is gone.
            NotRequeueableError: it is not of that kind.
        """


def start_again(slurm: Slurm, job_id: int, why: str) -> None:
    """Requeue a job that does not run; end one that cannot be requeued, and say why in its AdminComment.

    Operators may requeue and cancel, but AdminComment is for root and SlurmUser alone.

    Raises:
        SlurmError: Slurm does neither.
    """
    try:
        slurm.requeue(job_id)
    except NotRequeueableError:
        with contextlib.suppress(SlurmError):
            slurm.set_admin_comment(job_id, f"vhpc: {why}; it cannot be requeued")
        slurm.cancel(job_id)
