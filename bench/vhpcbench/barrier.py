# SPDX-License-Identifier: Apache-2.0
"""Messages of the ready barrier, for 8 and 1,000 nodes: a real vhpcd and munged, simulated nodes.

All nodes report at once that they have passed, each in a connection of its own;
the first node also waits. Until vhpcd has told the first node that none is
missing. The messages are sealed before, since each node has its own CPU for
that. The reference is the same number of lease reads, without durable writes.
Needs no lab, but munged: `make deps`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from controller_lab import munged
from vhpcd_fabric import a_vhpcd, opened
from vhpcd_process import Vhpcd

from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.wire_types import ReadyState
from vhpcbench import sealed
from vhpcbench.common import CHECKOUT, BenchError, Report, main
from vhpcbench.targets import under

SIZES = (8, 1000)
LIMITS = {size: under(0.2, f"all of {size:,} nodes have passed", "s") for size in SIZES}
TARGETS = tuple(LIMITS.values())
LIMIT_S = 60.0


def run() -> int:
    """Entry point."""
    os.environ["PYTHONPATH"] = str(CHECKOUT / "python")  # for the processes that it starts
    return main("barrier", __doc__ or "", 7, bench)


def bench(args: argparse.Namespace) -> Report:
    """Barriers of each size, alternately with lease reads."""
    report = Report("barrier")
    with munged() as daemon, tempfile.TemporaryDirectory(prefix="bench-barrier-") as folder:
        Path(folder).chmod(0o755)
        with a_vhpcd(Path(folder), daemon, None) as vhpcd:
            for size in SIZES:
                names = [f"n{number}" for number in range(size)]
                passed, reads = [], []
                for turn in range(args.rounds):
                    passed.append(_barrier(vhpcd, size * 100 + turn, names))
                    reads.append(_reads(vhpcd, size * 100 + turn, names))
                    vhpcd.client.ending(size * 100 + turn, 0)
                ours = report.add(f"{size} nodes: all have passed", "s", passed)
                report.add(f"{size} nodes: lease reads", "s", reads)
                report.ratios[f"{size} nodes, barrier to reads"] = statistics.median(
                    a / b for a, b in zip(passed, reads, strict=True)
                )
                report.judge(LIMITS[size], ours.median)
    return report


def _barrier(vhpcd: Vhpcd, job: int, names: list[str]) -> float:
    lease = opened(vhpcd, job, *names)
    frames = [
        sealed.frame(
            vhpcd,
            wire.ReportReady(
                generation=str(lease.generation),
                node=name,
                state="passed",
                kind="",
                line="",
                about=(),
                wait_s=LIMIT_S / 2 if name == names[0] else 0.0,
            ),
        )
        for name in names
    ]
    took, answer = asyncio.run(_ask_all(vhpcd, frames))
    if not isinstance(answer, ReadyState) or answer.missing:
        raise BenchError(f"vhpcd did not tell the first node that all have passed, but {answer}")
    return took


def _reads(vhpcd: Vhpcd, job: int, names: list[str]) -> float:
    frames = [
        sealed.frame(vhpcd, wire.GetLease(job_id=job, restart=0, node=name, wait_s=0)) for name in names
    ]
    took, answer = asyncio.run(_ask_all(vhpcd, frames))
    if not isinstance(answer, wire.LeaseAnswer):
        raise BenchError(f"vhpcd did not answer with a lease but {answer}")
    return took


async def _ask_all(vhpcd: Vhpcd, frames: list[bytes]) -> tuple[float, object]:
    """Seconds until the first is answered completely, and all others too; the answer to the first."""
    began = time.perf_counter()
    answers = await sealed.ask_all(vhpcd, frames, len(frames), LIMIT_S)
    spent = time.perf_counter() - began
    return spent, sealed.opened(vhpcd, answers[0])


if __name__ == "__main__":
    raise SystemExit(run())
