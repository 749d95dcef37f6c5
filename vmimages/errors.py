# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a build."""

from __future__ import annotations


class BuildError(Exception):
    """A build that cannot go on: what failed, why, and what to do about it."""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.hint:
            text += f" ({self.hint})"
        return text
