# SPDX-License-Identifier: Apache-2.0
"""Questions to slurmctld, which tests kill and start again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol

from pace import limit

AWAY = re.compile(r"Zero Bytes were transmitted|Unable to contact slurm controller")
"""In the error of a command whose question slurmctld took, or that found none."""


class Answer(Protocol):
    """The output of a command."""

    @property
    def code(self) -> int: ...
    @property
    def out(self) -> str: ...
    @property
    def err(self) -> str: ...


def shown(run: Callable[..., Answer], *what: str) -> str:
    """The output of ``scontrol show``; the question is repeated while slurmctld is away."""
    end = time.monotonic() + limit(60)
    while True:
        done = run("ctl", "scontrol", "-o", "show", *what, check=False)
        if done.code == 0:
            return done.out
        is_away = AWAY.search(done.err) is not None and time.monotonic() < end
        assert is_away, f"scontrol show {what}: {done}"
        time.sleep(0.5)
