# SPDX-License-Identifier: Apache-2.0
"""Where the command runs and as whom: what decides which questions it can answer."""

from __future__ import annotations

import os
import pwd

from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import NODE_NAME


def node_name(given: str | None = None) -> str:
    """Slurm's name of this host: as given, else as slurmd says, else the host name up to its first dot."""
    name = given or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    if not NODE_NAME.match(name):
        raise UserError(f"{name[:80]!r} is no node name")
    return name


def is_root() -> bool:
    """Whether this process has root's rights."""
    return os.geteuid() == 0


def need_root(command: str) -> None:
    """UserError unless root runs the command."""
    if not is_root():
        raise UserError(f"vhpc {command} needs root", f"this is {user_name()}", "sudo it")


def need_listener(command: str, config: Config) -> None:
    """UserError unless vhpcd would listen to this user: root or SlurmUser."""
    if not is_root() and user_name() != config.controller.slurm_user:
        raise UserError(
            f"vhpc {command} needs root or the user {config.controller.slurm_user}",
            f"vhpcd does not listen to {user_name()}",
            "sudo it",
        )


def user_name(uid: int | None = None) -> str:
    """Name of a user, default: who runs this; the number where it has none."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
