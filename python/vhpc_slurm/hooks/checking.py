# SPDX-License-Identifier: Apache-2.0
"""A Prolog's part in the check of guests: what the command gets, and whether the job may start again.

A job that finds a bad node is requeued once, and the node is drained. A job whose check fails in its next
start as well fails: it drains no second time, so that one job cannot take all nodes out of service.
"""

from __future__ import annotations

from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Lease
from vhpc_slurm.node.guest.check import UnhealthyError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RepeatedError(UserError):
    """The check has failed in two starts of a job; operators get an alarm.

    Attributes:
        cause: the text of the alarm.
    """

    def __init__(self, error: UnhealthyError) -> None:
        hint = "it failed in an earlier start of this job too; tell the site's support"
        super().__init__(error.what, error.why, hint)
        self.cause = f"the check of guests failed in two starts of a job: {error.why}"


def environment(env: common.HookEnv) -> dict[str, str]:
    """Variables of the check; those of the image, and the agent's own, are added to them in the guest."""
    return {
        "PATH": PATH,
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
        "SLURM_JOB_ID": str(env.job_id),
        "SLURMD_NODENAME": env.node,
    }


def repeated(
    client: ControllerClient, lease: Lease, env: common.HookEnv, error: UnhealthyError
) -> RepeatedError | None:
    """Report the failure to vhpcd, which counts failed starts; an error if it is not the job's first one.

    While vhpcd does not answer, only a job that was never requeued may start again.
    """
    try:
        state = client.ready(lease.generation, env.node, "failed", error=(FabricError.kind, error.line()))
        failed = state.failed_starts
    except FabricError as err:
        common.log.warning("the failed check is not reported: %s", err.line())
        failed = env.restart + 1
    return RepeatedError(error) if failed > 1 else None
