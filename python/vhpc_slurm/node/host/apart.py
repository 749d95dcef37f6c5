# SPDX-License-Identifier: Apache-2.0
"""An action of a hook that no process has to wait for."""
# Decision: The last node writes the figures into AdminComment

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

BEGIN_S = 5.0
"""How long the hook waits at most until the process is independent of it, in seconds."""


def run(action: Callable[[], object]) -> bool:
    """Run an action in a process that continues when the hook ends; False if none can be made.

    It is a copy of the hook, in a session of its own and without the hook's pipes: slurmd kills the process
    group of a finished script and waits for its stdout to close.  Exceptions of the action are lost.  The
    caller must hold no lock, because the copy would hold it as well.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return False
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for number in range(3):
                os.dup2(null, number)
            os.close(writer)
            action()
        os._exit(0)
    os.close(writer)
    try:
        select.select([reader], [], [], BEGIN_S)  # until it has its own session, or has ended
    finally:
        os.close(reader)
    return True
