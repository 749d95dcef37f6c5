# SPDX-License-Identifier: Apache-2.0
"""Time of a step of 500 tasks of `true` on one node, in a guest and without.

Two jobs run on one node, one of them in a guest. From the login node `srun
--jobid=... --overlap --overcommit -n500 true` starts steps alternately in the two
jobs; 512 is the most that Slurm starts on a node by default. The target is a
median of at most 1.5 times that without a guest.
"""

from __future__ import annotations

import argparse

from vhpcbench.common import USER, Lab, Report, main
from vhpcbench.targets import at_most

TASKS = 500
TARGETS = (at_most(1.5, f"step of {TASKS} tasks to the same without a guest"),)
# $1, $2: jobs; $3: rounds; $4: tasks. The first two steps warm up both jobs.
LOOP = """
step() { a=$EPOCHREALTIME; srun --jobid=$1 --overlap -O -n$2 true || exit 1; b=$EPOCHREALTIME
         echo $(( ${b/./} - ${a/./} )); }
step $1 1 >/dev/null; step $2 1 >/dev/null
for i in $(seq $3); do echo $(step $1 $4) $(step $2 $4); done
"""


def run() -> int:
    """Entry point."""
    return main("tasks", __doc__ or "", 5, bench)


def bench(args: argparse.Namespace) -> Report:
    """Start steps alternately in both jobs."""
    lab = Lab()
    report = Report("tasks")
    jobs: list[int] = []
    try:
        jobs.append(lab.hold(f"--vhpc-image={args.image}", "--mem=1500"))
        jobs.append(lab.hold())
        words = map(str, [*jobs, args.rounds, TASKS])
        out = lab.run("login", "bash", "-c", LOOP, "loop", *words, user=USER, timeout_s=500)
    finally:
        lab.cancel(*jobs)
    rows = [[int(word) / 1e6 for word in line.split()] for line in out.splitlines()]
    ours = report.add(f"{TASKS} tasks, in a guest", "s", [row[0] for row in rows])
    theirs = report.add(f"{TASKS} tasks, without a guest", "s", [row[1] for row in rows])
    report.ratios["in a guest to without"] = ours.median / theirs.median
    report.judge(TARGETS[0], ours.median / theirs.median)
    return report
