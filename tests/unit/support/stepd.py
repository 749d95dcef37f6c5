# SPDX-License-Identifier: Apache-2.0
"""A process that looks like a slurmstepd of Slurm 22.05 to 26.05: its program, its owner, its title."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="a slurmstepd is root's: run as root")


@contextmanager
def stepd(job: int, step: str, *, program: str = "slurmstepd") -> Iterator[subprocess.Popen[bytes]]:
    """Run one until the end of the block."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(sleep, Path(folder, program))
        title = f"slurmstepd: [{job}.{step}]"
        process = subprocess.Popen([title, "60"], executable=str(Path(folder, program)))
        try:
            # exec(2) is seen to be over before the title is there
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"slurmstepd"):
                time.sleep(0.005)
            yield process
        finally:
            process.kill()
            process.wait()
