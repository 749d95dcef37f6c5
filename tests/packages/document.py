# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/install.md, as a reader copies them from it."""

from __future__ import annotations

import re

from debs import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(title: str) -> list[tuple[str, list[str]]]:
    """The fenced blocks of a section: language and lines.

    Raises:
        ValueError: there is no such section.
    """
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return [(found[1], found[2].splitlines()) for found in _BLOCK.finditer(section)]


def commands(title: str) -> list[list[str]]:
    """The lines of each block of commands in a section."""
    return [lines for language, lines in blocks(title) if language == "sh"]
