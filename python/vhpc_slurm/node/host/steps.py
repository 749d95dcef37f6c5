# SPDX-License-Identifier: Apache-2.0
"""Steps of Slurm that run on this node, as its slurmstepds show themselves."""

from __future__ import annotations

import re
from pathlib import Path

EXTERN, BATCH = "extern", "batch"
_TITLE = re.compile(rb"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)\]")


def _is_stepd(entry: Path) -> bool:
    """Whether a process runs slurmstepd's program; Debian calls it slurmstepd-wlm."""
    return (entry / "exe").readlink().name.startswith("slurmstepd")


def running(proc: Path = Path("/proc")) -> dict[int, frozenset[str]]:
    """Steps by job: ``extern``, ``batch``, ``interactive`` or a number.

    Every slurmstepd of every release from 22.05 has the step in its process
    title.  A job that is in no title may have steps all the same, if titles
    ever change: only beside another step of the same job does an absent one
    say anything.
    """
    found: dict[int, set[str]] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # every user may choose such a title; and reading a user's process could block
            if entry.stat().st_uid != 0 or not _is_stepd(entry):
                continue
            title = _TITLE.match((entry / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended
        if title is not None:
            found.setdefault(int(title[1]), set()).add(title[2].decode("ascii"))
    return {job: frozenset(steps) for job, steps in found.items()}
