# SPDX-License-Identifier: Apache-2.0
"""The end of a job on two nodes: from its last instruction until its nodes are free in Slurm.

Alternates with the same job without a guest. The difference is the guests'
power-off, the release of their resources, and the hooks. The target, a 99th
percentile of the total below one second, is for 100 rounds on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from vhpcbench.common import Lab, Report, main
from vhpcbench.targets import under

TARGETS = (under(1, "99th percentile of the end", "s"),)
NODES = 2
MARKER = "bench-last-instruction"
# $1: the job. While its Epilogs run, a job is still in the queue, as completing.
WAIT = 'while [ -n "$(squeue -h -o %i -j $1 2>/dev/null)" ]; do sleep 0.02; done; date +%s.%N'


def run() -> int:
    """Entry point."""
    return main("end", __doc__ or "", 20, bench)


def bench(args: argparse.Namespace) -> Report:
    """Alternate between ends of jobs with and without guests."""
    lab = Lab()
    report = Report("end")
    ours, theirs, inner = [], [], []
    for _ in range(args.rounds):
        job, took = _end(lab, f"--vhpc-image={args.image}")
        ours.append(took)
        inner.append(_teardown(lab, job))
        theirs.append(_end(lab)[1])
    with_guests = report.add("last instruction to free nodes, with guests", "s", ours)
    without = report.add("the same without guests", "s", theirs)
    report.add("power off and release, the slower node", "s", inner)
    report.ratios["with guests to without"] = with_guests.median / without.median
    for name, values in (("with guests", ours), ("without", theirs), ("power off and release", inner)):
        report.notes.append(f"99th percentile, {name}: {_percentile(values):.2f} s")
    report.judge(TARGETS[0], _percentile(ours))
    return report


def _end(lab: Lab, *options: str) -> tuple[int, float]:
    """Run one job; return its id, and seconds from its last instruction until its nodes are free."""
    job = lab.submit(f": > {MARKER}.$SLURM_JOB_ID", f"-N{NODES}", "-o", "/dev/null", *options, wait=False)
    free = float(lab.run("ctl", "sh", "-c", WAIT, "wait", str(job)))
    marker = lab.home(f"{MARKER}.{job}")
    last = marker.stat().st_ctime_ns / 1e9
    marker.unlink()
    return job, free - last


def _teardown(lab: Lab, job: int) -> float:
    """Seconds from the start of the Epilog's first stage to the end of its last, on the slower node."""
    said = json.loads(lab.run("ctl", "vhpc", "timeline", str(job), "--json"))
    spans = []
    for node in said["nodes"]:
        stages = [stage for stage in node["stages"] if stage["phase"] != "boot"]
        spans.append(stages[-1]["ended"] - stages[0]["began"])
    return float(max(spans))


def _percentile(values: Sequence[float]) -> float:
    """The 99th percentile; of fewer than 100 values it is near the largest."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[98]
