# SPDX-License-Identifier: Apache-2.0
"""After an Epilog: starts the process that runs the node's next hooks (``preloaded``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vhpc_slurm
from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.hooks import common

FOLDER = Path("/run/vhpc/hooks")
"""Only root may enter it; hookd/CMakeLists.txt names its socket as well."""
SOCKET = FOLDER / "socket"
LOCK = FOLDER / "lock"
"""Held by the process as long as it lives."""
OUTPUT = FOLDER / "output"
"""A file with the error messages of the process."""
MODULE = "vhpc_slurm.hooks.preloaded"
NICENESS = 19
"""While it imports, others use the CPUs first."""


def start(config: Config) -> None:
    """Start the process unless there is one; a failure is only logged, as hooks run without it."""
    seconds = config.host.preloaded_hooks_s
    if not seconds or _in_a_job():
        return
    try:
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = files.open_lock(LOCK)
        try:
            if files.try_lock(lock):
                _spawn(lock, seconds)
        finally:
            os.close(lock)
    except OSError as err:
        common.log.warning("no process waits for the next hooks: %s", err)


def _in_a_job() -> bool:
    """Whether this hook is in a job's control group (``PrologFlags=RunInJob``), which ends with the job."""
    return "/job_" in Path("/proc/self/cgroup").read_text(encoding="utf-8")


def _spawn(lock: int, seconds: int) -> None:
    """Start it with everything that slurmd gives to its hooks; it keeps the lock."""
    # -P and not -I: in a checkout it needs PYTHONPATH
    command = [sys.executable, "-P", "-s", "-m", "vhpc_slurm.hooks.start", MODULE]
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    output = os.open(OUTPUT, flags, 0o600)
    try:
        child = subprocess.Popen(
            [*command, str(lock), str(seconds), str(niceness)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={
                "PATH": "/usr/bin:/bin",
                "LC_ALL": "C.UTF-8",
                "PYTHONPATH": str(Path(vhpc_slurm.__file__).parents[1]),
            },
            pass_fds=(lock,),
            start_new_session=True,
        )
    finally:
        os.close(output)
    os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    child.returncode = 0  # not waited for: prevents a warning of Popen's destructor
