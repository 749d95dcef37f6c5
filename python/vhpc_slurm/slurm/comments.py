# SPDX-License-Identifier: Apache-2.0
"""AdminComment of a job: vhpc's text at its start, behind it the text of another program.  Pure.

A job_submit plugin of the site may set an AdminComment before the job starts, and tools for job
statistics replace it after the job's end.
"""

from __future__ import annotations

import re

OURS = "vhpc:"
"""How each AdminComment of vhpc begins."""
_BESIDE = " // "
_USAGE = re.compile(r"(?:; | )usage (?:[a-z_]+=[0-9./]+ ?)+$")
_MAX = 1024
"""Characters of both texts."""


def without_usage(comment: str) -> str:
    """The text without the figures of what the job has used."""
    return _USAGE.sub("", comment)


def others(comment: str) -> str:
    """The text of another program in an AdminComment; usually empty."""
    if not comment.startswith(OURS):
        return comment.strip()
    return without_usage(comment).partition(_BESIDE)[2]


def beside(text: str, comment: str) -> str:
    """Our text, and behind it the other program's text of the present AdminComment if it has room."""
    foreign = others(comment)
    both = f"{text}{_BESIDE}{foreign}"
    return both if foreign and len(both) <= _MAX else text
