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
import time

from vhpc_slurm.config import Config
from vhpc_slurm.controller.client import ControllerClient
from vhpc_slurm.errors import FabricError
from vhpc_slurm.hooks import common, start
from vhpc_slurm.model import Lease
from vhpc_slurm.node.store import joblock
from vhpc_slurm.node.store.layout import Layout

LOCK_TIMEOUT_S = 30.0


def run(config: Config) -> int:
    """Prepare this node for the job that Slurm names in the environment."""
    env = common.HookEnv.read()
    layout = Layout(config)
    try:
        return _run(config, env, layout)
    except joblock.NoRoomError as err:
        start.load_rest("vhpc_slurm.hooks.prolog")
        from vhpc_slurm.hooks import requeueing

        requeueing.requeue_or_tell(config, env, err)
        return 0


def _run(config: Config, env: common.HookEnv, layout: Layout) -> int:
    with joblock.held(layout, env.job_id, timeout_s=LOCK_TIMEOUT_S):
        asked = time.clock_gettime(time.CLOCK_BOOTTIME)
        lease: Lease | FabricError | None = None
        if not _has_journal(layout, env.job_id):
            try:
                lease = ControllerClient(config).lease(
                    env.job_id, env.restart, env.node, config.controller.lease_wait_s
                )
            except FabricError as err:
                lease = err
        answered = time.clock_gettime(time.CLOCK_BOOTTIME)
        start.load_rest("vhpc_slurm.hooks.prolog")
        from vhpc_slurm.hooks import bringup

        return bringup.run(config, layout, env, lease, (asked, answered))


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
