# SPDX-License-Identifier: Apache-2.0
"""The few values that a hook reads from slurm.conf itself, because slurmctld may not answer.

slurm.conf(5): keys in any case, ``#`` begins a comment, ``Include FILE`` reads another file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vhpc_slurm.slurm.settings import INFINITE

MAX_BYTES = 1 << 20
"""A longer file is not read to its end."""
DEPTH = 4
"""Includes within includes that are followed."""
_KEY = re.compile(r"^\s*(prologtimeout|prologepilogtimeout)\s*=\s*(\d+)", re.IGNORECASE)
_INCLUDE = re.compile(r"^\s*include\s+(\S+)", re.IGNORECASE)


def prolog_timeout_s(path: Path) -> int | None:
    """Seconds after which slurmd ends a Prolog; None: never, or it cannot be read.

    Slurm 25.05 and newer have PrologTimeout; older versions PrologEpilogTimeout.
    """
    found = {match[1].lower(): int(match[2]) for match in _matches(path, DEPTH)}
    seconds = found.get("prologtimeout", found.get("prologepilogtimeout", 0))
    return seconds if 0 < seconds < INFINITE else None


def _matches(path: Path, depth: int) -> Iterator[re.Match[str]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_BYTES)
    except OSError:
        return
    for line in text.splitlines():
        included = _INCLUDE.match(line)
        if included and depth and "%" not in included[1]:
            yield from _matches(path.parent / included[1], depth - 1)
        elif match := _KEY.match(line):
            yield match
