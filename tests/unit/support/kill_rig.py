# SPDX-License-Identifier: Apache-2.0
"""Runs a change in a process that is killed by SIGKILL when it begins its n-th step.

Steps are those on the file system, and calls that a test marks by ``before``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

OWN_STEP = "kill_rig.step"
"""Audit event of ``before``."""
STEPS = {
    *("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime"),
    OWN_STEP,
}
"""Audit events of steps that change a file system; ``open`` for writing is another."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _is_step(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & WRITING)
    return event in STEPS


def before(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, as a step: for calls without an audit event of Python."""

    def stepped(*arguments: Any, **named: Any) -> Any:
        sys.audit(OWN_STEP)
        return call(*arguments, **named)

    return stepped


def killed_at(step: int, change: Callable[[], object]) -> bool:
    """Run ``change`` in a child; True if it was killed, False if it came to its end before that step."""
    child = os.fork()
    if child == 0:
        left = [step]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if _is_step(event, arguments):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            change()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the change failed"
    return os.WIFSIGNALED(status)


def kills(change: Callable[[], object], most: int = 200) -> Iterator[int]:
    """Numbers of steps at which ``change`` was killed, until it comes to its end."""
    for step in range(most):
        if not killed_at(step, change):
            return
        yield step
    raise AssertionError(f"the change has more than {most} steps")
