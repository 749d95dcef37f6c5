# SPDX-License-Identifier: Apache-2.0
"""A wall clock of its own for one host of the lab; host_clock.c says how, and what it cannot show."""

from __future__ import annotations

import base64
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import Lab, vlab_status

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY, STEP, PRELOAD = "/usr/local/lib/host_clock.so", "/etc/host-clock", "/etc/ld.so.preload"


class HostClock:
    """The clock of a host, on which all daemons have been started again."""

    def __init__(self, lab: Lab, host: str) -> None:
        self._lab, self.host = lab, host

    def step(self, seconds: int) -> None:
        """Set the clock so many seconds ahead of the kernel's; negative: behind it."""
        self._write(STEP, struct.pack("=q", seconds), "dd conv=notrunc status=none of")

    def ahead_s(self) -> int:
        """How far a program of the host sees its clock ahead of that of another host."""
        theirs, ours = (int(self._lab.run(host, "date", "+%s").out) for host in (self.host, "login"))
        return theirs - ours

    def install(self) -> None:
        """Put the library on the host, and restart its daemons with it."""
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, "host_clock.so")
            build = ["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-o", str(built), str(SOURCE)]
            subprocess.run(build, check=True, timeout=120)
            self._write(f"{LIBRARY}.new", built.read_bytes(), "dd status=none of")
        self._lab.run(self.host, "mv", f"{LIBRARY}.new", LIBRARY)
        # programs of an earlier test have the file mapped: it stays the same, and as long
        self.step(0)
        self._lab.run(self.host, "sh", "-c", f"echo {LIBRARY} > {PRELOAD}")
        for unit in vlab_status()["hosts"][self.host]["units"]:
            self._lab.service(self.host, "restart", unit)

    def remove(self) -> None:
        """The kernel's clock again; programs that run keep the library, which adds nothing."""
        self._lab.run(self.host, "rm", "-f", PRELOAD)
        self.step(0)

    def _write(self, path: str, content: bytes, command: str) -> None:
        text = base64.b64encode(content).decode()
        self._lab.run(self.host, "sh", "-c", f"base64 -d | {command}={path}", stdin=text)


@contextmanager
def host_clock(lab: Lab, host: str) -> Iterator[HostClock]:
    """The clock of a host for one test."""
    clock = HostClock(lab, host)
    try:
        clock.install()
        yield clock
    finally:
        clock.remove()
