# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: lines, some of them with amounts."""

from __future__ import annotations

from collections.abc import Callable

MIB = 1 << 20


class Amount(str):
    """A line with the number of bytes that are done. A terminal can show it as a bar, in the same place.

    Attributes:
        what: what is done, as a participle: ``fetched``.
        done: bytes that are done.
        total: bytes in all; None: not known.
    """

    __slots__ = ("done", "total", "what")
    what: str
    done: int
    total: int | None

    def __new__(cls, what: str, done: int, total: int | None = None) -> Amount:
        """The line, and what it says as numbers."""
        done = done if total is None else min(done, total)
        of = "" if total is None else f" of {total // MIB} MiB ({100 * done // max(1, total)} %)"
        line = super().__new__(cls, f"{what} {done // MIB} MiB{of}")
        line.what, line.done, line.total = what, done, total
        return line


def counter(progress: Callable[[str], None], what: str, total: int | None) -> Callable[[int], None]:
    """A function that gets the size of each piece when it is done, and says the sum."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(Amount(what, done, total))

    return add
