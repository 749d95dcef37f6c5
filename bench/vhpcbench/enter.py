# SPDX-License-Identifier: Apache-2.0
"""Time that a guest adds to `srun true`: two jobs run on one node, one of them in a guest.

From the login node `srun --jobid=... --overlap true` starts steps alternately in
the two jobs. The target is an added median of less than 10 ms.
"""

from __future__ import annotations

import argparse
import statistics

from vhpcbench.common import USER, Lab, Report, main
from vhpcbench.targets import under

TARGETS = (under(10, "added median", "ms"),)
# $1, $2: jobs; $3: rounds. The first two steps warm up both jobs.
LOOP = """
one() { a=$EPOCHREALTIME; srun --jobid=$1 --overlap -n1 true || exit 1; b=$EPOCHREALTIME
        echo $(( ${b/./} - ${a/./} )); }
one $1 >/dev/null; one $2 >/dev/null
for i in $(seq $3); do echo $(one $1) $(one $2); done
"""


def run() -> int:
    """Entry point."""
    return main("enter", __doc__ or "", 40, bench)


def bench(args: argparse.Namespace) -> Report:
    """Start steps alternately in both jobs."""
    lab = Lab()
    report = Report("enter")
    jobs: list[int] = []
    try:
        jobs.append(lab.hold(f"--vhpc-image={args.image}"))
        jobs.append(lab.hold())
        out = lab.run("login", "bash", "-c", LOOP, "loop", *map(str, [*jobs, args.rounds]), user=USER)
    finally:
        lab.cancel(*jobs)
    rows = [[int(word) / 1000 for word in line.split()] for line in out.splitlines()]
    ours = report.add("srun true, in a guest", "ms", [row[0] for row in rows])
    theirs = report.add("srun true, without a guest", "ms", [row[1] for row in rows])
    report.add("added, by pairs", "ms", [row[0] - row[1] for row in rows])
    added = statistics.median(row[0] - row[1] for row in rows)
    report.ratios["in a guest to without"] = ours.median / theirs.median
    report.judge(TARGETS[0], added)
    return report
