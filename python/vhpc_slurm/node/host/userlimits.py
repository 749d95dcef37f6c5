# SPDX-License-Identifier: Apache-2.0
"""Limits of a user that daemons with the user's rights run into: which one, from their words and by a trial.

The kernel counts some resources of all processes of a uid, and a user may lower the limits of each own
process (prlimit(2)).  A daemon that ends for that is not the node's fault.
"""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path

from vhpc_slurm.node.host import process

WATCHES = Path("/proc/sys/fs/epoll/max_user_watches")
TRIAL_S = 10.0
_TRIAL = """
import select, sys
try:
    select.epoll().register(0)
except OSError as err:
    sys.exit(err.errno)
"""
_OPEN_FILES = re.compile(r"Too many open files(?! in system)|file descriptors too small")
_PROCESSES = re.compile(r"Resource temporarily unavailable")
_NO_SPACE = re.compile(r"No space left on device")


def reached(said: str, who: process.Credentials) -> str:
    """The limit of a user that a daemon has reached; empty if none is known.

    Args:
        said: what the daemon wrote before it ended.
        who: the daemon's rights.
    """
    if _NO_SPACE.search(said) or not _can_watch(who):
        return f"your processes use all epoll watches of a user (fs.epoll.max_user_watches{_most()})"
    if _OPEN_FILES.search(said):
        return "its limit of open files was lowered (RLIMIT_NOFILE)"
    if _PROCESSES.search(said):
        return "no more processes or threads are permitted to you (RLIMIT_NPROC)"
    return ""


def _can_watch(who: process.Credentials) -> bool:
    """Whether this user can watch one more descriptor; ENOSPC of epoll_ctl(2) says that it cannot."""
    command = [*process.drop_to(who), sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        done = process.run_briefly(command, b"", TRIAL_S)
    except OSError:
        return True
    return done is None or done.returncode != errno.ENOSPC


def _most() -> str:
    try:
        return f" = {int(WATCHES.read_text())}"
    except (OSError, ValueError):
        return ""
