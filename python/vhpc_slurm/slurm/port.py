# SPDX-License-Identifier: Apache-2.0
"""The port to Slurm: everything that vhpc asks Slurm or tells it, in vhpc's own types.

Two adapters implement it: ``scontrol`` (every version from 22.05) and
``pyslurm_adapter`` (where a pyslurm of Slurm's own release is installed).  One
contract test checks that both give the same answers.
"""
# Decision: Slurm's commands take nothing from the environment

from __future__ import annotations

import contextlib
from typing import Protocol

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Allocation, HetPlace
from vhpc_slurm.record import Record
from vhpc_slurm.slurm.settings import SlurmSettings

PENDING, RUNNING, CONFIGURING, COMPLETING = "PENDING", "RUNNING", "CONFIGURING", "COMPLETING"
REASON_PROLOG = "Prolog"
"""squeue's reason of a job whose node Prologs have not all reported (WAIT_PROLOG)."""

REASON_PREFIX = "vhpc: "
"""How each Reason begins with which vhpc drains a node."""


class SlurmError(FabricError):
    """Slurm did not answer, refused, or printed something that cannot be parsed."""


class NoSuchJobError(SlurmError):
    """slurmctld has no job of this id, or does not show it to this user."""


class NotRequeueableError(SlurmError):
    """A job without a batch script, or one whose user asked for --no-requeue."""


