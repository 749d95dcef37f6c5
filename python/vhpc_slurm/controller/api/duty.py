# SPDX-License-Identifier: Apache-2.0
"""Whether this vhpcd answers requests: the only one of a cluster does, of several the active one."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable

from vhpc_slurm.controller.api import protocol as wire


class Duty:
    """Belongs to the event loop.

    Attributes:
        epoch: of the active vhpcd; 0: this is the only one.
        waits: on a standby, what it waits for.
    """

    def __init__(self, *, standby: bool = False) -> None:
        """A standby answers nothing until ``begin``."""
        self.epoch = 0
        self.waits = "it has just begun"
        self._standby = standby
        self._left_s: Callable[[], float] = lambda: math.inf

    def begin(self, epoch: int, left_s: Callable[[], float]) -> None:
        """This vhpcd is active, for so many seconds unless they grow."""
        self.epoch, self._left_s, self._standby = epoch, left_s, False

    @property
    def over(self) -> bool:
        """Whether the time of this vhpcd as the active one has ended."""
        return self._left_s() <= 0

    def refusal(self) -> wire.Failure | None:
        """The answer of a standby; None if this vhpcd is active."""
        if not self._standby:
            return None
        return wire.Failure(
            kind=wire.AGAIN,
            what=f"vhpcd on {socket.gethostname()} is a standby",
            why=self.waits,
            hint="ask the other hosts of controller.host and controller.backup_hosts",
        )
