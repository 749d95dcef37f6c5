# SPDX-License-Identifier: Apache-2.0
"""All verbs of the `vhpc` command, with their arguments; code in a Python that has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from vhpc_slurm.cli.main import COMMAND
from vhpc_slurm.cli.verbs import loaded


def commands(command: Any = COMMAND, name: str = "") -> dict[str, Any]:
    """Commands by the words after ``vhpc``; a group is one too, and the empty name is `vhpc` itself."""
    found = {name: command}
    for word, verb in getattr(command, "commands", {}).items():
        found |= commands(loaded(verb), f"{name} {word}".strip())
    return found


def in_new_python(code: str) -> str:
    """Run code in a new process that can import the package and the modules for tests; its output."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{here.parents[2]}/python:{here}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
