# SPDX-License-Identifier: Apache-2.0
"""Shared code of the Python fuzz targets.  A target is a module with ``one_input(data)``.

Run as a program a target is a libFuzzer (by atheris, which instruments the
bytecode of vhpc_slurm); imported, as the unit tests do with every committed
seed, it needs no atheris.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable
from typing import Any


class InternalError(Exception):
    """The code under test has done what it promises never to do."""


def fuzz(one_input: Callable[[bytes], None]) -> None:
    """Hand over to libFuzzer with the program's own arguments; does not return."""
    import atheris

    atheris.instrument_all()
    run(one_input)


def run(one_input: Callable[[bytes], None]) -> None:
    """The same in a process whose functions are instrumented."""
    import atheris

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """Every other time by what JSON is made of: random bytes seldom leave it JSON."""
        rng = random.Random(seed)
        mutated = mutate_lines(data, rng) if rng.random() < 0.5 else None
        if mutated is None or len(mutated) > max_size:
            return bytes(atheris.Mutate(data, max_size))
        return mutated

    logging.disable()
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**30, 0.5, 1e308, "", "n1", "\0", "\n",
    "é\ud800", "../x", "a" * 300, [], {}, [[]], {"": None},
)  # fmt: skip


def mutate_lines(data: bytes, rng: random.Random) -> bytes | None:
    """Lines changed, moved or doubled, and values within a line of JSON; None when no line is JSON."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines.insert(rng.randrange(len(lines) + 1), lines[place])
        case 1:
            lines.append(lines.pop(place))
        case 2 if len(lines) > 1:
            del lines[place]
        case _:
            try:
                value = json.loads(lines[place])
                lines[place] = json.dumps(_mutated(value, rng), separators=(",", ":")).encode()
            except (ValueError, RecursionError):
                return None
    return b"\n".join(lines)


def _mutated(value: Any, rng: random.Random) -> Any:
    """A copy with one value, anywhere in it, changed, doubled or left out."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(ODD)
    pairs: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    place = rng.randrange(len(pairs))
    key, part = pairs[place]
    if rng.random() < 0.1:
        del pairs[place]
    elif rng.random() < 0.1:
        pairs.insert(rng.randrange(len(pairs)), (f"{key}x", part))
    else:
        pairs[place] = key, _mutated(part, rng)
    return dict(pairs) if isinstance(value, dict) else [part for _, part in pairs]
