# SPDX-License-Identifier: Apache-2.0
"""How far the boots of jobs are, as nodes say while they ask whether their job still exists.

It is for people who wait, so it is in memory only: after a restart of vhpcd nodes say it again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from vhpc_slurm.controller import wire_types
from vhpc_slurm.model import LeaseRecord, LeaseState

JOBS, WAITERS = 4096, 4096
"""Jobs and waiting commands that are remembered; the oldest are forgotten first."""
SAID = 4
"""Nodes of a job that are named."""
LONGEST_S = 3600.0
"""After this time no job counts as booting: a node's report may have been lost."""


class Progress:
    """Belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` never jumps."""
        self._clock = clock
        self._doing: OrderedDict[tuple[int, int], dict[str, tuple[str, float]]] = OrderedDict()
        self._waiters: OrderedDict[str, int] = OrderedDict()

    def waits(self, waiter: str, job_id: int) -> None:
        """A command with this word waits for a job; of several components the first counts."""
        if waiter:
            self._waiters.setdefault(waiter, job_id)
            if len(self._waiters) > WAITERS:
                self._waiters.popitem(last=False)

    def job_of(self, waiter: str) -> int | None:
        """The job that a command waits for; None before its lease is asked for."""
        return self._waiters.get(waiter)

    def doing(self, job_id: int, restart: int, node: str, stage: str, for_s: float) -> None:
        """A node has been in a stage for some seconds."""
        nodes = self._doing.setdefault((job_id, restart), {})
        nodes[node] = (stage, self._clock() - max(0.0, for_s))
        if len(self._doing) > JOBS:
            self._doing.popitem(last=False)

    def over(self, job_id: int) -> None:
        """The job has ended."""
        for key in [key for key in self._doing if key[0] == job_id]:
            del self._doing[key]

    def of(self, record: LeaseRecord, done: Collection[str], now: float) -> wire_types.ProgressWire | None:
        """How far a job is, if it boots; ``done`` are the nodes whose Prolog has ended.

        ``now`` in seconds since the epoch.
        """
        lease, generation = record.lease, record.lease.generation
        names = lease.allocation.node_names
        ready = len(set(names) & set(done))
        if (
            lease.state not in (LeaseState.RESERVED, LeaseState.READY)
            or ready == len(names)
            or now - record.created > LONGEST_S
        ):
            return None
        known = self._doing.get((generation.job_id, generation.restart), {})
        left = sorted((since, node, stage) for node, (stage, since) in known.items() if node not in done)
        return wire_types.ProgressWire(
            generation=str(generation),
            nodes=len(names),
            ready=ready,
            doing=tuple((node, stage, self._clock() - since) for since, node, stage in left[:SAID]),
        )
