# SPDX-License-Identifier: Apache-2.0
"""Texts of users and nodes in a page: where a browser may break long words.  Pure.

A browser breaks a name only behind hyphens. Without other places a table is wider than the
window, or the browser breaks anywhere.
"""

from __future__ import annotations

import re

from markupsafe import Markup

from vhpc_slurm.terminal import printable, short_digests

WORD = 16
"""A word of so many characters needs no place to break."""
PIECE, GROUP = 24, 16
"""A piece without separators that is longer than PIECE may break behind each GROUP of characters."""
_LONG = re.compile(rf"\S{{{WORD + 1},}}")
_PIECES = re.compile(r"(?:[^/:@_,=+.-]|(?<=\d)\.(?=\d))*[/:@_,=+.-]*")
"""Behind separators, but not in numbers: ``cuda-12.6`` may break behind the hyphen only."""
_BREAK = Markup("<wbr>")


def breakable(text: str) -> Markup:
    """A text as HTML that may break behind the separators of its long words."""
    found, at = Markup(), 0
    text = printable(text, "\n")
    for word in _LONG.finditer(text):
        found += text[at : word.start()]
        found += _BREAK.join(part for piece in _PIECES.findall(word[0]) for part in _groups(piece))
        at = word.end()
    return found + text[at:]


def brief(text: str) -> Markup:
    """The same with 12 digits of each digest; its tooltip has the whole text."""
    short = short_digests(text)
    if short == text:
        return breakable(text)
    return Markup('<span title="{}">{}</span>').format(printable(text), breakable(short))


def _groups(piece: str) -> list[str]:
    if len(piece) <= PIECE:
        return [piece] if piece else []
    return [piece[at : at + GROUP] for at in range(0, len(piece), GROUP)]
