# SPDX-License-Identifier: Apache-2.0
"""A job: its generation, what the user asked for, and what Slurm allocated."""

from __future__ import annotations

import re

from msgspec.structs import replace

from vhpc_slurm.model.image import ImageRef
from vhpc_slurm.options import BY_FIELD, BatchPlace
from vhpc_slurm.record import Record

GENERATION = re.compile(r"^([1-9][0-9]{0,9})\.([0-9]{1,9})\.([0-9a-f]{8})\Z", re.ASCII)
NODE_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z", re.ASCII)
NO_LEASE = "00000000"
"""Nonce of a generation without a lease; vhpcd gives it to none."""
CONTINUED = ImageRef("checkpoint")
"""Of a request with ``resume``, until vhpcd knows the image of the checkpoint."""
OF_CHECKPOINTS = frozenset(
    {
        "image",
        "work_dir",
        "mem_reserve_mib",
        "batch",
        "vfs",
        "guests_per_node",
        "network",
        "disk_mib",
        "disk_mount",
        "shares",
        "mounts",
        "env",
        "start_dir",
        "environment",
        "from_file",
    }
)
"""Fields of a request that a job which continues a checkpoint has from there."""
MAX_COMPONENTS = 128
"""Of a heterogeneous job: MAX_HET_JOB_COMPONENTS of Slurm."""


class Generation(Record, frozen=True, order=True):
    """One incarnation of a job on our side.

    Every lease, guest, file and process belongs to one; what belongs to
    another generation of the same job is stale by definition.
    """

    job_id: int
    restart: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.job_id}.{self.restart}.{self.nonce}"

    @classmethod
    def without_lease(cls, job_id: int, restart: int) -> Generation:
        """Of a job whose lease a node did not get: only the job's folder belongs to it."""
        return cls(job_id, restart, NO_LEASE)

    @property
    def has_lease(self) -> bool:
        """Whether vhpcd has made it."""
        return self.nonce != NO_LEASE

    @classmethod
    def parse(cls, text: str) -> Generation:
        """Parse ``JOB.RESTART.NONCE``; ValueError when it is anything else."""
        match = GENERATION.match(text)
        if match is None:
            raise ValueError(f"not a generation: {text!r}")
        return cls(int(match[1]), int(match[2]), match[3])


class HetPlace(Record, frozen=True):
    """A component's place in its heterogeneous job.

    ``leader`` is the JobId of the first component, ``offset`` counts from 0, ``components`` is the size
    of the heterogeneous job.
    """

    leader: int
    offset: int
    components: int


class JobRequest(Record, frozen=True):
    """The request of a user, with the identity that Slurm has checked.

    Options of sbatch have the fields that their declarations name (``vhpc_slurm.options``).
    ``network`` is a word of --vhpc-network; None: the site's default.  ``het`` is None for a job that is
    no component of a heterogeneous job.  ``disk_mib`` is the size of each guest's disk; None: no disk.
    ``disk_mount`` is the directory at which it is mounted; empty: it takes the changes to the root.
    ``shares`` is a word of --vhpc-shares; None: all that the site shares.
    ``mounts`` is a value of --vhpc-mount; None: no folder is at a second place.
    ``env`` is a value of --vhpc-env; None: no variables are set.
    ``start_dir`` is a value of --vhpc-workdir; None: programs start in ``work_dir``.
    ``environment`` is the file of --vhpc-environment; None: no file. ``from_file`` names the options that it
    has set, without --vhpc-.
    ``resume`` is the name of the checkpoint that the job continues; None: its guests boot.
    ``checkpoint`` is a value of --vhpc-checkpoint; None: the job is not saved by itself.
    ``cluster`` is a value of --vhpc-cluster; None: the job is in no cluster.
    ``account`` and ``qos`` are empty where Slurm has none.

    ``unset`` names fields whose options the user did not give, and which a rule of the site may
    set; ``defaults`` has those that one did set, as (field, name of the rule).
    """

    job_id: int
    restart: int
    uid: int
    gid: int
    user: str
    work_dir: str
    image: ImageRef
    mem_reserve_mib: int | None = None
    batch: BatchPlace = BatchPlace.GUEST
    timeout_s: int | None = None
    console: str | None = None
    job_name: str = ""
    partition: str = ""
    vfs: int | None = None
    guests_per_node: int = 1
    network: str | None = None
    het: HetPlace | None = None
    account: str = ""
    qos: str = ""
    disk_mib: int | None = None
    unset: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    disk_mount: str = ""
    shares: str | None = None
    mounts: str | None = None
    env: str | None = None
    start_dir: str | None = None
    environment: str | None = None
    from_file: tuple[str, ...] = ()
    resume: str | None = None
    checkpoint: str | None = None
    cluster: str | None = None

    @property
    def implies_job_network(self) -> bool:
        """Whether the job needs a job network, because it is in a cluster and its user has chosen none."""
        by_rule = any(field == "network" for field, _ in self.defaults)
        return self.cluster is not None and (self.network is None or by_rule)

    def fixed(self) -> JobRequest:
        """The request without what operators and users may change while the job runs.

        It also lacks the values that rules of the site have set: they depend on the partition. A job that
        continues a checkpoint lacks what comes from there: vhpcd has added it.
        """
        asked = replace(self, job_name="", partition="", account="", qos="", unset=(), defaults=())
        if self.resume is not None:
            saved = {field: WITHOUT_OPTIONS[field] for field in OF_CHECKPOINTS if field in WITHOUT_OPTIONS}
            return replace(asked, image=CONTINUED, work_dir="", **saved)
        given = [field for name, _ in self.defaults for field in BY_FIELD[name].fields]
        return replace(asked, **{field: WITHOUT_OPTIONS[field] for field in given})


WITHOUT_OPTIONS = dict(
    zip(JobRequest.__struct_fields__[::-1], JobRequest.__struct_defaults__[::-1], strict=False)
)
"""Fields of a request that have values without options and rules of the site, and these values."""


class GresAllocation(Record, frozen=True):
    """One kind of generic resource on one node; ``indexes`` is empty for count-only GRES."""

    name: str
    type: str
    count: int
    indexes: tuple[int, ...] = ()


class NodeAllocation(Record, frozen=True):
    """Slurm's allocation of a job on one node.

    ``cpu_ids`` are Slurm's abstract CPU ids (core * threads + thread), sorted.
    """

    node: str
    cpu_ids: tuple[int, ...]
    memory_mib: int
    gres: tuple[GresAllocation, ...] = ()


class Allocation(Record, frozen=True):
    """Slurm's allocation of a job on all its nodes, in Slurm's node order."""

    nodes: tuple[NodeAllocation, ...]

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes, in their order."""
        return tuple(part.node for part in self.nodes)

    def on(self, node: str) -> NodeAllocation:
        """The part of one node; KeyError when the job does not have that node."""
        for part in self.nodes:
            if part.node == node:
                return part
        raise KeyError(node)

    def guests(self, per_node: int) -> tuple[str, ...]:
        """Hostnames of all guests, in the order of their ranks: node by node."""
        return tuple(
            guest_hostname(part.node, index, per_node) for part in self.nodes for index in range(per_node)
        )


def guest_hostname(node: str, index: int, per_node: int) -> str:
    """A guest is called as its node is; where it is one of several it says which."""
    return node if per_node == 1 else f"{node}-g{index}"
