# SPDX-License-Identifier: Apache-2.0
"""How vhpcd asks Slurm for jobs: by Slurm's commands or by pyslurm, and why."""

from __future__ import annotations

from collections.abc import Iterator

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError
from vhpc_slurm.slurm import choice

NAME = "slurm.adapter"


def check(config: Config) -> Iterator[CheckResult]:
    """Which adapter ``controller.slurm_adapter`` means on this host, which is vhpcd's."""
    chosen = config.controller.slurm_adapter
    if chosen not in ("pyslurm", "auto"):
        yield ok(NAME, f"vhpcd asks by Slurm's commands (slurm_adapter = {chosen})")
        return
    if not choice.installed() and chosen == "auto":
        yield ok(NAME, "vhpcd asks by Slurm's commands: pyslurm is not installed for vhpc's Python")
        return
    try:
        usable, why = choice.trouble(config)
    except FabricError as err:
        yield warn(NAME, f"pyslurm was not checked: {err.line()}", "see: scontrol ping")
        return
    if usable:
        yield ok(NAME, f"vhpcd asks by {usable} (slurm_adapter = {chosen})")
    elif chosen == "auto":
        hint = 'install the pyslurm of Slurm\'s release, or slurm_adapter = "scontrol" under [controller]'
        yield warn(NAME, f"vhpcd asks by Slurm's commands: {why}", hint)
    else:
        yield error(
            NAME,
            f"vhpcd cannot ask Slurm for jobs: {why}",
            'slurm_adapter = "auto" or "scontrol" under [controller], or install Slurm\'s pyslurm',
        )
