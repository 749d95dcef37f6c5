# SPDX-License-Identifier: Apache-2.0
"""The error of a build."""

from __future__ import annotations


class BuildError(Exception):
    """A build failed: what failed, why, and what to do."""

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
