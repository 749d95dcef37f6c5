# SPDX-License-Identifier: Apache-2.0
"""How keepers and commands ask vhpcd about checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.controller.exchange import Exchange
from vhpc_slurm.errors import UserError
from vhpc_slurm.model import (
    UNFINISHED,
    Checkpoint,
    CheckpointTotal,
    Generation,
    KeeperOrder,
    KeeperReport,
    Removed,
)
from vhpc_slurm.options import CHECKPOINT_NAME, RESUME

POLL_S = 0.5
"""How often vhpcd is asked about a checkpoint that is being made."""


class CheckpointCalls(Exchange):
    """The part of ``ControllerClient`` for checkpoints; errors are as there."""

    def keeper(
        self, generation: Generation, node: str, report: KeeperReport | None, wait_s: float
    ) -> KeeperOrder:
        """Report this node's progress with a checkpoint, and return the next order.

        A keeper whose guests are stopped repeats its report HELD or SAVED in each call: one that does not
        has let them continue, and the checkpoint fails.  END is repeated until the lease is over; OVER is the
        last order.

        Args:
            generation: the job's.
            node: this node.
            report: the last report; None: the guests run.
            wait_s: if there is nothing to do, wait so long for it.
        """
        body = messages.AskOrder(generation=str(generation), node=node, report=report, wait_s=wait_s)
        return self._ask(body, messages.OrderAnswer, wait_s).order

    def known_checkpoints(self, serials: Collection[int]) -> frozenset[int]:
        """Those of some checkpoints whose files are needed; the files of all others can be deleted."""
        some, found = sorted(serials), set[int]()
        for first in range(0, len(some), messages.MAX_SERIALS):
            asked = tuple(some[first : first + messages.MAX_SERIALS])
            found.update(
                self._ask(messages.KnownCheckpoints(serials=asked), messages.CheckpointsKept).serials
            )
        return frozenset(found)

    def save(
        self, job_id: int, name: str | None = None, *, stop: bool = False, requeue: bool = False
    ) -> Checkpoint:
        """Begin a checkpoint of a job; without a name it is called JOBID.NUMBER.

        A checkpoint of this name that has begun already is returned.  With ``stop`` vhpcd ends the job when
        the checkpoint is valid, with ``requeue`` it puts the job back into the queue.

        Raises:
            UserError: the name is incorrect, or the job cannot be saved, or is another user's.
        """
        if name is not None and not CHECKPOINT_NAME.match(name):
            raise UserError(f"{name[:80]!r} is not the name of a checkpoint", RESUME.grammar.expected)
        body = messages.SaveJob(job_id=job_id, name=name, stop=stop, requeue=requeue)
        return self._ask(body, messages.CheckpointAnswer).checkpoint

    def checkpoint(self, serial: int) -> Checkpoint:
        """One checkpoint.

        Raises:
            UserError: vhpcd has no such checkpoint of this user.
        """
        body = messages.ListCheckpoints(after=serial - 1, limit=1)
        found = self._ask(body, messages.CheckpointPage).checkpoints
        if not found or found[0].serial != serial:
            raise UserError(f"there is no checkpoint of number {serial}", "", "see: vhpc checkpoint ls")
        return found[0]

    def checkpoints(self, job_id: int | None = None) -> tuple[Checkpoint, ...]:
        """Checkpoints of one job, or all that this user may see, oldest first."""
        return self.checkpoints_and_totals(job_id)[0]

    def checkpoints_and_totals(
        self, job_id: int | None = None
    ) -> tuple[tuple[Checkpoint, ...], tuple[CheckpointTotal, ...]]:
        """As ``checkpoints``, with the totals of all checkpoints of users and accounts, and their limits."""
        found: list[Checkpoint] = []
        totals: tuple[CheckpointTotal, ...] = ()
        after: int | None = 0
        while after is not None:
            page = self._ask(messages.ListCheckpoints(after=after, job_id=job_id), messages.CheckpointPage)
            found.extend(page.checkpoints)
            after, totals = page.more, page.totals
        return tuple(found), totals

    def remove_checkpoints(self, names: Sequence[str], older_s: float | None = None) -> Removed:
        """Remove this user's newest checkpoint of each name, or all of an age that no job can need.

        Those of all users for root and SlurmUser.
        """
        known = [name for name in dict.fromkeys(names) if CHECKPOINT_NAME.match(name)]
        wrong = tuple(name for name in dict.fromkeys(names) if not CHECKPOINT_NAME.match(name))
        done = Removed(missing=wrong)
        for first in range(0, len(known) or 1, messages.MAX_SERIALS):
            some = tuple(known[first : first + messages.MAX_SERIALS])
            body = messages.RemoveCheckpoints(names=some, older_s=older_s)
            more = self._ask(body, messages.CheckpointsRemoved).done
            done = Removed(
                done.removed + more.removed, done.missing + more.missing, done.in_use + more.in_use
            )
        return done


def completed(
    client: CheckpointCalls, made: Checkpoint, told: Callable[[Checkpoint], None] | None = None
) -> Checkpoint:
    """Wait for a checkpoint that has begun; returns it when it is valid or has failed.

    Args:
        client: whose `save` has returned it.
        made: the checkpoint.
        told: is called with each state of it.
    """
    while made.state in UNFINISHED:
        if told is not None:
            told(made)
        time.sleep(POLL_S)
        made = client.checkpoint(made.serial)
    return made
