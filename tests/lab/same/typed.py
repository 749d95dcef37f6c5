# SPDX-License-Identifier: Apache-2.0
"""In a batch script: a command on a terminal of 33 by 101, and keys that are typed after its first line.

usage: typed.py SCRIPT KEYS -- COMMAND...
"""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

script, keys, _, *command = sys.argv[1:]
typed = keys.encode().decode("unicode_escape").encode()
pid, master = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    os.execvp(command[0], [*command, script])
screen, until = b"", time.monotonic() + 400
while time.monotonic() < until:
    if select.select([master], [], [], 0.5)[0]:
        try:
            screen += os.read(master, 4096)
        except OSError:  # the command has ended
            break
    if typed and screen.count(b"\n") >= 1 + script.count("up"):
        os.write(master, typed)
        typed = b""
else:
    os.kill(pid, 9)
print(screen.decode().replace("\r", ""), end="")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
