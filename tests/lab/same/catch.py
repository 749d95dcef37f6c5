# SPDX-License-Identifier: Apache-2.0
"""A step that says which signals it gets, and ends at SIGTERM."""

import os
import signal
from types import FrameType

NAMES = "HUP INT QUIT USR1 USR2 ALRM CONT TSTP TTIN URG XCPU"


def say(number: int, frame: FrameType | None) -> None:
    """Say the signal's name; end at SIGTERM."""
    # not print(): a second signal may come while it prints the first
    os.write(1, f"{signal.Signals(number).name}\n".encode())
    if number == signal.SIGTERM:
        os._exit(5)  # at once: srun may send another one


for name in [*NAMES.split(), "TERM"]:
    signal.signal(getattr(signal, f"SIG{name}"), say)
print("ready", flush=True)
while True:
    signal.pause()
