# SPDX-License-Identifier: Apache-2.0
"""Shows on standard error what long work does: lines, and on a terminal a bar that the next one replaces."""

from __future__ import annotations

import os
import sys
import time

from vhpc_slurm.progress import Amount

BAR = 24
"""Characters of a bar."""
WIDTH = 80
"""Of a terminal that does not say it."""
DRAW_S, LINE_S = 0.1, 2.0
"""Amounts are drawn, or printed where there is no terminal, at most so often."""
CLEAR = "\r\x1b[K"


class _Shown:
    """The state of standard error: whether a bar is drawn, and when something was written."""

    drawn = False
    at = time.monotonic()


def progress(line: str) -> None:
    """Tell the user what is done; amounts that come quickly are left out."""
    if not isinstance(line, Amount):
        _say(f"vhpc: {line}\n")
        return
    terminal, now = sys.stderr.isatty(), time.monotonic()
    if terminal and line.done == line.total:
        end()
    elif terminal:
        if not _Shown.drawn or now - _Shown.at >= DRAW_S:
            _say(CLEAR + _bar(line), drawn=True)
    elif now - _Shown.at >= LINE_S:
        _say(f"vhpc: {line}\n")


def end() -> None:
    """Remove a bar from the terminal: what is printed next begins a line."""
    if _Shown.drawn:
        _say("")


def _say(text: str, *, drawn: bool = False) -> None:
    sys.stderr.write((CLEAR if _Shown.drawn and not drawn else "") + text)
    sys.stderr.flush()
    _Shown.drawn, _Shown.at = drawn, time.monotonic()


def _bar(line: Amount) -> str:
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except OSError:
        width = WIDTH
    bar = ""
    if line.total:
        full = BAR * line.done // line.total
        bar = f"[{'#' * full}{'-' * (BAR - full)}] "
    return f"vhpc: {bar}{line}"[: max(1, width - 1)]
