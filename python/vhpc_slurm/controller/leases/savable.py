# SPDX-License-Identifier: Apache-2.0
"""Which jobs can be saved.  Pure."""

from __future__ import annotations

from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import JobRequest, Lease
from vhpc_slurm.options import BatchPlace


class NeverRequeuedError(UserError):
    """A job with --vhpc-checkpoint that Slurm may not put back into the queue."""

    def __init__(self, request: JobRequest) -> None:
        super().__init__(
            f"--vhpc-checkpoint={request.checkpoint}: the job may not be put back into the queue",
            "it has --no-requeue, or the site does not requeue jobs",
            "submit it with --requeue",
        )


def is_asked(request: JobRequest) -> bool:
    """Whether a job has --vhpc-checkpoint."""
    return request.checkpoint not in (None, "none")


def refusal(lease: Lease, config: Config) -> str:
    """Why the guests of a job are not saved; empty if they are."""
    if not config.checkpoint.folder:
        return "this site has no folder for checkpoints (checkpoint.folder)"
    return _of_job(lease, config.placement.gpu_gres)


def _of_job(lease: Lease, gpu_gres: str) -> str:
    if lease.request.het is not None:
        return "it is a component of a heterogeneous job"
    if lease.request.batch is BatchPlace.HOST:
        return "its batch script runs outside of its guests (--vhpc-batch=host)"
    gpus = any(one.name == gpu_gres for part in lease.allocation.nodes for one in part.gres)
    if gpus or lease.network.in_guests:
        return "its guests have devices of the hosts, whose state cannot be read"
    if lease.site:
        return "its guests are on the site's network, where another job has other addresses"
    if lease.cluster is not None:
        return f"it is in cluster {lease.cluster.name}, and the other jobs would continue without it"
    return ""
