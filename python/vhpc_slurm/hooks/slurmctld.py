# SPDX-License-Identifier: Apache-2.0
"""Both hooks of the controller: open a lease before the nodes start, mark it ending afterwards.

PrologSlurmctld may run again, and may be killed at any point; opening a lease
twice yields the same lease.  EpilogSlurmctld runs at the same time as the
nodes' Epilogs, so it frees nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.fabric.numbers import MAX_VFS
from vhpc_slurm.hooks import common
from vhpc_slurm.model import MAX_GUESTS_PER_NODE, BatchPlace, ImageRef, JobRequest
from vhpc_slurm.slurm import connect
from vhpc_slurm.slurm.port import SlurmJob


def prolog(config: Config) -> int:
    """Open the lease of the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    slurm = connect(config)
    client = ControllerClient(config)
    try:
        job = slurm.load(env.job_id)
        common.check_user(env, job.uid)
        lease = client.open_generation(_request(env, job), job.allocation)
    except UserError as err:
        # The SPANK plugin rejects such a request at submission, so the user has bypassed it:
        # no part of this job may start, and a non-zero exit status would only requeue it.
        common.log.info("cancelled: %s", err.line())
        slurm.set_admin_comment(env.job_id, f"vhpc: {err.line()}")
        slurm.cancel(env.job_id)
        return 0
    except FabricError as err:
        with contextlib.suppress(FabricError):
            slurm.set_admin_comment(env.job_id, f"vhpc: {err.line()}")
        raise
    common.log.info("lease %s %s", lease.generation, lease.state.value)
    if lease.refusal:
        slurm.set_admin_comment(env.job_id, f"vhpc: {lease.refusal}")
    return 0


def epilog(config: Config) -> int:
    """Mark the job's lease as ending."""
    env = common.HookEnv.read()
    ControllerClient(config).ending(env.job_id, env.restart)
    return 0


def _request(env: common.HookEnv, job: SlurmJob) -> JobRequest:
    """The user's request; values that the user could have changed are checked again here."""
    batch = common.spank("BATCH") or BatchPlace.GUEST.value
    if batch not in set(BatchPlace):
        raise UserError(f"--vhpc-batch={batch[:40]!r}", "guest or host is expected")
    vfs = _number("VFS")
    if vfs is not None and vfs > MAX_VFS:
        raise UserError(f"--vhpc-vfs={vfs}", f"a whole number from 0 to {MAX_VFS} is expected")
    guests = _number("GUESTS_PER_NODE")
    if guests is not None and not 1 <= guests <= MAX_GUESTS_PER_NODE:
        raise UserError(
            f"--vhpc-guests-per-node={guests}", f"a whole number from 1 to {MAX_GUESTS_PER_NODE} is expected"
        )
    return JobRequest(
        job_id=env.job_id,
        restart=env.restart,
        uid=job.uid,
        gid=job.gid,
        user=job.user,
        work_dir=os.environ.get("SLURM_JOB_WORK_DIR") or job.work_dir,
        image=ImageRef.parse(common.spank("IMAGE") or ""),
        mem_reserve_mib=_number("MEM_RESERVE"),
        batch=BatchPlace(batch),
        timeout_s=_number("TIMEOUT"),
        console=common.spank("CONSOLE"),
        job_name=job.name,
        partition=job.partition,
        vfs=vfs,
        guests_per_node=guests or 1,
    )


def _number(name: str) -> int | None:
    text = common.spank(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        option = name.lower().replace("_", "-")
        raise UserError(f"--vhpc-{option}={text[:40]!r}", "a whole number is expected")
    return int(text)


def entry(which: str) -> int:
    """Process entry point."""
    os.environ.setdefault("PATH", "/usr/bin:/bin")
    return common.main(f"{which}-slurmctld", prolog if which == "prolog" else epilog)


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1]))
