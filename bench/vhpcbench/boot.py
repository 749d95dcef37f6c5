# SPDX-License-Identifier: Apache-2.0
"""Time from the start of the Prolog to the first instruction of the user's script, against plain QEMU.

The reference boots the same kernel, initrd and root with the same machine type,
CPU model, memory and vCPU count until the first line of a shell script; once on
the CPUs to which the job's guest is pinned, once on all CPUs. Both are printed;
the target, at most 1.1, is for the same CPUs.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

from vhpcbench.common import Lab, Report, main
from vhpcbench.plain import Plain, facts
from vhpcbench.targets import at_most

TARGETS = (at_most(1.1, "time to the plain boot on the same CPUs"),)
MARKER = "bench-first-instruction"


def run() -> int:
    """Entry point."""
    return main("boot", __doc__ or "", 7, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of a job, a pinned plain guest and an unpinned one."""
    lab = Lab()
    report = Report("boot")
    plain = Plain(lab, args.image, facts(lab, args.image), f"#!/bin/sh\necho {MARKER}\nsleep 1000\n")
    jobs, pinned, unpinned = [], [], []
    stages: dict[str, list[float]] = defaultdict(list)
    try:
        for _ in range(args.rounds):
            job = _job(lab, args.image)
            jobs.append(sum(job.values()))
            for stage, seconds in job.items():
                stages[stage].append(seconds)
            pinned.append(plain.measure(pinned=True, marker=MARKER))
            unpinned.append(plain.measure(pinned=False, marker=MARKER))
    finally:
        plain.close()
    ours = report.add("job: Prolog's start to the first instruction", "s", jobs)
    for stage, values in stages.items():
        report.add(f"    {stage}", "s", values)
    report.add("plain QEMU on the same CPUs", "s", pinned)
    report.add("plain QEMU on all CPUs", "s", unpinned)
    same = statistics.median(a / b for a, b in zip(jobs, pinned, strict=True))
    report.ratios["against the same CPUs"] = same
    report.ratios["against all CPUs"] = statistics.median(a / b for a, b in zip(jobs, unpinned, strict=True))
    rest = ours.median - report.series[-2].median
    report.notes.append(f"in addition to the plain boot on the same CPUs: {rest:.2f} s")
    report.judge(TARGETS[0], same)
    return report


def _job(lab: Lab, image: str) -> dict[str, float]:
    """Seconds of each stage of one job, until its script's first line."""
    job = lab.submit(f": > {MARKER}.$SLURM_JOB_ID", f"--vhpc-image={image}", "-o", "/dev/null", wait=True)
    marker = lab.home(f"{MARKER}.{job}")
    # the time of the guest's system call by this machine's clock, with the resolution of a tick
    first = marker.stat().st_ctime_ns / 1e9
    marker.unlink()
    took: dict[str, float] = {}
    end = None
    for stage in lab.timeline(job):
        if end is not None and stage["began"] - end > 0.001:
            took["between stages"] = took.get("between stages", 0.0) + stage["began"] - end
        took[stage["name"]] = stage["ended"] - stage["began"]
        end = stage["ended"]
    assert end is not None
    lab.quiet()
    return took | {"Slurm, and the script's start in the guest": first - end}
