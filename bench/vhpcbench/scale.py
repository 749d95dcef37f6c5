# SPDX-License-Identifier: Apache-2.0
"""What the nodes of one large job ask vhpcd, from the start to the end of the job, for 128 to 10,000 nodes.

A real vhpcd and munged, and the requests of simulated nodes: each takes the lease, reports its timeline when
its guests are ready, looks at the lease in Epilog, reports what its guests have used, and acknowledges the
end; before and after, PrologSlurmctld opens the lease and EpilogSlurmctld ends it. All requests of a kind are
sent as fast as they are answered, in at most 500 connections at once. They are sealed before, since each node
has a CPU of its own for that; munged and vhpcd share this machine's CPUs with the program that sends them.
Of each kind: seconds until all are answered, CPU time of vhpcd and of munged for each node, bytes of an
answer. At the end the size of the database. Before all this, without any daemon: what one answer with a lease
has in bytes, without a network of the job and with one, compressed as munged does it, and how long both take.
Needs no lab, but munged: `make deps`.

The target: requests of a node of the largest job cost vhpcd and munged at most twice as much as those of a
node of the smallest one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller_lab import Munged, allocation, identity, request
from vhpcd_fabric import opened
from vhpcd_process import Vhpcd

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.api import usage_messages
from vhpc_slurm.controller.wire_types import LeaseWire, TimelineWire
from vhpc_slurm.model import (
    Figures,
    Generation,
    GuestPlacement,
    GuestUsage,
    Lease,
    LeaseState,
    NodeReport,
    Segment,
    SharedIo,
    Stage,
    StepUsage,
)
from vhpcbench import counted, sealed
from vhpcbench.common import CHECKOUT, BenchError, Report, main
from vhpcbench.targets import at_most

SIZES = (128, 1000, 10_000)
AT_ONCE = 500
SEALED = 2000
"""So many requests are sealed before they are sent: a credential is valid for a minute."""
TARGETS = (at_most(2, "CPU time for a node of the largest job to one of the smallest"),)
LIMIT_S = 600.0
REPEATED = 20
STAGES = (
    "python",
    "lease",
    "modules",
    "shares",
    "plan",
    "image",
    "cgroup",
    "start g0",
    "agent g0",
    "setup g0",
)
USED = Figures(3_600_000_000, 3_500_000_000, 100_000_000, 1 << 33, 1 << 31, 1 << 30, 1 << 30, 0)


@dataclass(frozen=True)
class Asked:
    """All requests of one kind of a job: seconds until answered, CPU seconds, bytes of an answer."""

    seconds: float
    vhpcd_s: float
    munged_s: float
    answer: int


def run() -> int:
    """Entry point."""
    os.environ["PYTHONPATH"] = str(CHECKOUT / "python")  # for the processes that it starts
    return main("scale", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=sizes, help=f"nodes of the jobs, ascending (default {sizes})")


def bench(args: argparse.Namespace) -> Report:
    """Jobs of all sizes in turns."""
    report = Report("scale")
    sizes = [int(size) for size in args.sizes.split(",")]
    for size in sizes:
        report.notes += [answered(size, network=network) for network in (False, True)]
    found: dict[int, dict[str, list[Asked]]] = {size: {} for size in sizes}
    with sealed.timed_vhpcd("scale") as (vhpcd, daemon):
        for turn in range(args.rounds):
            for at, size in enumerate(sizes):
                for what, asked in _life(vhpcd, daemon, 10 * (turn + 1) + at, size).items():
                    found[size].setdefault(what, []).append(asked)
        assert vhpcd.process is not None
        now, peak = counted.memory_mib(vhpcd.process.pid)
        report.notes.append(f"memory of vhpcd: {now:.0f} MiB, peak {peak:.0f}")
        state = Path(vhpcd.config.controller.database).parent
        kept = sum(path.stat().st_size for path in state.glob("leases.sqlite*"))
        each = kept / (args.rounds * sum(sizes))
        report.notes.append(f"database: {kept / 2**20:.1f} MiB, {each:.0f} bytes for each node of each job")
    costs = [_add(report, size, kinds) for size, kinds in found.items()]
    growth = costs[-1] / costs[0]
    report.ratios["CPU of a node's requests, largest to smallest job"] = growth
    for size, cost in zip(sizes, costs, strict=True):
        report.notes.append(f"{size} nodes: the requests of a node take {cost:.2f} ms of CPU time")
    report.judge(TARGETS[0], growth)
    return report


def _add(report: Report, size: int, kinds: dict[str, list[Asked]]) -> float:
    """Add the figures of one size; returns the CPU milliseconds of all requests of a node."""
    total = 0.0
    for what, asked in kinds.items():
        report.add(f"{size} nodes, {what}", "s", [one.seconds for one in asked])
        vhpcd, sealed = (
            1e3 * statistics.median(values) / size
            for values in ([one.vhpcd_s for one in asked], [one.munged_s for one in asked])
        )
        report.notes.append(
            f"{size} nodes, {what}: CPU for each node: vhpcd {vhpcd:.3f} ms, munged {sealed:.3f} ms; "
            f"an answer has {asked[0].answer} bytes"
        )
        total += vhpcd + sealed
    return total


def answered(size: int, *, network: bool) -> str:
    """A line about one answer with the lease of a job of this size."""
    nodes = [f"node{number:05}" for number in range(size)]
    underlay = tuple(f"10.{number >> 8}.{number & 255}.17" for number in range(size))
    segment = Segment(4711, "10.200.0.0/16", "fd00:1:2:3::/64", 4789, 0, underlay) if network else None
    own = Generation(1, 0, "0123abcd")
    lease = Lease(own, LeaseState.READY, request(1), allocation(*nodes), identity(), segment=segment)
    body = wire.LeaseAnswer(lease=LeaseWire.pack(lease))
    began = time.process_time()
    raw = [wire.wrap("answer", "0" * 32, body) for _ in range(REPEATED)]
    encoded = time.process_time()
    small = [zlib.compress(text) for text in raw]
    compressed = time.process_time()
    for text in raw:
        wire.read_answer(wire.unwrap(text, "answer"))
    read = time.process_time()
    each = 1e3 / REPEATED
    return (
        f"{size} nodes, {'a' if network else 'no'} network: an answer has {len(raw[0])} bytes, compressed "
        f"{len(small[0])}; CPU: encoded in {each * (encoded - began):.2f} ms, compressed in "
        f"{each * (compressed - encoded):.2f} ms, read in {each * (read - compressed):.2f} ms"
    )


def _life(vhpcd: Vhpcd, daemon: Munged, job: int, size: int) -> dict[str, Asked]:
    """All requests of a job of this size; the job is over and its lease released then."""
    nodes = [f"n{number:05}" for number in range(size)]
    found = {}
    lease: Lease | None = None

    def start() -> None:
        nonlocal lease
        lease = opened(vhpcd, job, *nodes)

    found["opened"] = _alone(vhpcd, daemon, start)
    assert lease is not None
    own = lease.generation
    every = Sender(vhpcd, daemon, nodes)
    found["take the lease"] = every.send(
        lambda node: wire.GetLease(job_id=job, restart=0, node=node, wait_s=30.0), wire.LeaseAnswer
    )
    found["report timelines"] = every.send(
        lambda node: wire.ReportTimeline(timeline=_timeline(own, node), report=_report(own, node)), wire.Done
    )
    found["look in Epilog"] = every.send(
        lambda node: wire.GetLease(job_id=job, restart=None, node=node, wait_s=0.0, brief=True),
        wire.LeaseAnswer,
    )
    found["ended"] = _alone(vhpcd, daemon, lambda: vhpcd.client.ending(job, 0))
    found["report usage"] = every.send(lambda node: _usage(own, node), usage_messages.UsageKept)
    found["acknowledge"] = every.send(lambda node: _acknowledgement(own, node), wire.Done)
    return found


def _timeline(own: Generation, node: str) -> TimelineWire:
    stages = tuple(Stage(name, 1e9 + at, 1e9 + at + 0.1) for at, name in enumerate(STAGES))
    return TimelineWire(generation=str(own), node=node, stages=stages)


def _report(own: Generation, node: str) -> NodeReport:
    """Of a node of 64 cores that the guest has; without the picture of the node itself."""
    place = GuestPlacement(0, node, tuple(range(64)), ((0, 131072), (1, 131072)), 0, (), 0)
    return NodeReport(own, node, None, (place,), ())


def _usage(own: Generation, node: str) -> usage_messages.ReportUsage:
    steps = tuple(StepUsage(name, USED, 64) for name in ("batch", "0", "1"))
    guest = GuestUsage(0, USED, steps, 1 << 28, "", SharedIo(1 << 30, 1 << 30))
    return usage_messages.ReportUsage(generation=str(own), node=node, guests=(guest,))


def _acknowledgement(own: Generation, node: str) -> wire.Acknowledge:
    stages = (*_timeline(own, node).stages, Stage("release", 2e9, 2e9 + 0.2))
    return wire.Acknowledge(generation=str(own), node=node, clean=True, note="", stages=stages)


def _cpu(vhpcd: Vhpcd, daemon: Munged) -> tuple[float, float]:
    assert vhpcd.process is not None
    found = counted.all_processes()
    return found[vhpcd.process.pid].own_s, found[daemon.process.pid].own_s


def _alone(vhpcd: Vhpcd, daemon: Munged, ask: Callable[[], None]) -> Asked:
    """One request of the controller's hooks."""
    before, began = _cpu(vhpcd, daemon), time.perf_counter()
    ask()
    seconds, after = time.perf_counter() - began, _cpu(vhpcd, daemon)
    return Asked(seconds, after[0] - before[0], after[1] - before[1], 0)


