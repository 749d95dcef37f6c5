# SPDX-License-Identifier: Apache-2.0
"""Expansion of Slurm's hostlist expressions.

``n[1-3,7]`` is four hosts, ``rack[0-1]n[01-02]-ib`` is four hosts; the rightmost
bracket varies fastest.  A leading zero in the lower bound fixes the width of
every number of its range.  Source: scontrol(1), "hostlist expression".

With three brackets or more Slurm uses another order (measured with 24.11:
``r[1-2]x[0-1]y[3,5]`` is r1x0y3 r1x0y5 r2x0y3 r2x0y5 r1x1y3 …).  The first host
is the same, and vhpc does not depend on the order of the others.
"""
# Decision: Host lists are expanded without ClusterShell

from __future__ import annotations

import re
from itertools import product
from math import prod

MAX_HOSTS = 65536
"""More nodes than clusters have; limits the memory for n[0-999999999]."""

_PART = re.compile(r"\[([^][]*)\]|([^][,]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Expand a host list in Slurm's order.

    Raises:
        ValueError: not a host list, or more than MAX_HOSTS hosts.
    """
    hosts: list[str] = []
    for item in _split(text):
        parts: list[list[str]] = []
        end = 0
        for match in _PART.finditer(item):
            if match.start() != end:
                raise ValueError(f"not a host list: {text[:80]!r}")
            end = match.end()
            parts.append([match[2]] if match[2] is not None else _numbers(match[1], text))
        if end != len(item) or not parts:
            raise ValueError(f"not a host list: {text[:80]!r}")
        if len(hosts) + prod(map(len, parts)) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts in {text[:80]!r}")
        hosts.extend("".join(chosen) for chosen in product(*parts))
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items, depth, begin = [], 0, 0
    for place, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[begin:place])
            begin = place + 1
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in {text[:80]!r}")
    items.append(text[begin:])
    if depth:
        raise ValueError(f"brackets do not match in {text[:80]!r}")
    return items


def _numbers(inner: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"not a range: {item[:40]!r} in {text[:80]!r}")
        low, high = match[1], match[2] if match[2] is not None else match[1]
        if int(high) < int(low) or int(high) - int(low) + len(numbers) >= MAX_HOSTS:
            raise ValueError(f"not a range of at most {MAX_HOSTS}: {item[:40]!r} in {text[:80]!r}")
        numbers.extend(str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers
