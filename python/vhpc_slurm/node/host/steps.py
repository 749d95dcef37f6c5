# SPDX-License-Identifier: Apache-2.0
"""Slurm's steps on this node, from the process titles of slurmstepd."""

from __future__ import annotations

import re
from pathlib import Path

EXTERN, BATCH = "extern", "batch"
_TITLE = re.compile(rb"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)\]")


def _is_stepd(entry: Path) -> bool:
    """Whether a process runs the program slurmstepd; Debian's name is slurmstepd-wlm."""
    return (entry / "exe").readlink().name.startswith("slurmstepd")


def running(proc: Path = Path("/proc")) -> dict[int, frozenset[str]]:
    """Steps by job: ``extern``, ``batch``, ``interactive`` or a number.

    Every slurmstepd since release 22.05 has the step in its process title.  If
    titles ever change, a job without a title may still have steps: the absence
    of a step is only conclusive if another step of the same job is present.
    """
    found: dict[int, set[str]] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # any user can set such a title, and reading a user's process could block
            if entry.stat().st_uid != 0 or not _is_stepd(entry):
                continue
            title = _TITLE.match((entry / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended
        if title is not None:
            found.setdefault(int(title[1]), set()).add(title[2].decode("ascii"))
    return {job: frozenset(steps) for job, steps in found.items()}
