# SPDX-License-Identifier: Apache-2.0
"""Decides which of several vhpcd may change the fabric, and how a file refuses all earlier ones.

A vhpcd can be frozen at any line, for any time, and then continue. So a check before the rename of a
new file is not enough. Next to the file there are empty files, *marks*, with the epochs of its writers
in their names. A writer

1. makes its mark, and ends if there is a higher one;
2. removes the new files of writers with lower epochs, which were not renamed yet;
3. writes a new file whose name has its epoch;
4. ends if there is a higher mark now;
5. renames its new file over the file.

An earlier writer that has passed step 4 before a later one's step 1 has its new file by then. The
later one's step 2 removes it, and the rename fails; or it was renamed, and the later one's step 5
replaces it.
"""
# Decision: Marks next to OpenSM's file stop a frozen writer

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import FabricError


@dataclass(frozen=True)
class FabricWriter:
    """A vhpcd that changes the fabric.

    Attributes:
        epoch: its epoch where there are several vhpcd; 0: it is the only one.
        left_s: seconds until it is no longer the active one; any thread may ask.
    """

    epoch: int = 0
    left_s: Callable[[], float] = lambda: math.inf

    def check(self) -> None:
        """FabricError when it is no longer the active vhpcd."""
        if self.left_s() <= 0:
            raise FabricError("this vhpcd is no longer the active one", "it changes nothing any more")


ALONE = FabricWriter()
"""The only vhpcd."""


class FileFence:
    """The marks and new files of one file; all methods raise OSError when the folder cannot be used."""

    def __init__(self, file: Path, epoch: int) -> None:
        """``epoch`` 0 is that of the only vhpcd: there are no marks, and nothing is refused."""
        self._file, self._epoch = file, epoch
        self._mark = f".{file.name}.vhpcd-epoch-"
        self._new = f".{file.name}.vhpcd"

    @property
    def new(self) -> Path:
        """Name of the new file."""
        return self._file.with_name(f"{self._new}-{self._epoch}" if self._epoch else self._new)

    def enter(self) -> None:
        """Steps 1 and 2; FabricError when a vhpcd with a higher epoch has been here."""
        if not self._epoch:
            return
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(self._file.with_name(f"{self._mark}{self._epoch}"), flags, 0o600))
        self.check()
        for epoch, path in self._found(re.escape(self._new) + "(?:-([0-9]{1,19}))?"):
            if epoch < self._epoch:
                path.unlink(missing_ok=True)
        for epoch, path in self._marks():
            if epoch < self._epoch:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Step 4; FabricError when a vhpcd with a higher epoch has been here."""
        if not self._epoch:
            return
        highest = max((epoch for epoch, _ in self._marks()), default=0)
        if highest > self._epoch:
            for path in (self.new, self._file.with_name(f"{self._mark}{self._epoch}")):
                path.unlink(missing_ok=True)
            raise FabricError(
                f"{self._file} belongs to another vhpcd",
                f"it has epoch {highest}, this one has {self._epoch}",
                "this vhpcd is no longer the active one; see its log",
            )

    def _marks(self) -> Iterator[tuple[int, Path]]:
        return self._found(re.escape(self._mark) + "([0-9]{1,19})")

    def _found(self, pattern: str) -> Iterator[tuple[int, Path]]:
        for path in tuple(self._file.parent.iterdir()):
            if (match := re.fullmatch(pattern, path.name)) is not None:
                yield int(match[1] or 0), path
