# SPDX-License-Identifier: Apache-2.0
"""Jobs whose time limit ends them while their guests boot.

No script has run, so there is no output file, and Slurm says only that the time is over.  The Prolog says the
rest: in the timeline, in AdminComment, to vhpcd, and, through the timeline, in the Epilog's acknowledgement.
"""

from __future__ import annotations

import contextlib
import re

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import TOLD, Lease, NodeReport, Timeline
from vhpc_slurm.model.lease import FAILED
from vhpc_slurm.node.store import timeline
from vhpc_slurm.slurm import comments

SHORTEST_S = 45.0
"""No boot that took less has used up a time limit: the shortest one is a minute."""
REASON = "TimeLimit"
"""squeue's reason of a job that its time limit has ended (FAIL_TIMEOUT)."""
_BEGINS = "the time limit ended the job in the boot of its guests"


def explain(config: Config, env: common.HookEnv, recorder: timeline.Recorder, began: float) -> str:
    """The line for the user of a job that ended in its boot; empty if its time limit was not the reason.

    Also puts it into the timeline, in place of the end of the stage that was interrupted.

    Args:
        config: names Slurm's commands.
        env: the job and this node.
        recorder: of the boot.
        began: start of the boot in seconds of the Unix epoch.
    """
    common.log.info("the job was ended during its boot")
    if timeline.now() - began < SHORTEST_S or not _is_over(config, env.job_id):
        return ""
    stage = recorder.failed()
    where = ""
    if stage is not None:
        name = re.sub(r" g0$", "", stage.name)
        where = f", {stage.ended - stage.began:.0f} s of it in the stage {name}"
    took = f"it took {timeline.now() - began:.0f} s{where}"
    text = f"{_BEGINS} on {env.node}: {took} (ask for a longer --time)"
    if stage is not None:
        recorder.explain(text)
    else:
        recorder.note("time limit", timeline.now(), detail=f"{FAILED} {text}")
    return text


def tell(
    config: Config, client: ControllerClient, lease: Lease, text: str, said: tuple[Timeline, NodeReport]
) -> None:
    """Put the text into the job's AdminComment, and send vhpcd what this Prolog has recorded."""
    common.comment_ended(config, lease.generation.job_id, comments.of_lease(lease, text))
    with contextlib.suppress(FabricError):
        client.report_timeline(*said)


def note(line: Timeline | None) -> str:
    """The note of the Epilog's acknowledgement about such a job; empty for others."""
    for stage in line.boot if line is not None else ():
        text = stage.detail.removeprefix(FAILED).strip()
        if text.startswith(_BEGINS):
            return TOLD + text
    return ""


def _is_over(config: Config, job_id: int) -> bool:
    try:
        return slurm.commands(config, slurm.HOOK_TIMEOUT_S).load(job_id).reason == REASON
    except (FabricError, UserError) as err:
        common.log.info("why job %d has ended is not known: %s", job_id, err.line())
        return False
