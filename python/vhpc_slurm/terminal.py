# SPDX-License-Identifier: Apache-2.0
"""Texts of users, guests and programs, made fit for a terminal, a log and a drain reason."""

from __future__ import annotations

import re

_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}(?![0-9a-f])", re.ASCII)


def printable(text: str, keep: str = "") -> str:
    """A text in which each character that is not printable is a question mark.

    Args:
        text: any text, also one with halves of characters (surrogates).
        keep: characters that stay whatever they are, such as line feeds.
    """
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def short_digests(text: str) -> str:
    """A text with the first 12 of the 64 digits of each SHA-256 digest, for tables; JSON has all of them."""
    return _DIGEST.sub(r"\1", text)


def last_line(text: str) -> str:
    """The last line of what a program said, without blanks around it, at most 300 characters."""
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it said nothing"


def one_line(text: str) -> str:
    """A text as one line: white space becomes single spaces, what is not printable is written out.

    An escape character becomes ``\\x1b``, a byte that is no UTF-8 ``\\udcff``.
    """
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in words)
