# SPDX-License-Identifier: Apache-2.0
"""How long tests wait, and how much they try: limits that follow from the machine's speed, waits, examples.

scripts/pace measures the machine; scripts/check and scripts/tests set VHPC_PACE.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PACE = max(1.0, float(os.environ.get("VHPC_PACE") or 1))
"""How many times slower the machine is than the one that limits are made for."""


def limit(seconds: float) -> float:
    """A limit in seconds, made for the reference machine, for this machine."""
    return seconds * PACE


def examples(number: int) -> int:
    """How many examples a test with generated cases tries: a quarter, and all in `make slow-properties`.

    The cases differ from run to run, so that all runs together try as many.
    """
    return number if os.environ.get("VHPC_EXAMPLES") == "all" else max(1, number // 4)


def until(condition: Callable[[], T], what: str, seconds: float = 60, *, every: float = 0.05) -> T:
    """Wait for a condition to be true, and return its value.

    Args:
        condition: called again and again.
        what: the condition in words, for the error.
        seconds: limit on the reference machine.
        every: pause between two calls, in seconds.

    Raises:
        AssertionError: the condition is still false after the limit.
    """
    end = time.monotonic() + limit(seconds)
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {limit(seconds):.0f} s in vain for {what}"
        time.sleep(every)
    return found
