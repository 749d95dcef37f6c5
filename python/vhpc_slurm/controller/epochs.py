# SPDX-License-Identifier: Apache-2.0
"""The highest epoch that this host has seen in an answer of vhpcd.

Where several hosts have a vhpcd, each answer carries the epoch of the one that gave it. An answer with
a lower epoch comes from one that is no longer active, such as one that was frozen for a while.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from vhpc_slurm import files

FILE = "vhpcd-epoch"
LOCK_S = 2.0


class Epochs:
    """The highest epoch that a host has seen: root keeps it in a file of vhpc's state folder, others in
    memory."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is ``paths.state``."""
        self._file = folder / FILE
        self._highest = 0

    @property
    def highest(self) -> int:
        """The highest epoch seen; 0: none."""
        return max(self._highest, self._kept())

    def accept(self, epoch: int) -> bool:
        """Whether an answer with this epoch counts; a higher one than before is remembered."""
        highest = self.highest
        if epoch < highest:
            return False
        self._highest = epoch
        if epoch > highest and os.geteuid() == 0:
            # Where it cannot be kept, vhpcd's database still refuses what a lower epoch changes.
            with suppress(OSError):
                self._keep(epoch)
        return True

    def _kept(self) -> int:
        try:
            return int(self._file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0

    def _keep(self, epoch: int) -> None:
        lock = files.open_lock(self._file.with_name(f".{FILE}.lock"))
        try:
            if files.lock(lock, LOCK_S) and self._kept() < epoch:
                files.replace(self._file, f"{epoch}\n".encode(), 0o644)
        finally:
            os.close(lock)
