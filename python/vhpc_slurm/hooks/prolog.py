# SPDX-License-Identifier: Apache-2.0
"""Prolog on a compute node: asks vhpcd for the job's lease; all that follows is in ``bringup``.

These are two modules because the user waits for Python's imports, which ``bringup`` has many of: the lease is
asked for first.  Nothing of the node is changed before ``bringup`` and all that it needs are imported.
"""
# Decision: Prolog asks for its lease before it imports what boots guests

from __future__ import annotations

import contextlib
import os
import sys

from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common, start
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout

NAME = "vhpc_slurm.hooks.prolog"
LOCK_TIMEOUT_S = 30.0


def run(config: Config) -> int:
    """Prepare this node for the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    layout = Layout(config)
    try:
        return _run(config, env, layout)
    except joblock.NoRoomError as err:
        start.load_rest(NAME)
        from vhpc_slurm.hooks import requeueing

        requeueing.requeue_or_tell(config, env, err)
        return 0


def _run(config: Config, env: common.HookEnv, layout: Layout) -> int:
    with joblock.held(layout, env.job_id, timeout_s=LOCK_TIMEOUT_S):
        if _has_journal(layout, env.job_id):
            start.load_rest(NAME)
            from vhpc_slurm.hooks import bringup

            return bringup.run_after_crash(config, layout, env)
        try:
            asked = common.ask(config, env)
        except FabricError as err:
            start.load_rest(NAME)
            from vhpc_slurm.hooks import bringup

            return bringup.run_without_lease(config, layout, env, err)
        start.load_rest(NAME)
        from vhpc_slurm.hooks import bringup

        return bringup.run(config, layout, env, asked)


def _has_journal(layout: Layout, job_id: int) -> bool:
    """Whether an earlier generation or a killed Prolog has left something of this job."""
    with contextlib.suppress(FileNotFoundError):
        return any(name.startswith(f"{job_id}.") for name in os.listdir(layout.journals))  # noqa: PTH208 - names only
    return False


def entry() -> int:
    """Process entry point."""
    return common.main("prolog", run)


if __name__ == "__main__":
    sys.exit(entry())