class Sender:
    """Sends a request of each node, and reads the answers."""

    def __init__(self, vhpcd: Vhpcd, daemon: Munged, nodes: Sequence[str]) -> None:
        self._vhpcd, self._daemon, self._nodes = vhpcd, daemon, nodes

    def send(self, body: Callable[[str], wire.Request], expected: type[object]) -> Asked:
        """Seconds and CPU time until all nodes have their answers, without sealing the requests.

        Raises:
            BenchError: the last answer is another one.
        """
        seconds, ours, theirs, size = 0.0, 0.0, 0.0, 0
        for first in range(0, len(self._nodes), SEALED):
            frames = [sealed.frame(self._vhpcd, body(node)) for node in self._nodes[first : first + SEALED]]
            before, began = _cpu(self._vhpcd, self._daemon), time.perf_counter()
            answers = asyncio.run(sealed.ask_all(self._vhpcd, frames, AT_ONCE, LIMIT_S))
            seconds += time.perf_counter() - began
            after = _cpu(self._vhpcd, self._daemon)
            ours, theirs = ours + after[0] - before[0], theirs + after[1] - before[1]
            answer = sealed.opened(self._vhpcd, answers[-1])
            if not isinstance(answer, expected):
                raise BenchError(f"vhpcd did not answer with {expected.__name__} but {answer}")
            size = len(answers[-1])
        return Asked(seconds, ours, theirs, size)


if __name__ == "__main__":
    raise SystemExit(run())
