# SPDX-License-Identifier: Apache-2.0
"""Epilog on a compute node: when it returns 0, the node holds nothing of the job.

It may run twice, without a Prolog before it, or while an orphaned Prolog still runs.
"""

from __future__ import annotations

import sys

from vhpc_slurm import slurm
from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, NodeError, TeardownError, VhpcError
from vhpc_slurm.hooks import common, preloading, timelimit
from vhpc_slurm.model import ALARM, Generation, Lease
from vhpc_slurm.node import teardown
from vhpc_slurm.node.devices import quarantine
from vhpc_slurm.node.guest import busy, console
from vhpc_slurm.node.host import accounts
from vhpc_slurm.node.store import joblock, journal, outbox, statefile, timeline, usage
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.reconcile import acknowledging, drain_policy
from vhpc_slurm.slurm import comments

LOCK_TIMEOUT_S = 60.0


def run(config: Config) -> int:
    """Clear this node of the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    layout = Layout(config)
    client = ControllerClient(config, patient=False)
    # Slurm counts a requeue before it runs the Epilog of the requeued job, so its
    # restart count does not identify the ending generation.  The journals do,
    # and so does vhpcd, since no new lease is made while an Epilog runs.
    ending = {g for g in journal.generations(layout.journals) if g.job_id == env.job_id}
    lease = None if _is_all_known(layout, env, ending) else _lease(client, env)
    if lease is not None:
        ending.add(lease.generation)
    for generation in ending:
        joblock.write_tombstone(layout, generation)
    unkept: list[outbox.Acknowledgement] = []
    try:
        with joblock.held(layout, env.job_id, timeout_s=LOCK_TIMEOUT_S, end_holder=True):
            _hand_over_console(config, lease, layout, env)
            for generation in sorted(ending):
                _clear(layout, env, generation, unkept)
    finally:
        # also when the node is drained: a key need not wait for a device in quarantine; the job's nodes
        # need not wait for the accounting database
        left = acknowledging.deliver(config, client, layout.outbox, unkept, hold=False)
        if left:
            common.log.warning("%d acknowledgements wait for vhpcd", left)
    joblock.sweep(layout, older_than_s=86400.0)
    timeline.prune(layout.timelines, keep=500)
    usage.prune(layout.usages, keep_newest=500)
    return 0


def _clear(
    layout: Layout, env: common.HookEnv, generation: Generation, unkept: list[outbox.Acknowledgement]
) -> None:
    """Tear one generation down and queue its acknowledgement, or add it to ``unkept``."""

    def queue(*, clean: bool, note: str) -> None:
        if not generation.has_lease:
            return
        line = timeline.read_timeline(layout.timeline(generation))
        used = usage.of_node(layout.usage(generation), generation, env.node)
        ack = outbox.Acknowledgement(generation, env.node, clean, note, line, used)
        if not outbox.put(layout.outbox, ack):
            unkept.append(ack)

    alarm = _alarm(layout, generation)
    try:
        teardown.clear(layout, generation, env.node)
    except quarantine.QuarantinedError as err:
        queue(clean=True, note=err.line())
        if not drain_policy.must_drain(
            layout, slurm.commands(layout.config, slurm.HOOK_TIMEOUT_S), env.node, err.records
        ):
            common.log.warning("%s; enough other devices are left", err.line())
            return
        common.drain(layout.config, env.node, err)
        raise
    except VhpcError as err:
        queue(clean=False, note=err.line())
        common.drain(layout.config, env.node, err)
        raise TeardownError(err.what, err.why, err.hint) from err
    queue(clean=True, note=alarm or timelimit.note(timeline.read_timeline(layout.timeline(generation))))
    common.log.info("clean")


def _alarm(layout: Layout, generation: Generation) -> str:
    """The alarm that its Prolog left for operators; usually empty."""
    state = statefile.read_state(layout.state_file(generation.job_id))
    ours = state.get("generation") == str(generation)
    text = state["alarm"] if ours and "alarm" in state else busy.alarm(layout)
    return ALARM + text if text else ""


def _hand_over_console(config: Config, lease: Lease | None, layout: Layout, env: common.HookEnv) -> None:
    """Give the user the console of the guest if the job asked for it (--vhpc-console)."""
    state = statefile.read_state(layout.state_file(env.job_id))
    if lease is None or lease.request.console is None or state.get("generation") != str(lease.generation):
        return
    consoles = console.of_guests(layout.job(env.job_id))
    if state.get("status") == "failed" or not consoles:
        return  # the Prolog has already copied it
    try:
        account = accounts.account(lease.request.uid)
    except NodeError as err:
        common.log.warning("the console cannot be copied for the user: %s", err.line())
        return
    copies = console.hand_over(consoles, lease.request, env.node, account, config.guests.console_limit_kib)
    failures = [f"{copy.target} on {env.node}: {copy.why_not}" for copy in copies if copy.why_not]
    if failures:
        # the job's own streams are closed by now
        line = comments.of_lease(lease, f"a console could not be written: {'; '.join(failures)}")
        common.log.warning("%s", line)
        common.comment_ended(config, env.job_id, line)


def _is_all_known(layout: Layout, env: common.HookEnv, ending: set[Generation]) -> bool:
    """Whether the journal and the state file have all that vhpcd would be asked for.

    Each request costs two credentials of munge on this node, which a user may keep busy.
    """
    state = statefile.read_state(layout.state_file(env.job_id))
    return state.get("console") == "no" and {str(one) for one in ending} == {state.get("generation")}


def _lease(client: ControllerClient, env: common.HookEnv) -> Lease | None:
    """The job's newest lease; None if there is none or vhpcd does not answer."""
    try:
        return client.look(env.job_id, None, env.node)
    except FabricError as err:
        common.log.info("no lease to acknowledge: %s", err.line())
        return None


def entry() -> int:
    """Process entry point."""
    return common.main("epilog", _run_and_preload)


def _run_and_preload(config: Config) -> int:
    """Run in a Python of its own, and spare the next hooks one."""
    try:
        return run(config)
    finally:
        preloading.start(config)


if __name__ == "__main__":
    sys.exit(entry())
