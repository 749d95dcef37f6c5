# SPDX-License-Identifier: Apache-2.0
"""The file in a job's run folder with the members of its cluster that the node knows.

Prolog writes it before it starts the follower, which replaces it after each change that it has applied to the
job's network. So the file says what the network has, also to a new follower and to who makes the firewall
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from vhpc_slurm import files
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import ClusterMember
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

LOCK_S = 10.0


class Membership(Record, frozen=True):
    """The cluster of a job.

    Attributes:
        name: of the cluster.
        uid: of the job's user.
        own: the job itself as a member.
        version: of the cluster; 0: vhpcd has not answered yet.
        others: the other members, oldest first.
    """

    name: str
    uid: int
    own: ClusterMember
    version: int = 0
    others: tuple[ClusterMember, ...] = ()


def write(layout: Layout, job_id: int, known: Membership) -> None:
    """Replace the file; NodeError if that fails."""
    path = layout.membership(job_id)
    try:
        files.replace(path, msgspec.json.encode(known))
    except OSError as err:
        raise NodeError(f"cannot write {path}", err.strerror or str(err)) from err


def read(layout: Layout, job_id: int) -> Membership | None:
    """The content of the file; None if the job is in no cluster.

    Raises:
        NodeError: the file cannot be read.
    """
    path = layout.membership(job_id)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Membership)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as err:
        raise NodeError(f"cannot read {path}", str(err), "see hooks.log") from err


@contextlib.contextmanager
def changing(layout: Layout, job_id: int) -> Iterator[Membership | None]:
    """Change segment or firewall of a running job, alone; gets what the network has of the cluster.

    Raises:
        NodeError: another program keeps the lock, or the file cannot be read.
    """
    if not layout.membership(job_id).exists():
        yield None
        return
    path = layout.network_lock(job_id)
    try:
        with files.locked(path, LOCK_S) as alone:
            if not alone:
                raise NodeError(f"the network of job {job_id} is being changed by another process", str(path))
            yield read(layout, job_id)
    except OSError as err:
        raise NodeError(f"cannot lock {path}", str(err)) from err
