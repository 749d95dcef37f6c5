# SPDX-License-Identifier: Apache-2.0
"""Requests of the keepers of one job to vhpcd for one checkpoint, with 128 and 1,000 nodes.

A real vhpcd and munged, and the requests of simulated keepers: each asks for orders, then reports that its
guests are prepared, held, saved, and that they continue. As in a job all keepers wait for the same order at
the same time, each in a connection of its own; the last one to report releases them. Requests are sealed
before, since each node has a CPU of its own for that; munged and vhpcd share this machine's CPUs with the
program that sends them. Of each kind: seconds until all are answered, and CPU time of vhpcd and of munged for
each node. At the end the size of the database. Needs no lab, but munged: `make deps`.

The target: vhpcd adds at most two seconds to the pause of a job of the largest size, from the first report of
held guests until the last keeper knows that they continue.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint_rig import nodes, saved
from controller_lab import Munged, request
from vhpcd_process import Vhpcd

from vhpc_slurm.controller.api import checkpoint_messages as messages
from vhpc_slurm.model import KeeperReport, KeeperState, Lease, OrderKind
from vhpcbench import counted, sealed
from vhpcbench.common import CHECKOUT, BenchError, Report, main
from vhpcbench.targets import at_most

SIZES = (128, 1000)
LIMIT_S = 60.0
WAIT_S = 30.0
TARGETS = (at_most(2, "added to the pause of the largest job", "s"),)
JOB = 1
RUNNING = CHECKOUT / "tests/data/scontrol/24.11/single.txt"
"""slurmctld's answer about job 1."""
Asked = tuple[float, float, float]
"""Seconds until all nodes have their answers, CPU seconds of vhpcd and of munged."""
PAUSED = ("held", "saved")
"""Reports during which programs stand still."""


def run() -> int:
    """Entry point."""
    os.environ["PYTHONPATH"] = str(CHECKOUT / "python")  # for the processes that it starts
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return main("checkpoint-requests", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=sizes, help=f"nodes of the jobs, ascending (default {sizes})")


def _running(vhpcd: Vhpcd) -> None:
    """Slurm says that the job runs."""
    shutil.copyfile(RUNNING, vhpcd.folder / "scontrol.out")
    (vhpcd.folder / "squeue.out").write_text(f"{JOB} 0 RUNNING None 2026-11-20T18:47:20\n")


def bench(args: argparse.Namespace) -> Report:
    """Checkpoints of a job of each size."""
    report, paused = Report("checkpoint-requests"), 0.0
    for size in (int(text) for text in args.sizes.split(",")):
        with sealed.timed_vhpcd("ck", _running) as (vhpcd, daemon):
            paused = _add(report, vhpcd, daemon, size, args.rounds)
    report.judge(TARGETS[0], paused)
    return report


def _add(report: Report, vhpcd: Vhpcd, daemon: Munged, size: int, rounds: int) -> float:
    """Add the figures of one size; returns the seconds of all requests while programs stand still."""
    lease = vhpcd.client.open_generation(request(JOB), nodes(*(f"n{number:05}" for number in range(size))))
    state = Path(vhpcd.config.controller.database).parent

    def stored() -> int:
        return sum(path.stat().st_size for path in state.glob("leases.sqlite*"))

    before = stored()
    found: dict[str, list[Asked]] = {}
    for _ in range(rounds):
        for what, one in _checkpoint(vhpcd, daemon, lease).items():
            found.setdefault(what, []).append(one)
    total = 0.0
    for what, figures in found.items():
        report.add(f"{size} nodes, {what}", "s", [seconds for seconds, _, _ in figures])
        ours, theirs = (1e3 * statistics.median(each[at] for each in figures) / size for at in (1, 2))
        report.notes.append(
            f"{size} nodes, {what}: CPU for each node: vhpcd {ours:.3f} ms, munged {theirs:.3f} ms"
        )
        total += ours + theirs
    report.notes.append(f"{size} nodes: all {len(found)} requests of a node: {total:.2f} ms of CPU time")
    kept = (stored() - before) / rounds / size
    report.notes.append(f"{size} nodes: database: {kept:.0f} bytes for each node of each checkpoint")
    return sum(statistics.median(each[0] for each in found[what]) for what in PAUSED)


def _checkpoint(vhpcd: Vhpcd, daemon: Munged, lease: Lease) -> dict[str, Asked]:
    """One checkpoint: for each kind of request seconds until all are answered, CPU of vhpcd and munged."""
    serial = vhpcd.client.save(JOB).serial
    names = lease.allocation.node_names
    own = str(lease.generation)

    def send(
        order: OrderKind, report: Callable[[int, str], KeeperReport | None]
    ) -> tuple[float, float, float]:
        waits = 0.0 if order is OrderKind.WAIT else WAIT_S
        frames = [
            sealed.frame(
                vhpcd,
                messages.AskOrder(generation=own, node=name, report=report(rank, name), wait_s=waits),
            )
            for rank, name in enumerate(names)
        ]
        before, began = _cpu(vhpcd, daemon), time.perf_counter()
        answers = asyncio.run(sealed.ask_all(vhpcd, frames, len(frames), LIMIT_S))
        seconds, after = time.perf_counter() - began, _cpu(vhpcd, daemon)
        for one in (answers[0], answers[-1]):
            answer = sealed.opened(vhpcd, one)
            if not isinstance(answer, messages.OrderAnswer) or answer.order.kind is not order:
                raise BenchError(f"vhpcd did not order {order} but {answer}")
        return seconds, after[0] - before[0], after[1] - before[1]

    def plain(state: KeeperState) -> Callable[[int, str], KeeperReport]:
        return lambda _rank, _name: KeeperReport(serial, state)

    return {
        "ask": send(OrderKind.PREPARE, lambda _rank, _name: None),
        "prepared": send(OrderKind.HOLD, plain(KeeperState.PREPARED)),
        "held": send(OrderKind.SAVE, plain(KeeperState.HELD)),
        "saved": send(
            OrderKind.CONTINUE,
            lambda rank, name: KeeperReport(serial, KeeperState.SAVED, saved(name, rank)),
        ),
        "continue": send(
            OrderKind.WAIT,
            lambda rank, _name: KeeperReport(serial, KeeperState.CONTINUED, paused_s=10.0 + rank % 97 / 100),
        ),
    }


def _cpu(vhpcd: Vhpcd, daemon: Munged) -> tuple[float, float]:
    assert vhpcd.process is not None
    found = counted.all_processes()
    return found[vhpcd.process.pid].own_s, found[daemon.process.pid].own_s


if __name__ == "__main__":
    raise SystemExit(run())
