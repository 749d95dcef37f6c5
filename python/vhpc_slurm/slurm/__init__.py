# SPDX-License-Identifier: Apache-2.0
"""Everything that vhpc asks Slurm or tells it, behind one port: ``port.Slurm``.

Decides how to ask: which command, which options, how to name a job so that no
other job is touched, how to parse the output when it contains text of users.
May not decide what to do with the answer.  vhpcd and PrologSlurmctld use
``connect``, which honours ``controller.slurm_adapter``; hooks on nodes,
reconciliation and ``vhpc doctor`` use ``commands``.  No other package runs a
command of Slurm or reads ``controller.slurm_bin`` and ``controller.slurm_conf``.
``user_jobs`` is not part of the port: it submits jobs for the user who runs vhpc;
nor is ``node_runs``: it runs commands of root on nodes.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vhpc_slurm.config import Config
    from vhpc_slurm.slurm.noderuns import NodeRuns
    from vhpc_slurm.slurm.port import Slurm
    from vhpc_slurm.slurm.userjobs import UserJobs

HOOK_TIMEOUT_S = 10.0
"""Deadline of a command in a hook on a node: longer than vhpcd's, because a hook asks only once."""
USERS_PATH = "/usr/local/bin:/usr/bin:/bin"


def connect(config: Config) -> Slurm:
    """The adapter that ``controller.slurm_adapter`` names.

    Raises:
        SlurmError: it names pyslurm, and pyslurm cannot be imported.
    """
    if config.controller.slurm_adapter == "pyslurm":
        from vhpc_slurm.slurm.pyslurm_adapter import PySlurm

        return PySlurm(config.controller.slurm_bin, slurm_conf=config.controller.slurm_conf)
    return commands(config)


def commands(config: Config, timeout_s: float = 5.0) -> Slurm:
    """The adapter over Slurm's own commands, whatever ``controller.slurm_adapter`` names.

    pyslurm needs not be installed on nodes, and does not tell batch jobs from others.
    """
    from vhpc_slurm.slurm.scontrol import Scontrol

    controller = config.controller
    return Scontrol(controller.slurm_bin, slurm_conf=controller.slurm_conf, timeout_s=timeout_s)


def user_jobs(config: Config) -> UserJobs:
    """Jobs of the user who runs this program."""
    from vhpc_slurm.slurm.userjobs import UserJobs

    return UserJobs(config.controller.slurm_bin, slurm_conf=config.controller.slurm_conf)


def node_runs(config: Config) -> NodeRuns:
    """Commands that root runs on nodes, each in a job of its own."""
    from vhpc_slurm.slurm.noderuns import NodeRuns

    return NodeRuns(config.controller.slurm_bin, slurm_conf=config.controller.slurm_conf)


def sbcast_of_users(config: Config) -> str | None:
    """Path of the sbcast that users of this host run; None on a host without one."""
    return shutil.which("sbcast", path=os.pathsep.join((USERS_PATH, config.controller.slurm_bin)))
