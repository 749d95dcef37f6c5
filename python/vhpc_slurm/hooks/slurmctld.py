# SPDX-License-Identifier: Apache-2.0
"""Both hooks of the controller: open a lease before the nodes start, mark it ending afterwards.

PrologSlurmctld may run again, and may be killed at any point; opening a lease
twice yields the same lease.  EpilogSlurmctld runs at the same time as the
nodes' Epilogs, so it frees nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from vhpc_slurm.config import Config
from vhpc_slurm.config.policy import DEFAULTED
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import CONTINUED, ImageRef, JobRequest
from vhpc_slurm.options import (
    BATCH,
    CHECKPOINT,
    ENVIRONMENT,
    IMAGE,
    OPTIONS,
    RESUME,
    SAVE,
    Option,
    ValueRefusedError,
)
from vhpc_slurm.slurm import commands, comments
from vhpc_slurm.slurm.port import JobRef, SlurmJob

OF_CHECKPOINT = "checkpoint://"
"""Before the name of a checkpoint in place of an image (spank_plugin/image.h)."""
REPORT_S = 5
"""How long a job without guests waits for vhpcd at most."""


def prolog(config: Config) -> int:
    """Open the lease of the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    ref = _ref(env)
    slurm = commands(config)
    client = ControllerClient(config)
    present = ""

    def comment(text: str) -> None:
        slurm.set_admin_comment(ref, comments.beside(text, present))

    try:
        job, present = slurm.load_with_comment(env.job_id)
        common.check_user(env, job.uid)
        _check_save(config, _given(SAVE))
        lease = client.open_generation(_request(env, job), job.allocation, _waiter())
    except UserError as err:
        # The SPANK plugin rejects such a request at submission, so the user has bypassed it:
        # no part of this job may start, and a non-zero exit status would only requeue it.
        common.log.info("cancelled: %s", err.line())
        comment(f"vhpc: {err.line()}")
        slurm.cancel(env.job_id)
        return 0
    except FabricError as err:
        with contextlib.suppress(FabricError):
            comment(f"vhpc: {err.line()}")
        raise
    common.log.info("lease %s %s", lease.generation, lease.state.value)
    if lease.refusal:
        comment(comments.of_lease(lease, lease.refusal))
        return 0
    try:
        comment(comments.of_lease(lease))
    except FabricError as err:  # the job can run without it
        common.log.warning("the AdminComment does not have the image's digest: %s", err.line())
    return 0


def without_guests(config: Config) -> int:
    """Report a component of a heterogeneous job without guests: others may wait for it; never an error.

    The job that Slurm starts here has nothing to do with vhpc, so a vhpcd that does not answer must
    neither hold it for long nor requeue it.
    """
    component = _numbers("HET_JOB_ID", "HET_JOB_OFFSET")
    if component is None:
        return 0
    timeout_s = min(config.controller.request_timeout_s, REPORT_S)
    brief = replace(config, controller=replace(config.controller, request_timeout_s=timeout_s))
    try:
        ControllerClient(brief, patient=False).without_guests(*component)
    except VhpcError as err:
        common.log.warning("the job's other components are not told: %s", err.line())
    return 0


def epilog(config: Config) -> int:
    """Mark the job's lease as ending."""
    env = common.HookEnv.read()
    ControllerClient(config).ending(env.job_id, env.restart)
    return 0


def _ref(env: common.HookEnv) -> JobRef:
    """The job's name for Slurm's commands: slurmctld tells its hooks, so that squeue need not be asked."""
    return JobRef(
        env.job_id, _numbers("ARRAY_JOB_ID", "ARRAY_TASK_ID"), _numbers("HET_JOB_ID", "HET_JOB_OFFSET")
    )


def _numbers(first: str, second: str) -> tuple[int, int] | None:
    """Two variables of Slurm; None unless both are set."""
    texts = [os.environ.get(f"SLURM_{name}", "") for name in (first, second)]
    return (int(texts[0]), int(texts[1])) if all(text.isdecimal() for text in texts) else None


def _check_save(config: Config, name: str | None) -> None:
    """UserError if the job's guest cannot be saved under a name: its end is too late for that."""
    if name is None:
        return
    ref = ImageRef.parse(name)
    if not ref.own or ref.digest:
        raise UserError(f"--vhpc-save={name[:100]!r}", "own/NAME[:TAG] is expected")
    if not config.images.user_catalog:
        raise UserError(
            f"--vhpc-save={ref.label} is not possible here", "users have no catalogues of images of their own"
        )


def _request(env: common.HookEnv, job: SlurmJob) -> JobRequest:
    """The user's request; values that the user could have changed are checked again here."""
    given = {option: text for option in OPTIONS if (text := _given(option)) is not None}
    fields: dict[str, Any] = {}
    for option, text in given.items():
        fields |= _values(option, text)
    # both are for a batch script in the guest
    fixed = {*given, BATCH} if SAVE in given or CHECKPOINT in given else {*given}
    return JobRequest(
        job_id=env.job_id,
        restart=env.restart,
        uid=job.uid,
        gid=job.gid,
        user=job.user,
        work_dir=os.environ.get("SLURM_JOB_WORK_DIR") or job.work_dir,
        image=_image(given),
        job_name=job.name,
        partition=job.partition,
        het=job.het,
        account=job.account,
        qos=job.qos,
        unset=tuple(option.field for option in DEFAULTED if option not in fixed),
        from_file=_from_file(given),
        **fields,
    )


def _image(given: Mapping[Option, str]) -> ImageRef:
    """The image that is asked for.

    For a job that continues a checkpoint the plugin names this in its place, since scripts and tasks know
    jobs with guests by their image.
    """
    image = given.get(IMAGE, "")
    if RESUME not in given:
        return ImageRef.parse(image)
    if image != f"{OF_CHECKPOINT}{given[RESUME]}":
        raise UserError("--vhpc-image and --vhpc-resume cannot be given together")
    return CONTINUED


def _from_file(given: Mapping[Option, str]) -> tuple[str, ...]:
    """Names of the options that the file of --vhpc-environment has set, by what the plugin says."""
    names = (common.spank("ENVIRONMENT_SET") or "").split(",")
    return tuple(option.name for option in given if option.name in names) if ENVIRONMENT in given else ()


def _given(option: Option) -> str | None:
    return common.spank(option.variable.removeprefix("VHPC_"))


def _values(option: Option, text: str) -> dict[str, Any]:
    """The fields of a request for the value of an option."""
    try:
        return option.values(text)
    except ValueRefusedError as err:
        shown = text[:40] if text.isascii() and text.isdigit() else repr(text[:300])
        raise UserError(f"--vhpc-{option.name}={shown}", str(err)) from None


def _waiter() -> str:
    """The word by which srun or salloc asks vhpcd about this job; empty if none waits."""
    word = common.spank("WAITER") or ""
    return word if re.fullmatch(r"[0-9a-f]{32}", word) else ""


HOOKS = {"prolog": prolog, "epilog": epilog, "without-guests": without_guests}


def entry(which: str, config: Config | None = None) -> int:
    """Process entry point; without a configuration it is read."""
    os.environ.setdefault("PATH", "/usr/bin:/bin")
    return common.main(f"{which}-slurmctld", HOOKS[which], config)


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1]))
