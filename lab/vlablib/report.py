# SPDX-License-Identifier: Apache-2.0
"""What vlab tells the person in front of it: progress and errors, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LabError(Exception):
    """The lab cannot do what was asked; the text says what, why and what to do."""


def say(text: str) -> None:
    """Write one progress line."""
    sys.stderr.write(f"vlab: {text}\n")
    sys.stderr.flush()


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step that may take longer than a second, then say how long it took."""
    say(f"{text} ...")
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    if took > 1:
        say(f"{text}: done in {took:.1f} s")
