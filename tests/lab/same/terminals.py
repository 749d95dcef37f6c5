# SPDX-License-Identifier: Apache-2.0
"""Run on the login host with the id of a job: two shells in it, what a user types, and what they say."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time

SRUN = ("srun", "-Q", "--overlap", "--pty", f"--jobid={sys.argv[1]}", "env", "PS1=", "TERM=dumb")
SHELL = ("bash", "--norc", "--noprofile", "--noediting")


class Shell:
    """An interactive shell, and what it has said since it was last asked."""

    asked = 0

    def __init__(self, rows: int, columns: int) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            time.sleep(0.5)  # until the terminal has its size
            os.execvp("srun", [*SRUN, *SHELL])
        self.size(rows, columns)
        self.ask("stty -echo")

    def size(self, rows: int, columns: int) -> None:
        """As a user who pulls at the window."""
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Type, and give what gets the keys a moment for it."""
        os.write(self.terminal, text.encode())
        time.sleep(1.5)

    def ask(self, command: str) -> list[str]:
        """The lines of a command's output; the terminal's own line breaks come at any time."""
        Shell.asked += 1
        self.type(f"{command}; echo end''of{Shell.asked}.\n")
        said, end = b"", time.monotonic() + 120
        while f"endof{Shell.asked}.".encode() not in said:
            if time.monotonic() > end or not select.select([self.terminal], [], [], 120)[0]:
                raise TimeoutError(said)
            said += os.read(self.terminal, 4096)
        return [line for line in said.decode().replace("\r", "").splitlines()[:-1] if line]

    def end(self, status: int) -> int:
        """Leave the shell; returns the status of srun."""
        self.type(f"exit {status}\n")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


shells = [Shell(30, 90), Shell(40, 120)]
said: list[object] = [shell.ask("stty size; trap 'echo resized' WINCH") for shell in shells]
for number, shell in enumerate(shells):
    shell.size(31 + number, 91)
    os.kill(shell.pid, signal.SIGWINCH)
    time.sleep(2)
    said.append([one.ask("stty size") for one in shells])
for shell in shells:
    for key in ("\x1a", "\x1c", "\x03"):  # Ctrl-Z, Ctrl-\, Ctrl-C; a stopped program is continued
        shell.type("sleep 100\n")
        shell.type(key)
        said.append(shell.ask("echo $?; jobs"))
        if key == "\x1a":
            shell.type("fg\n")
            shell.type("\x1c")
            said.append(shell.ask("echo $?; jobs; rm -f core core.*"))
    shell.type("\x1a\x1c")  # not for the shell itself
    said.append(shell.ask("echo here"))
said.append(shells[0].end(3))
said.append(shells[1].ask("echo alone"))
said.append(shells[1].end(4))
print(json.dumps(said))
