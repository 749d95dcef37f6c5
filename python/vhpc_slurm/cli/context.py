# SPDX-License-Identifier: Apache-2.0
"""Host and user of the command: they decide which commands are possible."""

from __future__ import annotations

import os
import pwd

from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import NODE_NAME


def node_name(given: str | None = None) -> str:
    """Slurm's name of this host: ``given``, else SLURMD_NODENAME, else the host name up to its first dot."""
    name = given or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
    if not NODE_NAME.match(name):
        raise UserError(f"{name[:80]!r} is not a valid node name")
    return name


def is_root() -> bool:
    """Whether this process has root's rights."""
    return os.geteuid() == 0


def need_root(command: str) -> None:
    """UserError unless root runs the command."""
    if not is_root():
        raise UserError(f"vhpc {command} needs root", f"you are {user_name()}", f"run: sudo vhpc {command}")


def need_listener(command: str, config: Config) -> None:
    """UserError unless vhpcd accepts requests of this user: root or SlurmUser."""
    if not is_root() and user_name() != config.controller.slurm_user:
        raise UserError(
            f"vhpc {command} needs root or the user {config.controller.slurm_user}",
            f"vhpcd rejects requests of {user_name()}",
            f"run: sudo vhpc {command}",
        )


def user_name(uid: int | None = None) -> str:
    """Name of a user, default the one who runs the command; the number if the user has no name."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
