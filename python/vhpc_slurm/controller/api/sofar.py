# SPDX-License-Identifier: Apache-2.0
"""The usage of running jobs until now, from the nodes' health checks; belongs to the event loop.

It is in memory only: it is for people who look at a running job, and after a restart of vhpcd nodes
report it again. A node's report at the end of a job is in the database and replaces it.
"""
# Decision: Health checks report the usage of running jobs

from __future__ import annotations

import time
from collections.abc import Callable

from vhpc_slurm.controller.api.usage_messages import ReportUsageSoFar, SoFarWire
from vhpc_slurm.model import GuestUsage, LeaseRecord, LeaseState
from vhpc_slurm.record import Record


class _Said(Record, frozen=True):
    """When a node has said it, on the clock of UsageSoFar, and what."""

    at: float
    guests: tuple[GuestUsage, ...]


def _has_figures(said: _Said) -> bool:
    return any(not guest.missing for guest in said.guests)


class UsageSoFar:
    """The last report of each node that has running jobs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` never jumps."""
        self._clock = clock
        self._said: dict[str, dict[str, _Said]] = {}

    def report(self, request: ReportUsageSoFar) -> None:
        """Keep what a node says, in place of its earlier report.

        Of a generation whose guests did not answer this time the earlier figures stay, with their age.
        """
        before = self._said.pop(request.node, {})
        now = {one.generation: _Said(self._clock(), one.guests) for one in request.used}
        for generation, said in now.items():
            earlier = before.get(generation)
            if earlier is not None and not _has_figures(said) and _has_figures(earlier):
                now[generation] = earlier
        if now:
            self._said[request.node] = now

    def ended(self, generation: str, node: str) -> None:
        """The node has reported what the generation has used in all."""
        said = self._said.get(node, {})
        if said.pop(generation, None) is not None and not said:
            del self._said[node]

    def of(self, record: LeaseRecord) -> list[SoFarWire]:
        """Reports of those nodes that still have guests of a lease, in the order of the nodes' names."""
        if record.lease.state is LeaseState.RELEASED:
            return []
        generation, now = str(record.lease.generation), self._clock()
        found = []
        for node in sorted(set(record.lease.allocation.node_names) - set(record.acknowledged)):
            said = self._said.get(node, {}).get(generation)
            if said is not None:
                found.append(SoFarWire(node=node, age_s=now - said.at, guests=said.guests))
        return found
