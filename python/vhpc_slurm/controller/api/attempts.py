# SPDX-License-Identifier: Apache-2.0
"""Rate limit for connections of each address: a burst, then a rate per second."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

RATE, BURST = 50.0, 100.0
REMEMBERED = 4096
"""Addresses; the one that has not connected for longest is removed first."""


class Attempts:
    """A token bucket for each address."""

    def __init__(
        self, rate: float = RATE, burst: float = BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def another(self, address: str) -> bool:
        """Count a connection of an address; returns whether the rate allows it."""
        now = self._clock()
        tokens, filled = self._buckets.pop(address, (self._burst, now))
        tokens = min(self._burst, tokens + (now - filled) * self._rate)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - allowed, now)
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        return allowed
