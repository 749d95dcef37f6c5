# SPDX-License-Identifier: Apache-2.0
"""Brings the requests of a heterogeneous job's components together.

Slurm starts all components at once, on different nodes, and runs a PrologSlurmctld for each. The
leases of those that share a network are made together, so each waits here until every other one
has been announced: by its own request for a lease, or by the report that it needs no network.
Nothing of this is stored: if vhpcd is restarted, the hooks that wait send their requests again.
"""
# Decision: Components of a heterogeneous job get their leases in one transaction

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import Allocation, HetPlace, JobRequest

MAX_JOBS = 1000
"""Most heterogeneous jobs in memory; the oldest one without a waiting component is forgotten first."""

Component = tuple[JobRequest, Allocation]


class LateError(FabricError):
    """A component was not announced in time."""


@dataclass
class _Group:
    """A heterogeneous job that starts: its known requests by the offsets of its components.

    ``components`` is their number, 0 while no request has told it.  Restart counts are not compared:
    Slurm counts a start that it takes back only for the components that had started already.
    """

    complete: asyncio.Future[tuple[Component, ...]]
    components: int = 0
    requests: dict[int, Component] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)

    def absent(self) -> list[int]:
        return [
            number for number in range(self.components) if number not in self.requests.keys() | self.apart
        ]


class Components:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def apart(self, leader: int, offset: int) -> None:
        """A component has no guests, or no job network: the others need not wait for it."""
        group = self._group(leader)
        group.apart.add(offset)
        group.requests.pop(offset, None)
        self._settle(leader, group)

    async def gather(self, job: JobRequest, allocation: Allocation, wait_s: float) -> tuple[Component, ...]:
        """The requests of all components with a job network, in their order, this one among them.

        Raises:
            LateError: a component was not announced in time.
            FabricError: a component is of another user.
        """
        place = job.het
        assert place is not None
        leader, own = place.leader, (job, allocation)
        group = self._group(leader)
        group.components = place.components
        group.apart.discard(place.offset)
        group.requests[place.offset] = own
        self._settle(leader, group)
        try:
            found = await asyncio.wait_for(asyncio.shield(group.complete), wait_s)
        except TimeoutError as err:
            raise _late(place, group.absent()) from err
        finally:
            if not group.complete.done() and group.requests.get(place.offset) is own:
                del group.requests[place.offset]
        if any(other.uid != job.uid for other, _ in found):
            raise FabricError(f"the components of heterogeneous job {place.leader} are of different users")
        return found

    def _settle(self, leader: int, group: _Group) -> None:
        """Give all waiting components their answer when the last one has been announced."""
        if group.requests and not group.absent():
            group.complete.set_result(tuple(group.requests[offset] for offset in sorted(group.requests)))
            del self._groups[leader]

    def _group(self, leader: int) -> _Group:
        if leader not in self._groups:
            self._groups[leader] = _Group(asyncio.get_running_loop().create_future())
            idle = [old for old, one in self._groups.items() if old != leader and not one.requests]
            for old in idle[: max(0, len(self._groups) - MAX_JOBS)]:
                del self._groups[old]
        return self._groups[leader]


def _late(place: HetPlace, absent: list[int]) -> LateError:
    numbers = ", ".join(str(number) for number in absent[:8])
    return LateError(
        f"component {numbers} of heterogeneous job {place.leader} has not been announced to vhpcd",
        "its PrologSlurmctld did not run, or did not reach vhpcd",
        "see the log of slurmctld; --vhpc-network=none in the other components does not need it",
    )
