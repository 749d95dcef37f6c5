# SPDX-License-Identifier: Apache-2.0
"""Calls without a deadline of their own: each runs in a thread that is given up when its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WATCH_S = 0.25


class OverdueError(Exception):
    """A call has not ended in its time; its thread ends with this process."""


def within(seconds: float, name: str, action: Callable[[], T], watch: Callable[[], None] | None = None) -> T:
    """The result of a call.

    Args:
        seconds: longest time.
        name: of the thread.
        action: the call; its error is raised.
        watch: called four times a second meanwhile; its error ends the wait.

    Raises:
        OverdueError: the time is over.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(action())
        except BaseException as err:
            failure.append(err)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(left if watch is None else min(left, WATCH_S))
        if watch is not None:
            watch()
    if thread.is_alive():
        raise OverdueError(name)
    if failure:
        raise failure[0]
    return result[0]
