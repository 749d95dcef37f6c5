# SPDX-License-Identifier: Apache-2.0
"""Everything that vhpc asks Slurm or tells it, behind one port: ``port.Slurm``.

Decides how to ask: which command, which options, how to name a job so that no
other job is touched, how to parse the output when it contains text of users.
May not decide what to do with the answer.  vhpcd uses ``connect``, which honours
``controller.slurm_adapter``; hooks, reconciliation and ``vhpc doctor`` use
``commands``: they ask once or twice, and to start pyslurm takes longer.  No other package runs a
command of Slurm or reads ``controller.slurm_bin`` and ``controller.slurm_conf``.
``user_jobs`` (jobs for the user who runs vhpc) and ``node_runs`` (commands of
root on nodes) are not part of the port.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm.slurm import conffile

if TYPE_CHECKING:
    from vhpc_slurm.config import Config
    from vhpc_slurm.slurm.noderuns import NodeRuns
    from vhpc_slurm.slurm.port import Slurm
    from vhpc_slurm.slurm.sacct import Accounting
    from vhpc_slurm.slurm.userjobs import UserJobs

HOOK_TIMEOUT_S = 10.0
"""Deadline of a command in a hook on a node: longer than vhpcd's, because a hook asks only once."""
OFF_S = 4.0
"""So much longer a command may take for each backup: it connects up to twice to a host that is off, and gives
each up after TCPTimeout of slurm.conf (2 s by default)."""
USERS_PATH = "/usr/local/bin:/usr/bin:/bin"
USERS_SBCAST = Path("/usr/local/bin/sbcast")
"""vhpc's sbcast, in a folder that PATH has before Slurm's."""


def connect(config: Config) -> Slurm:
    """The adapter that ``controller.slurm_adapter`` names; with pyslurm its versions are checked first.

    Raises:
        SlurmError: it names pyslurm, which is not installed or not of Slurm's release.
    """
    chosen = config.controller.slurm_adapter
    if chosen == "scontrol":
        return commands(config)
    from vhpc_slurm.slurm.choice import connected

    return connected(config, fall_back=chosen == "auto")


def commands(config: Config, timeout_s: float = 5.0) -> Slurm:
    """The adapter over Slurm's own commands, whatever ``controller.slurm_adapter`` names.

    pyslurm needs not be installed on nodes.  With several controllers each command has ``OFF_S`` more.
    """
    from vhpc_slurm.slurm.scontrol import Scontrol

    controller = config.controller
    limit_s = timeout_s + OFF_S * len(controller.backup_hosts)
    return Scontrol(controller.slurm_bin, slurm_conf=controller.slurm_conf, timeout_s=limit_s)


def prolog_timeout_s(config: Config) -> int | None:
    """Seconds after which slurmd ends a Prolog on this host; None: never, or slurm.conf cannot be read.

    slurmd gives its hooks the path of slurm.conf, which on hosts without one is a copy.
    """
    path = os.environ.get("SLURM_CONF") or config.controller.slurm_conf or "/etc/slurm/slurm.conf"
    return conffile.prolog_timeout_s(Path(path))


def accounting(config: Config, timeout_s: float = 10.0) -> Accounting:
    """Records of Slurm's accounting database."""
    from vhpc_slurm.slurm.sacct import Accounting

    controller = config.controller
    return Accounting(controller.slurm_bin, slurm_conf=controller.slurm_conf, timeout_s=timeout_s)


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


def folder_of_commands(config: Config) -> str:
    """The folder of Slurm's commands, an absolute path."""
    return config.controller.slurm_bin


def named_conf(config: Config) -> str:
    """The slurm.conf that vhpc.toml names, empty if it leaves that to Slurm."""
    return config.controller.slurm_conf


def conf_of_host(config: Config, folder: Path) -> Path:
    """slurm.conf as commands of this host read it; ``folder`` is the default of a Slurm in /usr.

    A Slurm that the site built has another default: then the path is that of
    slurmctld, which answers with its own.
    """
    from vhpc_slurm.slurm.port import SlurmError

    if named := named_conf(config):
        return Path(named)
    usual = folder / "slurm.conf"
    if usual.is_file():
        return usual
    with contextlib.suppress(SlurmError):
        return Path(commands(config).settings().first("SLURM_CONF") or usual)
    return usual
