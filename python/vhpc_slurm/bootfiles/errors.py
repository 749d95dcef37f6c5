# SPDX-License-Identifier: Apache-2.0
"""The error of this room."""

from __future__ import annotations


class BootFileError(Exception):
    """A kernel's files cannot be used: what, and why if there is more to say."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self.what = what
        self.why = why
