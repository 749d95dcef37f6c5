# SPDX-License-Identifier: Apache-2.0
"""CPU time of the Prolog for a job without vhpc, against a shell without commands.

Needs no lab, because the Prolog ends in its first line. The target is less than 10 ms.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess

from vhpcbench.common import CHECKOUT, Report, main
from vhpcbench.targets import under

TARGETS = (under(10, "CPU time of the Prolog", "ms"),)
RUNS = 100
PROLOG = CHECKOUT / "prolog" / "prolog"
# a part of the environment that slurmd gives to a Prolog
ENV = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_UID": "2001", "SLURMD_NODENAME": "n1"}


def run() -> int:
    """Entry point."""
    return main("prolog-off", __doc__ or "", 9, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of both."""
    report = Report("prolog-off")
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(_cpu_ms([str(PROLOG)]))
        theirs.append(_cpu_ms(["/bin/sh", "-c", ":"]))
    prolog = report.add("Prolog of a job without vhpc", "ms", ours)
    report.add("a shell without commands", "ms", theirs)
    report.ratios["Prolog to shell"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    report.judge(TARGETS[0], prolog.median)
    return report


def _cpu_ms(argv: list[str]) -> float:
    """CPU milliseconds of one run, the mean of several."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(RUNS):
        subprocess.run(argv, env=ENV, check=True, stdin=subprocess.DEVNULL, cwd=os.sep)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / RUNS * 1000
