# SPDX-License-Identifier: Apache-2.0
"""Steps that vhpc starts in a running job of its user, with pipes to their standard streams."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from vhpc_slurm.slurm.port import SlurmError
from vhpc_slurm.terminal import one_line

QUIET_S = 2.0
"""How long a step may take to end after its standard input has ended."""
TERM_S = 10.0
"""How long an srun may take to end its step when it is told to."""
SAID_MAX = 65536
MARK = "vhpc-begin"
"""A script prints this line before its answer: a TaskProlog of the site may print others before it."""
_FIELD = re.compile(r"(?:^| )(JobState|UserId|NodeList)=(\S*)")
_IMAGE = re.compile(r" AdminComment=vhpc: image (\S+@sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class JobDetails:
    """A job as scontrol shows it.

    Attributes:
        state: in capitals, such as RUNNING.
        uid: of its owner; -1 if scontrol did not say.
        nodes: a hostlist, empty before the start.
        image: of its guests, with the digest; empty if it has no guests.
    """

    state: str
    uid: int
    nodes: str
    image: str


def job_details(shown: str) -> JobDetails:
    """Read the line of ``scontrol -o show job``; of a heterogeneous job the first component."""
    line = shown.partition("\n")[0]
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)
    owner = re.search(r"\(([0-9]{1,10})\)$", fields.get("UserId", ""))
    nodes, image = fields.get("NodeList", ""), _IMAGE.search(line)
    return JobDetails(
        fields.get("JobState", ""),
        int(owner[1]) if owner else -1,
        "" if nodes == "(null)" else nodes,
        image[1] if image else "",
    )


class Step:
    """A running srun.

    It has a session of its own, so that Ctrl-C reaches only this process, which then ends it.  If this
    process is killed, the standard input of the step ends, and its program ends with it.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; SlurmError if there is no srun."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            self._run = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as err:
            self._said.close()
            raise SlurmError(f"cannot start {argv[0]}", err.strerror or str(err)) from err
        assert self._run.stdin is not None
        assert self._run.stdout is not None
        self.stdin: IO[bytes] = self._run.stdin
        self.stdout: IO[bytes] = self._run.stdout

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, negative for a signal; None if it still runs after that time."""
        try:
            return self._run.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def begins(self, timeout_s: float) -> bool:
        """Read to the end of the line MARK; False if the output ends before, or after that time."""
        mark, said, until = f"\n{MARK}\n".encode(), bytearray(b"\n"), time.monotonic() + timeout_s
        while not said.endswith(mark) and len(said) < SAID_MAX:
            left = max(0.0, until - time.monotonic())
            byte = select.select([self.stdout], [], [], left)[0] and os.read(self.stdout.fileno(), 1)
            if not byte:
                return False
            said += byte
        return said.endswith(mark)

    def read_line(self, limit: int, timeout_s: float) -> bytes | None:
        """The next line of standard output without its line feed; empty at the end of the output.

        None if there is no line of at most ``limit`` bytes within that time.
        """
        line, until = b"", time.monotonic() + timeout_s
        while len(line) <= limit:
            left = max(0.0, until - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                return None
            byte = os.read(self.stdout.fileno(), 1)
            if byte in (b"", b"\n"):
                return line if byte else b""
            line += byte
        return None

    def end(self, *, at_once: bool = False) -> None:
        """End the step and close its pipes; nothing to do for one that has ended.

        Args:
            at_once: the program must not take the end of its standard input for the end of its data.
        """
        if at_once:
            self._terminate()
        with contextlib.suppress(OSError):  # what was still to be written no longer matters
            self.stdin.close()
        if self.wait(QUIET_S) is None:
            self._terminate()
        self.stdout.close()
        self._said.close()

    def _terminate(self) -> None:
        """Srun ends its step when it is told to, but not while slurmctld is away."""
        if self.wait(0) is None:
            self._run.terminate()
            if self.wait(TERM_S) is None:
                self._run.kill()
                self._run.wait()

    def complaints(self) -> list[str]:
        """Lines that srun and the program have written to stderr, before end(); those of srun come last."""
        self._said.seek(0)
        text = self._said.read(SAID_MAX).decode("utf-8", "replace")
        lines = [one_line(line)[-300:] for line in text.split("\n") if line.strip()]
        return sorted(lines, key=lambda line: line.startswith("srun: "))
