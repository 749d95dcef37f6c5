# SPDX-License-Identifier: Apache-2.0
"""What the sruns of the tests have in common: a step with a task in each guest, started by vhpc-run.

They are run with the folders of the job and of the programs, and the words of a command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER, BIN = Path(sys.argv[1]), Path(sys.argv[2])


class SrunStep:
    """The next step of the job; ``sockets`` are those of the guests' shims, one for each task."""

    def __init__(self, sockets: list[str]) -> None:
        with (FOLDER / "sruns").open("a") as sruns:
            print(ascii(sys.argv[3:]), file=sruns)
        self.number = len((FOLDER / "sruns").read_text().splitlines())
        self.size, self._sockets = len(sockets), sockets
        self._tasks: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, mpi: str, variables: dict[str, str], *ends: int) -> None:
        """Start a task, with variables of its PMI server and descriptors that it inherits."""
        words = sys.argv[3:]
        while words[0].startswith("-"):
            del words[0]
        env = {
            "SLURM_STEP_ID": str(self.number),
            "SLURM_PROCID": str(rank),
            "SLURM_MPI_TYPE": mpi,
            "SLURM_STEP_NUM_TASKS": str(self.size),
            "SLURM_STEP_NUM_NODES": "1",
            "VHPC_RUN_SOCKET": self._sockets[rank],
        }
        self._tasks.append(
            subprocess.Popen(
                [BIN / "vhpc-run", "--", *words],
                env=os.environ | env | variables,
                stdin=subprocess.DEVNULL,
                stdout=1 if rank == 0 else 2,
                pass_fds=ends,
            )
        )

    def terminate(self) -> None:
        """Send SIGTERM to all tasks."""
        for task in self._tasks:
            task.terminate()

    def run(self) -> None:
        """End with the highest code of all tasks; SIGTERM goes to each of them."""
        signal.signal(signal.SIGTERM, lambda *_: self.terminate())
        sys.exit(max(task.wait() for task in self._tasks))


def sockets() -> list[str]:
    """Of the guests' shims."""
    return (FOLDER / "sockets").read_text().split()
