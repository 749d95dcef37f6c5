# SPDX-License-Identifier: Apache-2.0
"""As many programs at once in a guest as Slurm starts tasks on a large node."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from guest_processes import WAIT_S

if TYPE_CHECKING:
    from guest_rig import Guest

pytest_plugins = ["guest_rig"]
# more than Slurm starts on a node by default (MaxTasksPerNode in slurm.conf)
TASKS = 600


def test_600_programs_run_at_once_in_a_guest(guest: Guest, tmp_path: Path) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    begun.mkdir()
    os.mkfifo(gate)
    script = f': > {begun}/$1; read line < {gate}; echo "$1"'
    running = [guest.popen("sh", "-c", script, "task", str(number)) for number in range(TASKS)]
    try:
        end = time.monotonic() + 4 * WAIT_S
        while len(os.listdir(begun)) < TASKS:  # noqa: PTH208 - a Path for each of them is slow
            ended = [one for one in running if one.poll() is not None]
            assert not ended, ended[0].communicate()[1]
            assert time.monotonic() < end, f"{len(os.listdir(begun))} of {TASKS} have begun"  # noqa: PTH208 - the same
            time.sleep(0.2)
        gate.open("w").close()  # all of them have it open, or will not block: it stays open for a moment
        said = [one.communicate(timeout=4 * WAIT_S)[0] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert said == [b"%d\n" % number for number in range(TASKS)]
