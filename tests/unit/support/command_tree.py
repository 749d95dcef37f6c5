# SPDX-License-Identifier: Apache-2.0
"""All verbs of the `vhpc` command, with their arguments."""

from __future__ import annotations

from typing import Any

from vhpc_slurm.cli.main import COMMAND
from vhpc_slurm.cli.verbs import loaded


def commands(command: Any = COMMAND, name: str = "") -> dict[str, Any]:
    """Commands by the words after ``vhpc``; a group is one too, and the empty name is `vhpc` itself."""
    found = {name: command}
    for word, verb in getattr(command, "commands", {}).items():
        found |= commands(loaded(verb), f"{name} {word}".strip())
    return found
