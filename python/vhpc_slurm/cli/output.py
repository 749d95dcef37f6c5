# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables for people, JSON for programs.

A table looks the same in a pipe as on a terminal, but without colour.  Values
are never truncated: on a narrow terminal they wrap, in a pipe lines have no limit.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vhpc_slurm.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 4000
_NOT_PLAIN = re.compile(r"[^\n -~]")
_NUMBERED = re.compile(r"^(.*?)(0|[1-9][0-9]*)$", re.ASCII)


def write_json(value: Any) -> None:
    """Write one JSON document, indented, and nothing else, to stdout.

    A character that is not printable is written as its escape sequence: it means the same, and a
    terminal on which the document is read does not act on it.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    sys.stdout.write(_NOT_PLAIN.sub(_escaped, text) + "\n")


def _escaped(found: re.Match[str]) -> str:
    """A character of a string (elsewhere the encoder writes only ASCII), escaped if it is not printable."""
    if found[0].isprintable():
        return found[0]
    return "\\u007f" if found[0] == "\x7f" else json.dumps(found[0])[1:-1]


def console() -> Console:
    """A console on stdout: markup in the data stays text."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def show(what: RenderableType) -> None:
    """Print a renderable without trailing blanks."""
    target = console()
    with target.capture() as captured:
        target.print(what)
    text = captured.get()
    sys.stdout.write("".join(line.rstrip() + "\n" for line in text.splitlines()))


def write_table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """Print a table without lines; cells are strings or rich renderables.

    Args:
        head: column titles.
        rows: one sequence of cells per row.
        right: titles of right-aligned columns.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for title in head:
        justify = "right" if title in right else "left"
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    show(table)


def span(seconds: float) -> str:
    """A time span in at most two units: ``45s``, ``3m05s``, ``2h10m``, ``4d03h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def date(seconds: float) -> str:
    """Local time with its zone, from seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def size(count: int) -> str:
    """A number of bytes in binary units with one decimal: ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def node_list(names: Iterable[str]) -> str:
    """Node names as a Slurm hostlist: ``n[1-3,7],login``; names with leading zeros are not compressed."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        match = _NUMBERED.match(name)
        prefix, number = (match[1], int(match[2])) if match else (name, -1)
        if match is not None and prefix.endswith("0"):  # n01: compressing would lose the zero
            prefix, number = name, -1
        numbers.setdefault(prefix, []).append(number)
    return ",".join(_fold(prefix, sorted(set(found))) for prefix, found in numbers.items())


def _fold(prefix: str, numbers: list[int]) -> str:
    from vhpc_slurm.cpulist import format_cpu_list

    if numbers == [-1]:
        return prefix
    if -1 in numbers:
        return f"{prefix},{_fold(prefix, numbers[1:])}"
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]}"
    return f"{prefix}[{format_cpu_list(numbers)}]"


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair per line, values aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, printable(value))
    show(table)
