# SPDX-License-Identifier: Apache-2.0
"""Processes that use a guest: one that should end, and one on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pace import limit

if TYPE_CHECKING:
    from guest_rig import Guest

WAIT_S = 30
# Tests that send a guest control operations.
CONTROL_OPERATIONS = pytest.mark.skipif(
    os.getuid() != 0, reason="only root may send control operations: run as root"
)


def gone(pid: int) -> bool:
    """The process ends soon (a zombie has ended)."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def on_a_terminal(guest: Guest, argv: list[str], shown: bytes, keys: bytes) -> tuple[bytes, int]:
    """Run vhpc-run on a pty of 33 by 101; press keys when the screen has shown a text."""
    pid, master = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        os.execve(guest.bin / "vhpc-run", ["vhpc-run", *argv], guest.env(VHPC_RUN_COMMANDS="sh"))
    screen, until = b"", time.monotonic() + limit(WAIT_S)
    while time.monotonic() < until:
        if keys and shown in screen:
            os.write(master, keys)
            keys = b""
        if not select.select([master], [], [], 0.7)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        screen += data
    os.close(master)
    return screen, os.waitpid(pid, 0)[1]
