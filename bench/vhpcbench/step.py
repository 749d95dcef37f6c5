# SPDX-License-Identifier: Apache-2.0
"""Time that `srun` takes longer from inside a guest: steps of one job, started in its guest and outside.

Outside, `srun --jobid=... --overlap true` runs on the login node. Inside, a
step's script runs `srun --overlap true`, which the host runs for the guest. All
tasks run in the guest. Blocks of five alternate; each side has its own clock.
The target is an added median of less than 50 ms.
"""

from __future__ import annotations

import argparse
import statistics

from vhpcbench.common import USER, Lab, Report, main
from vhpcbench.targets import under

TARGETS = (under(50, "added median", "ms"),)
BLOCK = 5
# The first step warms up.
LOOP = """
one() { a=$EPOCHREALTIME; srun %s --overlap -n1 true </dev/null || exit 1; b=$EPOCHREALTIME
        echo $(( ${b/./} - ${a/./} )); }
one >/dev/null; for i in 1 2 3 4 5; do one; done
"""


def run() -> int:
    """Entry point."""
    return main("step", __doc__ or "", 8, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run blocks of steps, alternately inside and outside."""
    lab = Lab()
    report = Report("step")
    inside: list[float] = []
    outside: list[float] = []
    job = lab.hold(f"--vhpc-image={args.image}")
    try:
        enter = ["srun", f"--jobid={job}", "--overlap", "-n1", "bash", "-c", LOOP % ""]
        for _ in range(args.rounds):
            inside += _times(lab.run("login", *enter, user=USER))
            outside += _times(lab.run("login", "bash", "-c", LOOP % f"--jobid={job}", user=USER))
    finally:
        lab.cancel(job)
    ours = report.add("srun true, from inside the guest", "ms", inside)
    theirs = report.add("srun true, from outside", "ms", outside)
    added = statistics.median(
        statistics.median(inside[at : at + BLOCK]) - statistics.median(outside[at : at + BLOCK])
        for at in range(0, len(inside), BLOCK)
    )
    report.ratios["inside to outside"] = ours.median / theirs.median
    report.judge(TARGETS[0], added)
    return report


def _times(out: str) -> list[float]:
    return [int(line) / 1000 for line in out.splitlines()]
