# SPDX-License-Identifier: Apache-2.0
"""The leases of jobs, as vhpcd shows them to the user of the command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vhpc_slurm.cli import context
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import LeaseRecord

if TYPE_CHECKING:
    from vhpc_slurm.controller.client import ControllerClient


def of_job(config: Config, job_id: int) -> LeaseRecord | None:
    """The last incarnation of a job with its timelines; None when vhpcd has no such job of this user.

    Raises:
        UserError: this user asks vhpcd too often.
        FabricError: vhpcd cannot be reached.
    """
    return last(client(config).leases(job_id=job_id))


def last(found: Iterable[LeaseRecord]) -> LeaseRecord | None:
    """The last incarnation among the leases of one job."""
    return max(found, key=lambda r: (r.lease.generation.restart, r.created), default=None)


def unknown(job_id: int) -> UserError:
    """The error for a job that vhpcd does not have, or does not show to this user."""
    if context.is_root():
        return UserError(
            f"vhpcd has no job {job_id}", "the job has no guests, or it ended long ago", "see: vhpc ps --all"
        )
    return UserError(
        f"vhpcd shows you no job {job_id}",
        "the job has no guests, it ended long ago, or it belongs to another user",
        "see: vhpc ps --all",
    )


def client(config: Config) -> ControllerClient:
    """A client of vhpcd; sends nothing yet."""
    from vhpc_slurm.controller.client import ControllerClient

    return ControllerClient(config)
