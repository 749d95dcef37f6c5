"""Epilog on a compute node: nothing of the job may be left when it returns 0.

It may run twice, without any Prolog before it, and beside an orphaned one.
"""

from __future__ import annotations

import sys

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError, TeardownError, UserError, VhpcError
from vhpc_slurm.hooks import common
from vhpc_slurm.model import Generation, Lease
from vhpc_slurm.node import accounts, console, joblock, journal, outbox, statefile, teardown, timeline
from vhpc_slurm.node.layout import Layout

LOCK_TIMEOUT_S = 60.0


def run(config: Config) -> int:
    """Clear this node of the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    layout = Layout(config)
    joblock.bury(layout, env.job_id, env.restart)
    client = ControllerClient(config)
    with joblock.held(layout, env.job_id, timeout_s=LOCK_TIMEOUT_S, end_holder=True):
        mine = [g for g in journal.generations(layout.journals) if _concerns(env, g)]
        for generation in mine:
            _hand_over_console(config, client, layout, env, generation)
            _clear(layout, env, generation)
    if not mine:
        _acknowledge_nothing(client, layout, env)
    left = outbox.flush(layout.outbox, client.acknowledge)
    if left:
        common.log.warning("%d acknowledgements wait for vhpcd", left)
    joblock.sweep(layout, older_than_s=86400.0)
    timeline.prune(layout.timelines, keep=500)
    return 0


def _concerns(env: common.HookEnv, generation: Generation) -> bool:
    """Whether this Epilog ends that generation: a late one must not end a newer incarnation."""
    return generation.job_id == env.job_id and (generation.restart <= env.restart or not env.restart_known)


def _clear(layout: Layout, env: common.HookEnv, generation: Generation) -> None:
    """Tear one generation down and queue what became of it."""
    try:
        teardown.clear(layout, generation, env.node)
    except VhpcError as err:
        _queue(layout, env, generation, clean=False, note=err.line())
        common.drain(env.node, err)
        raise TeardownError(err.what, err.why, err.cure) from err
    _queue(layout, env, generation, clean=True)
    common.log.info("clean")


def _queue(
    layout: Layout, env: common.HookEnv, generation: Generation, *, clean: bool, note: str = ""
) -> None:
    line = timeline.read(layout.timeline(generation))
    outbox.put(layout.outbox, outbox.Acknowledgement(generation, env.node, clean, note, line))


def _acknowledge_nothing(client: ControllerClient, layout: Layout, env: common.HookEnv) -> None:
    """No Prolog ran here: this node still has to say that it holds nothing."""
    lease = _lease(client, env)
    if lease is not None and lease.generation.restart <= env.restart:
        _queue(layout, env, lease.generation, clean=True, note="nothing was started")


def _hand_over_console(
    config: Config, client: ControllerClient, layout: Layout, env: common.HookEnv, generation: Generation
) -> None:
    """Give the user his guest's console when he asked for it (--vhpc-console)."""
    path = layout.guest(env.job_id, 0) / "console.log"
    if not path.exists() or common.spank("CONSOLE") is None:
        return
    if statefile.read(layout.state_file(env.job_id)).get("status") == "failed":
        return  # handed over when it failed
    lease = _lease(client, env)
    if lease is None or lease.generation != generation:
        return
    try:
        account = accounts.account(lease.request.uid)
    except VhpcError:
        return
    target = console.user_path(lease.request, env.node)
    if not console.hand_over(path, target, account, config.guests.console_limit_kib):
        common.log.warning("the console could not be written to %s", target)


def _lease(client: ControllerClient, env: common.HookEnv) -> Lease | None:
    try:
        return client.lease(env.job_id, env.restart, env.node, 0)
    except (FabricError, UserError):
        return None


def entry() -> int:
    """Process entry point."""
    return common.main("epilog", run)


if __name__ == "__main__":
    sys.exit(entry())
