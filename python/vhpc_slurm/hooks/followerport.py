# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a follower: to vhpcd, to the network and the guests of its job, and to its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vhpc_slurm.model import Generation, Roster
from vhpc_slurm.node.store.membership import Membership
from vhpc_slurm.record import Record


class Setting(Record, frozen=True):
    """The job of a follower, and its node."""

    generation: Generation
    node: str


class Vhpcd(Protocol):
    """The request of a follower to vhpcd."""

    def roster(
        self, generation: Generation, node: str, applied: int, gone: tuple[int, ...], wait_s: float
    ) -> Roster:
        """The changes since version ``applied``, which this node has; without any vhpcd waits for ``wait_s``.

        Raises:
            VhpcError: vhpcd does not answer, or not to this.
        """


class Network(Protocol):
    """Segment and firewall of the job on this node."""

    def follow(self, known: Membership) -> None:
        """Make them know exactly these members, and keep that in the job's file; VhpcError: not done."""


class Guests(Protocol):
    """The guests of the job on this node."""

    def all(self) -> tuple[int, ...]:
        """Their ranks."""

    def gone(self) -> tuple[int, ...]:
        """Ranks of those that have ended."""

    def tell(self, known: Membership) -> tuple[str, ...]:
        """Tell those that live; returns the names of those that do not answer in time, or refuse."""


class Process(Protocol):
    """The process that a follower runs in; its waits end by Terminated or Woken (``interrupts``)."""

    def pause(self, seconds: float) -> None:
        """Sleep."""

    def ask(self, question: Callable[[], Roster]) -> Roster:
        """The answer."""

    def briefly(self, question: Callable[[], Roster], seconds: float) -> None:
        """Ask without an interest in the answer; nothing ends this wait but its time."""

    def job_ends(self) -> bool:
        """Whether the guests are being ended, with the job or because it could not start."""
