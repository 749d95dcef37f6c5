# SPDX-License-Identifier: Apache-2.0
"""Requeues a job that a node cannot prepare although the node is not at fault, or says why not."""

from __future__ import annotations

import time

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.controller.exchange import AnswerError
from vhpc_slurm.errors import FabricError, VhpcError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation, Lease, LeaseState
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.store import statefile, timeline
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.slurm.port import NoSuchJobError, NotRequeueableError

UNLIMITED_S = 300.0
"""How long a Prolog that has no limit tries, counted from its start."""
REST_S = 40.0
"""Time that a Prolog reserves for two commands of Slurm, which tell the user, and to release the job."""
PAUSE_S, MOST_PAUSE_S = 1.0, 5.0
MAY_NOT = "the job may not be requeued: submit it again"


def requeue_or_tell(config: Config, env: common.HookEnv, error: FabricError) -> None:
    """Requeue a job without a lease, or tell its tasks and AdminComment why it was not requeued."""
    if why := requeue(config, env, error):
        _tell(config, env, error, why)


def lease_instead(config: Config, env: common.HookEnv, error: FabricError) -> Lease | None:
    """Requeue a job whose lease could not be had, or get its lease after all: a job without guests waits too.

    Returns None if the job was requeued, or if its user was told why not.
    """
    why = requeue(config, env, error)
    wait_s = min(float(config.controller.lease_wait_s), left_s(config))
    if why == MAY_NOT and wait_s > 0 and not isinstance(error, AnswerError):
        # Slurm has answered, so munged of this node does as well.
        try:
            return ControllerClient(config).lease(env.job_id, env.restart, env.node, wait_s)
        except FabricError as err:
            error = err
    if why:
        _tell(config, env, error, why)
    return None


def _tell(config: Config, env: common.HookEnv, error: FabricError, why: str) -> None:
    line = f"{error.line()}; {why}"
    _tell_tasks(config, env, line)
    try:
        slurm.commands(config, slurm.HOOK_TIMEOUT_S).set_admin_comment(env.job_id, f"vhpc: {line}")
    except FabricError as err:
        common.log.warning("AdminComment of job %d is not set: %s", env.job_id, err.line())


def requeue(config: Config, env: common.HookEnv, error: FabricError) -> str:
    """Requeue a job that cannot be prepared although the node is not at fault.

    The job may have ended already (this Prolog was late).  Otherwise vhpcd
    stopped after the controller's hook, or another job still holds resources of
    this one.  While Slurm does not answer this is tried until the Prolog has to end.

    Returns:
        Why the job was not requeued, for its user; empty: it was, or it has ended.
    """
    if _has_ended(config, env):
        common.log.info("nothing to prepare: %s", error.line())
        return ""
    common.log.warning("%s; requeueing", error.line())
    port = slurm.commands(config, slurm.HOOK_TIMEOUT_S)
    began, until, pause_s = time.monotonic(), time.monotonic() + left_s(config), PAUSE_S
    while True:
        try:
            port.requeue(env.job_id)
        except NoSuchJobError as err:
            common.log.info("nothing to requeue: %s", err.line())
        except NotRequeueableError as err:
            common.log.warning("not requeued: %s", err.line())
            return MAY_NOT
        except FabricError as err:
            common.log.warning("not requeued: %s", err.line())
            if time.monotonic() + pause_s + slurm.HOOK_TIMEOUT_S >= until:
                tried_s = time.monotonic() - began
                return (
                    f"{env.node} tried for {tried_s:.0f} s to requeue the job: {err.line()}; submit it again"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
            continue
        return ""


def left_s(config: Config) -> float:
    """For how many seconds this Prolog may try; negative when it has to end."""
    limit_s = slurm.prolog_timeout_s(config) or UNLIMITED_S
    return limit_s - REST_S - (timeline.now() - timeline.process_began())


def _has_ended(config: Config, env: common.HookEnv) -> bool:
    try:
        known = ControllerClient(config).look(env.job_id, None, env.node)
    except FabricError:
        return False
    return known.state in (LeaseState.ENDING, LeaseState.RELEASED)


def _tell_tasks(config: Config, env: common.HookEnv, line: str) -> None:
    """Have the plugin print a line in the place of the job's tasks.

    Without a state file it could only say that this Prolog did not run. The file belongs to a
    generation without a lease, which the Epilog releases like any other.
    """
    if env.uid is None:
        return
    layout, generation = Layout(config), Generation.without_lease(env.job_id, env.restart)
    fields = {"status": "failed", "kind": FabricError.kind, "message": line}
    try:
        journal = Journal(layout.journals, generation)
        try:
            RunFolder().take(layout, journal)
            header = statefile.header(generation, common.spank("IMAGE") or "unknown")
            statefile.write_state(layout.state_file(env.job_id), header | fields, env.uid)
        finally:
            journal.close()
    except (VhpcError, OSError) as err:
        common.log.warning("the job's tasks are not told why they cannot run: %s", err)
