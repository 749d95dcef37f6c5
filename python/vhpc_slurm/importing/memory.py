# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may fill with files.

Thousands of small files are written and removed in memory in a second. On a disk that other
programs use too, each of them waits for the journal of the file system: a minute and more.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

SHARE = 4
"""The part of what is free that may be filled: one of so many."""
MOST = 2 << 30


def room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may be filled: a part of the host's free memory, and of that of this process's cgroups.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroup v2 is mounted; limits of v1 are not read.

    Returns:
        0 if it cannot be found out.
    """
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
        for folder in _folders(proc, cgroups):
            with contextlib.suppress(FileNotFoundError):  # the root, or not v2
                most = (folder / "memory.max").read_text().strip()
                used = int((folder / "memory.current").read_text())
                free = min(free, int(most) - used) if most != "max" else free
    except (OSError, ValueError, KeyError, IndexError):
        return 0
    return max(0, min(free // SHARE, MOST))


def _folders(proc: Path, cgroups: Path) -> list[Path]:
    """The folder of this process's cgroup v2, and those above it."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            own = Path(line.removeprefix("0::/"))
            return [cgroups / part for part in (own, *own.parents)] if ".." not in own.parts else []
    return []
