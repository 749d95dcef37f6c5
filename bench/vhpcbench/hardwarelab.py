# SPDX-License-Identifier: Apache-2.0
"""The hardware lab's machine for benchmarks: emulated, so that only ratios in it mean something."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from vhpcbench.common import CHECKOUT, BenchError

HWLAB = CHECKOUT / "lab" / "hwlab"
NODE = "hw"
UP_S, COMMAND_S = 1800, 600


class HardwareLab:
    """The running machine."""

    def run(self, *argv: str, user: str = "root", stdin: str = "", timeout_s: float = COMMAND_S) -> str:
        """Stdout of a command in the machine.

        Raises:
            BenchError: the command failed.
        """
        command = [str(HWLAB), "exec", "-u", user, "-t", f"{timeout_s:g}", "--", *argv]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"{' '.join(argv)[:120]}: status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def quiet(self) -> None:
        """Wait until no job is left, including completing jobs."""
        script = 'for i in $(seq 300); do [ -n "$(squeue -h)" ] || exit 0; sleep 1; done; squeue >&2; exit 1'
        self.run("sh", "-c", script)


@contextlib.contextmanager
def hardware_lab() -> Iterator[HardwareLab]:
    """The machine; one that already runs stays up.

    Raises:
        BenchError: it does not start.
    """
    runs = _hwlab("status") == 0
    try:
        if not runs and _hwlab("up") != 0:
            raise BenchError("lab/hwlab up failed")
        yield HardwareLab()
    finally:
        if not runs:
            _hwlab("down")


def _hwlab(verb: str) -> int:
    return subprocess.run([HWLAB, verb], stdout=sys.stderr, check=False, timeout=UP_S).returncode
