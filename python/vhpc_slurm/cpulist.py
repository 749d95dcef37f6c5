# SPDX-License-Identifier: Apache-2.0
"""CPU and NUMA cell numbers as the kernel, libvirt and Slurm write them: ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``0-3,8``, ascending; ValueError when it is no such list."""
    numbers: set[int] = set()
    if not text.strip():
        return ()
    for part in text.strip().split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"not a CPU list: {text.strip()!r}")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """The shortest list with these numbers: ``0-3,8``; empty for none."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
