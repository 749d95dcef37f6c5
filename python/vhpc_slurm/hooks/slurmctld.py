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

from msgspec.structs import replace

from vhpc_slurm.config import Config
from vhpc_slurm.config.disks import MAX_DISK_MIB, MIN_DISK_MIB, mount_point_refusal
from vhpc_slurm.config.network import CHOICES as NETWORK_CHOICES
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, UserError, VhpcError
from vhpc_slurm.fabric.numbers import MAX_VFS
from vhpc_slurm.hooks import common
from vhpc_slurm.model import MAX_GUESTS_PER_NODE, BatchPlace, ImageRef, JobRequest
from vhpc_slurm.slurm import commands
from vhpc_slurm.slurm.port import JobRef, SlurmJob

REPORT_S = 5
"""How long a job without guests waits for vhpcd at most."""


def prolog(config: Config) -> int:
    """Open the lease of the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    ref = _ref(env)
    slurm = commands(config)
    client = ControllerClient(config)
    try:
        job = slurm.load(env.job_id)
        common.check_user(env, job.uid)
        _check_save(config, common.spank("SAVE"))
        lease = client.open_generation(_request(env, job), job.allocation, _waiter())
    except UserError as err:
        # The SPANK plugin rejects such a request at submission, so the user has bypassed it:
        # no part of this job may start, and a non-zero exit status would only requeue it.
        common.log.info("cancelled: %s", err.line())
        slurm.set_admin_comment(ref, f"vhpc: {err.line()}")
        slurm.cancel(env.job_id)
        return 0
    except FabricError as err:
        with contextlib.suppress(FabricError):
            slurm.set_admin_comment(ref, f"vhpc: {err.line()}")
        raise
    common.log.info("lease %s %s", lease.generation, lease.state.value)
    if lease.refusal:
        slurm.set_admin_comment(ref, common.comment(lease, lease.refusal))
        return 0
    try:
        slurm.set_admin_comment(ref, common.comment(lease))
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
    batch = common.spank("BATCH") or BatchPlace.GUEST.value
    if batch not in set(BatchPlace):
        raise UserError(f"--vhpc-batch={batch[:40]!r}", "guest or host is expected")
    guests = _within(_number("GUESTS_PER_NODE"), "guests-per-node", 1, MAX_GUESTS_PER_NODE)
    network = common.spank("NETWORK")
    if network is not None and network not in NETWORK_CHOICES:
        raise UserError(
            f"--vhpc-network={network[:40]!r}",
            f"one of these is expected: {' '.join(NETWORK_CHOICES)}",
        )
    disk_mib, disk_mount = _disk(common.spank("DISK"))
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
        vfs=_within(_number("VFS"), "vfs", 0, MAX_VFS),
        guests_per_node=guests or 1,
        network=network,
        het=job.het,
        account=job.account,
        qos=job.qos,
        disk_mib=disk_mib,
        unset=_unset(),
        disk_mount=disk_mount,
    )


def _unset() -> tuple[str, ...]:
    """Fields that the site's rules may set. --vhpc-save is for a batch script in the guest."""
    options = {"network": "NETWORK", "disk_mib": "DISK", "guests_per_node": "GUESTS_PER_NODE"}
    if common.spank("SAVE") is None:
        options["batch"] = "BATCH"
    return tuple(field for field, name in options.items() if common.spank(name) is None)


def _waiter() -> str:
    """The word by which srun or salloc asks vhpcd about this job; empty if none waits."""
    word = common.spank("WAITER") or ""
    return word if re.fullmatch(r"[0-9a-f]{32}", word) else ""


def _disk(text: str | None) -> tuple[int | None, str]:
    """Size and mount point of the guests' disks, as the plugin writes them: MIB[:/MOUNT/POINT]."""
    if text is None:
        return None, ""
    size, colon, mount = text.partition(":")
    refusal = mount_point_refusal(mount) if colon else ""
    if refusal:
        raise UserError(f"--vhpc-disk={text[:300]!r}", refusal)
    return _within(_whole(size, "DISK"), "disk", MIN_DISK_MIB, MAX_DISK_MIB), mount


def _number(name: str) -> int | None:
    text = common.spank(name)
    return None if text is None else _whole(text, name)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        option = name.lower().replace("_", "-")
        raise UserError(f"--vhpc-{option}={text[:40]!r}", "a whole number is expected")
    return int(text)


def _within(number: int | None, option: str, least: int, most: int) -> int | None:
    """The number of an option, if it was given; UserError if it is outside of its bounds."""
    if number is not None and not least <= number <= most:
        raise UserError(f"--vhpc-{option}={number}", f"a whole number from {least} to {most} is expected")
    return number


HOOKS = {"prolog": prolog, "epilog": epilog, "without-guests": without_guests}


def entry(which: str, config: Config | None = None) -> int:
    """Process entry point; without a configuration it is read."""
    os.environ.setdefault("PATH", "/usr/bin:/bin")
    return common.main(f"{which}-slurmctld", HOOKS[which], config)


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1]))