class SlurmJob(Record, frozen=True):
    """One job with the identity that slurmctld gives it.

    ``allocation`` is empty while the job has no nodes.  ``batch_host`` is the
    node of its batch script, empty for a job without one.  ``name``,
    ``work_dir`` and ``features`` are text of the user: never trust them.
    ``het`` is the place of a component in its heterogeneous job.  ``account``
    is checked by Slurm only if it enforces associations.
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
    het: HetPlace | None = None
    account: str = ""
    qos: str = ""


class JobStatus(Record, frozen=True):
    """A job as squeue lists it; ``started`` in seconds since the epoch, None before the start."""

    job_id: int
    restarts: int
    state: str
    reason: str
    started: float | None


class RunningJob(Record, frozen=True):
    """The times of a job that runs, in seconds since the epoch.

    ``ends`` is when its time limit or its preemption ends it, None without a limit. ``preempted`` is when
    slurmctld has begun to preempt it.
    """

    job_id: int
    restarts: int
    started: float
    ends: float | None
    preempted: float | None


class JobRef(Record, frozen=True):
    """How to name one job to Slurm's commands so that they touch no other job.

    The last array task to start has the id of the whole array, and ``scontrol
    requeue``, ``scontrol update`` and ``scancel`` apply that number to all tasks
    of the array; so an array task is named by its array and task.  ``update``
    and ``scancel`` apply the id of a heterogeneous job's first component to all
    components, and ``requeue`` accepts no other name for them.  All measured
    with 22.05, 24.11 and 26.05.

    Attributes:
        job_id: its JobId.
        array: (ArrayJobId, ArrayTaskId) of an array task.
        het: (HetJobId, HetJobOffset) of a component.
    """

    job_id: int
    array: tuple[int, int] | None = None
    het: tuple[int, int] | None = None

    @property
    def alone(self) -> str:
        """Name of this job only: to change one of its fields."""
        return f"{self.het[0]}+{self.het[1]}" if self.het else self.whole

    @property
    def whole(self) -> str:
        """Name of everything that is requeued or cancelled with this job: all components of a heterogeneous
        job."""
        if self.array:
            return f"{self.array[0]}_{self.array[1]}"
        return str(self.het[0] if self.het else self.job_id)


class SlurmNode(Record, frozen=True):
    """A node and where Slurm reaches it: NodeAddr and NodeHostName, each a name or an address."""

    name: str
    address: str
    hostname: str


class NodeResources(Record, frozen=True):
    """Resources of a node that slurm.conf lets Slurm allocate.

    Attributes:
        name: NodeName.
        memory_mib: RealMemory, 0 when unknown.
        gres: name and count of each configured GRES; one name may occur several times (types).
        arch: what the node's slurmd says of its processor, as ``uname -m``; empty before it has registered.
    """

    name: str
    memory_mib: int = 0
    gres: tuple[tuple[str, int], ...] = ()
    arch: str = ""

    def gres_count(self, name: str) -> int | None:
        """How many of a GRES Slurm counts on this node; None when it has none configured."""
        counts = [count for gres, count in self.gres if gres == name]
        return sum(counts) if counts else None


class Standing(Record, frozen=True):
    """A user's rights to the jobs of others.

    Attributes:
        level: AdminLevel: None, Operator, Administrator.
        coordinates: accounts that the user coordinates, also those below others.
    """

    level: str = "None"
    coordinates: tuple[str, ...] = ()


class SlurmPartition(Record, frozen=True):
    """A partition, with its own PreemptMode as Slurm prints it, such as ``GANG,SUSPEND``.

    ``grace_s`` is its GraceTime: how many seconds a preempted job has left.
    """

    name: str
    preempt_mode: str
    grace_s: int = 0


class Slurm(Protocol):
    """Everything that vhpc asks Slurm or tells it.

    Every call ends within a deadline and raises SlurmError, which names the
    command that failed.  Jobs are named by their JobId, also array tasks and
    components of heterogeneous jobs.  A call changes no other job; only a
    heterogeneous job is cancelled and requeued as a whole.
    """

    def load(self, job_id: int) -> SlurmJob:
        """Return one job with its allocation; NoSuchJobError when there is none.

        One RPC; two for an array task or a component of a heterogeneous job.
        """

    def load_with_comment(self, job_id: int) -> tuple[SlurmJob, str]:
        """As ``load``, with the AdminComment; one more RPC if there seems to be one."""

    def jobs(self) -> tuple[JobStatus, ...]:
        """Return all pending, running and completing jobs of the cluster.

        SlurmError where some are hidden from this user.
        """

    def may_requeue(self, job_id: int) -> bool:
        """Whether a job may be put back into the queue, by --requeue or JobRequeue; one RPC.

        NoSuchJobError when there is none.
        """

    def running(self) -> tuple[RunningJob, ...]:
        """Return the times of all jobs that run; one RPC."""

    def knows(self, job_id: int) -> bool:
        """Whether slurmctld has this job, and the job has not ended; one RPC."""

    def nodes(self) -> tuple[SlurmNode, ...]:
        """Return all nodes that are in a partition, in one RPC."""

    def drained(self) -> frozenset[str]:
        """Return the nodes that are drained, or are draining, for a reason of vhpc; one RPC."""

    def node_resources(self, name: str = "") -> tuple[NodeResources, ...]:
        """Return memory, GRES and architecture of one node, or of all nodes; one RPC.

        SlurmError when there is no node of that name.
        """

    def controllers(self) -> tuple[str, ...]:
        """Return names and addresses of the hosts that slurmctld may run on."""

    def settings(self) -> SlurmSettings:
        """Return Slurm's configuration as slurmctld has it."""

    def partitions(self) -> tuple[SlurmPartition, ...]:
        """Return all partitions that this user may see."""

    def admin_level(self, user: str) -> str:
        """Return a user's AdminLevel in slurmdbd: None, Operator, Administrator; "None" if unknown."""

    def accounts(self, user: str, account: str = "") -> tuple[str, ...]:
        """Return the accounts of this cluster that a user has associations with; only ``account``, if given.

        slurmctld is asked: it has them also while slurmdbd is away. None of them where this user may not see
        them (PrivateData=users), or without slurmdbd.
        """

    def standing(self, user: str) -> Standing:
        """Return what slurmdbd says of a user; one query of slurmdbd."""

    def drain(self, node: str, reason: str) -> None:
        """Set a node to DRAIN with a reason of one line."""

    def cancel(self, job_id: int) -> None:
        """End a job that has started; does nothing when the job has ended already."""

    def end_script(self, job_id: int) -> None:
        """Send SIGTERM to the batch script of a job; does nothing when the job has ended already."""

    def set_admin_comment(self, job: int | JobRef, text: str) -> None:
        """Set AdminComment, which users can read but not write; NoSuchJobError when the job has ended.

        With a JobId Slurm is first asked for the job's name, with a JobRef it is not.
        """

    def requeue(self, job_id: int) -> None:
        """Put a running job back into the queue.

        Raises:
            NoSuchJobError: slurmctld has no such job.
            NotRequeueableError: the job cannot be requeued.
        """


def requeue_or_cancel(slurm: Slurm, job_id: int, why: str) -> None:
    """Requeue a job that does not run; cancel one that cannot be requeued, and say why in AdminComment.

    Operators may requeue and cancel, but only root and SlurmUser may set AdminComment.

    Raises:
        SlurmError: Slurm refused both.
    """
    try:
        slurm.requeue(job_id)
    except NotRequeueableError:
        with contextlib.suppress(SlurmError):
            slurm.set_admin_comment(job_id, f"vhpc: {why}; it cannot be requeued")
        slurm.cancel(job_id)
