# SPDX-License-Identifier: Apache-2.0
"""Checks of vhpc-hookd, which saves slurmctld's host most of the CPU time of its hooks."""

from __future__ import annotations

import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.hooks import serving

SOCKET = Path("/run/vhpc-hookd/socket")
_NAME = "hooks.hookd"


def check(config: Config, *, listener: bool) -> Iterator[CheckResult]:
    """Whether vhpc-hookd answers the hooks, which work without it; only ``listener`` can know."""
    if listener:
        yield look(config, SOCKET)


def look(config: Config, path: Path) -> CheckResult:
    """Check the process that answers on a socket."""
    user = config.controller.slurm_user
    costs = "PrologSlurmctld and EpilogSlurmctld start Python for each job"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(2)
            link.connect(str(path))
            _, uid = serving.peer(link)
        expected = pwd.getpwnam(user).pw_uid
    except OSError as err:
        why = err.strerror or str(err)
        return warn(
            _NAME, f"vhpc-hookd does not answer ({why}): {costs}", "systemctl enable --now vhpc-hookd"
        )
    except KeyError:
        return warn(_NAME, f"there is no user {user}", "controller.slurm_user is SlurmUser of slurm.conf")
    if uid != expected:
        return warn(
            _NAME,
            f"vhpc-hookd runs as uid {uid}, not as SlurmUser {user}: {costs}",
            f"systemctl edit vhpc-hookd: User={user}",
        )
    return ok(_NAME, f"vhpc-hookd runs as {user}")
