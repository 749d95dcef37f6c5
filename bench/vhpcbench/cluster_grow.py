# SPDX-License-Identifier: Apache-2.0
"""Jobs that join and leave a cluster, until the nodes of all its members know it.

Without --lab: a real vhpcd and munged, and the questions of simulated nodes, one for each of 1, 8, 32 and
1,000 members. All nodes wait for changes; one job more joins, and ends again. Until all nodes have the answer
and have acknowledged it, CPU time of vhpcd for each change and node. Then 32 jobs join at once. The reference
is a read of a lease by each node. vhpcd and munged share this machine's CPUs with the program that asks for
all nodes. Needs no lab, but munged: `make deps`.

With --lab: real jobs, in clusters of 1, 8 and 32 jobs as far as the lab has CPUs for them and for one more
(`lab/vlab up --nodes 17`). Join is from the moment when the guest of a new job is set up until the files of
all members' guests name it; leave is from scancel until none does. The reference is the boot of a job with a
network and without a cluster.

The target: within 2 s all know a change, and vhpcd takes less than 10 ms of CPU time for each change and
node.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from cluster_process import allow_clusters, member
from controller_lab import Munged
from vhpcd_process import Vhpcd

from vhpc_slurm.controller.api import cluster_messages as messages
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.model import Generation, Lease
from vhpcbench import cluster_members, counted, sealed
from vhpcbench.common import CHECKOUT, BenchError, Report, main
from vhpcbench.targets import at_most, under

SIZES = (1, 8, 32, 1000)
TOGETHER = 32
USER, CLUSTER = "games", "grow"
KNOWN = at_most(2, "until all know a change", "s")
COST = under(10, "CPU time of vhpcd for a change and node", "ms")
TARGETS = (KNOWN, COST)
LAB_TARGETS = (KNOWN,)
LIMIT_S, WAIT_S = 120.0, 100.0
AWAY_S = 1.0
"""Pause of a node that vhpcd has not answered, as the follower of a job's node makes it."""
QUIET_S = 0.4


@dataclass(frozen=True)
class Change:
    """Seconds until all nodes had the answer, and had acknowledged it; CPU seconds of vhpcd and of munged."""

    known_s: float
    settled_s: float
    vhpcd_s: float
    munged_s: float


