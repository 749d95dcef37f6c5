# SPDX-License-Identifier: Apache-2.0
"""The time at which a job with --vhpc-checkpoint is saved.  Pure."""

from __future__ import annotations

import re

from vhpc_slurm.config import Config
from vhpc_slurm.model import JobRequest, Lease, SavedNode
from vhpc_slurm.slurm.port import RunningJob

LIMIT, PREEMPT, EVERY = "limit", "preempt", "every"
_INTERVAL = re.compile(r"every:(\d+)m\Z", re.ASCII)
INTERVAL_S = 10.0
"""How often Slurm is asked while there are such jobs, unless vhpcd asks for all jobs more often."""
SPARE_S = 5.0
"""For requests and answers between vhpcd and the keepers."""
SLOWER = 2.0
"""A checkpoint may take so many times as long as the last one of the job."""


def look_s(config: Config) -> float:
    """How often vhpcd looks whether jobs must be saved."""
    return min(INTERVAL_S, config.controller.reconcile_interval_s)


def overhead_s(config: Config) -> float:
    """How long a checkpoint takes, from its moment until it is written, without the writing."""
    return config.checkpoint.hold_timeout_s + look_s(config) + SPARE_S


def lead_s(config: Config, lease: Lease, last: tuple[SavedNode, ...]) -> float:
    """How many seconds before its end a job must be saved.

    Args:
        config: has the time that guests may take to stop, and the rate of the storage.
        lease: of the job.
        last: what its nodes have written for its last checkpoint; empty if there is none.
    """
    if last:
        write_s = SLOWER * max(node.seconds for node in last)
    else:
        write_s = max(part.memory_mib for part in lease.allocation.nodes) / config.checkpoint.write_mib_s
    return overhead_s(config) + write_s


def interval_s(request: JobRequest) -> float | None:
    """The interval of a job's checkpoints; None without one."""
    found = _INTERVAL.search(request.checkpoint or "")
    return None if found is None else 60.0 * int(found[1])


def due(lease: Lease, job: RunningJob, lead_s: float, saved: float | None, now: float) -> str:
    """Return why a job must be saved now: limit, preempt or every; empty if it must not.

    A run that is shorter than twice the lead still has half of its time for the job's work.

    Args:
        lease: of the job.
        job: the same job in Slurm.
        lead_s: how long before its end it must be saved.
        saved: when the last checkpoint of this run began; None: there is none.
        now: seconds since the epoch.
    """
    words = (lease.request.checkpoint or "").split(",")
    if PREEMPT in words and job.preempted is not None:
        return PREEMPT
    if LIMIT in words and job.ends is not None:
        lead = min(lead_s, (job.ends - job.started) / 2)
        if now >= job.ends - lead:
            return LIMIT
    wait_s = interval_s(lease.request)
    return EVERY if wait_s is not None and now >= (saved or job.started) + wait_s else ""
