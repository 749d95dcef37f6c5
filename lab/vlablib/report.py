# SPDX-License-Identifier: Apache-2.0
"""Messages of vlab: progress and errors, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LabError(Exception):
    """An operation of the lab failed; the text says what, why and what to do."""


def say(text: str) -> None:
    """Write one progress line."""
    sys.stderr.write(f"vlab: {text}\n")
    sys.stderr.flush()


@contextmanager
def step(text: str) -> Iterator[None]:
    """Report the start of a step, and its duration if it took more than a second."""
    say(f"{text} ...")
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    if took > 1:
        say(f"{text}: done in {took:.1f} s")