def run() -> int:
    """Entry point."""
    os.environ["PYTHONPATH"] = str(CHECKOUT / "python")  # for the processes that it starts
    return main("cluster-grow", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lab", action="store_true", help="real jobs of the lab")
    parser.add_argument("--sizes", help="members, ascending (default 1,8,32, and 1000 simulated ones)")


def bench(args: argparse.Namespace) -> Report:
    """Clusters of all sizes, one after the other."""
    report = Report("cluster-grow")
    if args.lab:
        sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else SIZES[:-1]
        slowest = cluster_members.measure(report, sizes, args.rounds, args.image)
        if slowest:
            report.judge(KNOWN, slowest)
        return report
    sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else SIZES
    costs, waits = [], []
    for size in sizes:
        with _site(size) as site:
            found = site.measure(report, args.rounds)
        costs.append(found[0])
        waits.append(found[1])
    report.judge(KNOWN, max(waits))
    report.judge(COST, max(costs))
    return report


@contextmanager
def _site(size: int) -> Iterator[Site]:
    """A vhpcd with a cluster of so many jobs."""
    names = [f"n{number}" for number in range(size + TOGETHER)]
    with sealed.timed_vhpcd("grow", lambda vhpcd: allow_clusters(vhpcd, *names)) as (vhpcd, daemon):
        yield Site(vhpcd, daemon, names[:size], names[size:])


class Site:
    """A cluster, and nodes for further jobs."""

    def __init__(self, vhpcd: Vhpcd, daemon: Munged, members: Sequence[str], free: Sequence[str]) -> None:
        self._vhpcd, self._daemon, self._free = vhpcd, daemon, free
        self._next, self._version = 1, 0
        self._members = [(self._begin(node, joins=True).generation, node) for node in members]
        asyncio.run(self._ask(self._questions(self._version, 0.0)))

    def _begin(self, node: str, *, joins: bool) -> Lease:
        lease = member(self._vhpcd, self._next, USER, CLUSTER, node, joins=joins)
        self._next += 1
        self._version += joins
        return lease

    def measure(self, report: Report, rounds: int) -> tuple[float, float]:
        """Add the figures; the largest median of milliseconds for a change and node, and of seconds."""
        size = len(self._members)
        found: dict[str, list[Change]] = {"join": [], "leave": []}
        together, reads = [], []
        for _ in range(rounds):
            lease = self._begin(self._free[0], joins=False)
            found["join"].append(self._change(partial(self._pass, lease, self._free[0])))
            found["leave"].append(self._change(partial(self._end, lease)))
            together.append(self._together())
            reads.append(self._reads())
        costs, waits = [], []
        for what, changes in found.items():
            waits.append(
                report.add(f"{size} members, {what}: all nodes know", "s", [one.known_s for one in changes])
            )
            report.add("    and have acknowledged", "s", [one.settled_s for one in changes])
            costs.append(
                report.add("    CPU of vhpcd for a node", "ms", [1e3 * one.vhpcd_s / size for one in changes])
            )
        report.add(f"    {TOGETHER} joins at once: acknowledged", "s", [one.settled_s for one in together])
        each = 1e3 / (size * TOGETHER)
        costs.append(
            report.add("    CPU for a join and node", "ms", [each * one.vhpcd_s for one in together])
        )
        report.add("    reads of leases", "s", [one.settled_s for one in reads])
        read = report.add("    CPU for a read", "ms", [1e3 * one.vhpcd_s / size for one in reads])
        name = f"{size} members, CPU of a join and node to a read"
        report.ratios[name] = costs[0].median / read.median
        return max(one.median for one in costs), max(one.median for one in waits)

    def _pass(self, lease: Lease, node: str) -> None:
        self._vhpcd.client.ready(lease.generation, node, "passed")

    def _end(self, lease: Lease) -> None:
        self._vhpcd.client.ending(lease.generation.job_id, None)

    def _question(self, generation: Generation, node: str, applied: int, wait_s: float) -> bytes:
        body = messages.AskRoster(generation=str(generation), node=node, applied=applied, wait_s=wait_s)
        return sealed.frame(self._vhpcd, body)

    def _questions(self, applied: int, wait_s: float) -> list[bytes]:
        return [self._question(generation, node, applied, wait_s) for generation, node in self._members]

    async def _ask(self, frames: list[bytes]) -> list[bytes]:
        return await sealed.ask_all(self._vhpcd, frames, len(frames), LIMIT_S)

    def _version_of(self, answer: bytes) -> int:
        found = sealed.opened(self._vhpcd, answer)
        if not isinstance(found, messages.RosterAnswer):
            raise BenchError(f"vhpcd did not answer with a roster but {found}")
        return found.roster.version

    def _cpu(self) -> tuple[float, float]:
        assert self._vhpcd.process is not None
        return counted.precise_s(self._vhpcd.process.pid), counted.precise_s(self._daemon.process.pid)

    async def _quiet(self) -> None:
        """Wait until vhpcd has taken all questions."""
        last, now = -1.0, self._cpu()[0]
        while now - last > QUIET_S / 20:
            await asyncio.sleep(QUIET_S)
            last, now = now, self._cpu()[0]

    def _change(self, act: Callable[[], None]) -> Change:
        """All nodes wait; something changes once; they have the answers, and ask again."""

        async def change() -> Change:
            questions = self._questions(self._version, WAIT_S)
            acknowledgements = self._questions(self._version + 1, 0.0)
            waiting = asyncio.create_task(self._ask(questions))
            await self._quiet()
            before, began = self._cpu(), time.perf_counter()
            await asyncio.to_thread(act)
            answers = await waiting
            known = time.perf_counter() - began
            await self._ask(acknowledgements)
            settled, after = time.perf_counter() - began, self._cpu()
            self._version += 1
            if self._version_of(answers[-1]) != self._version:
                raise BenchError("the last node was not told of the change")
            return Change(known, settled, after[0] - before[0], after[1] - before[1])

        return asyncio.run(change())

    def _together(self) -> Change:
        """Many jobs join at once; each node asks again until it knows all of them."""
        new = [self._begin(node, joins=False) for node in self._free]
        target = self._version + len(new)

        async def follow(generation: Generation, node: str) -> None:
            applied, wait_s = self._version, WAIT_S
            while True:
                frame = await asyncio.to_thread(self._question, generation, node, applied, wait_s)
                try:
                    (answer,) = await self._ask([frame])
                except BenchError:  # busy for longer than vhpcd waits for a request
                    await asyncio.sleep(AWAY_S)
                    continue
                if wait_s == 0:
                    return
                applied = await asyncio.to_thread(self._version_of, answer)
                wait_s = WAIT_S if applied < target else 0.0

        async def change() -> Change:
            waiting = [asyncio.create_task(follow(*one)) for one in self._members]
            await self._quiet()
            before, began = self._cpu(), time.perf_counter()
            with ThreadPoolExecutor(len(new)) as threads:
                joining = threads.map(self._pass, new, self._free)
                try:
                    async with asyncio.timeout(LIMIT_S):
                        await asyncio.gather(*waiting)
                except TimeoutError as err:
                    raise BenchError(f"not all nodes know of all members after {LIMIT_S:g} s") from err
                list(joining)
            took, after = time.perf_counter() - began, self._cpu()
            return Change(took, took, after[0] - before[0], after[1] - before[1])

        found = asyncio.run(change())
        for lease in new:
            self._end(lease)
        self._version = target + len(new)
        asyncio.run(self._ask(self._questions(self._version, 0.0)))
        return found

    def _reads(self) -> Change:
        """Each node reads the lease of its job."""
        frames = [
            sealed.frame(
                self._vhpcd, wire.GetLease(job_id=generation.job_id, restart=0, node=node, wait_s=0.0)
            )
            for generation, node in self._members
        ]
        before, began = self._cpu(), time.perf_counter()
        asyncio.run(self._ask(frames))
        took, after = time.perf_counter() - began, self._cpu()
        return Change(took, took, after[0] - before[0], after[1] - before[1])


if __name__ == "__main__":
    raise SystemExit(run())
