# SPDX-License-Identifier: Apache-2.0
"""How vlab starts the processes of a lab, which outlive it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[3] / "lab"
START = """
import os
from vlablib import hosts
hosts._run_apart("a host", lambda: os.execv("/bin/sh", ["sh", "-c", "exec setsid -f sleep 30"]))
"""


def test_a_lab_keeps_no_lock_of_its_caller(tmp_path: Path) -> None:
    """As `flock FILE lab/vlab up` calls it: the lock is free when the command has ended."""
    mark = f"30.{os.getpid()}"
    script = START.replace("sleep 30", f"sleep {mark}")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={**os.environ, "PYTHONPATH": str(LAB)},
        pass_fds=[lock],
    )
    os.close(lock)
    try:
        again = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(again)
    finally:
        subprocess.run(["pkill", "-f", f"^sleep {mark}$"], check=True)
