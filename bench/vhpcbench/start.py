# SPDX-License-Identifier: Apache-2.0
"""Time until all guests of a job are ready, for 1, 2, 4 and 8 guests, with a network of the job and without.

One guest on each node; the lab has as many nodes as `lab/vlab up --nodes N` was
told, and larger jobs are left out. From the first Prolog's start to the last
one's end. Network and barrier add the stage "network" of the slowest node, and
what the last Prolog takes from the start of the last barrier: before it, the
barrier only waits for guests that still boot. The target for both together is
less than 0.2 s with 8 nodes. bench/barrier simulates the messages of 1,000 nodes.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from vhpcbench.common import NODE, USER, BenchError, Lab, Report, main
from vhpcbench.targets import under

SIZES = (1, 2, 4, 8)
TARGETS = (under(0.2, f"network and barrier of {SIZES[-1]} nodes", "s"),)


def run() -> int:
    """Entry point."""
    return main("start", __doc__ or "", 3, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run jobs of each size, alternately with a network and without."""
    lab = Lab()
    report = Report("start")
    nodes = len(set(lab.run("ctl", "sinfo", "-h", "-N", "-o", "%N").split()))
    added: list[float] = []
    largest = 0
    for size in SIZES:
        if size > nodes:
            report.notes.append(f"{size} guests: not measured, the lab has {nodes} nodes")
            continue
        with_network, without, added, largest = [], [], [], size
        for _ in range(args.rounds):
            without.append(_whole(_prologs(lab, args.image, size, "none")))
            found = _prologs(lab, args.image, size, "job")
            with_network.append(_whole(found))
            added.append(_of_network(found))
        report.add(f"{size} guests, with a network", "s", with_network)
        report.add(f"{size} guests, without", "s", without)
        report.add("    network and barrier", "s", added)
    if largest == SIZES[-1]:
        report.judge(TARGETS[0], report.series[-1].median)
    return report


def _prologs(lab: Lab, image: str, nodes: int, network: str) -> list[list[dict[str, Any]]]:
    """Stages of the boot on each node."""
    options = [f"--vhpc-image={image}", f"--vhpc-network={network}", "-o", "/dev/null"]
    said = lab.run(
        "login",
        "sbatch",
        "--parsable",
        "--wait",
        f"-N{nodes}",
        *options,
        user=USER,
        stdin="#!/bin/sh\ntrue\n",
    )
    lab.quiet()
    job = said.split()[0]
    timelines = json.loads(lab.run(NODE, "vhpc", "timeline", job, "--json"))["nodes"]
    if len(timelines) != nodes:
        raise BenchError(f"job {job} has timelines of {len(timelines)} nodes instead of {nodes}")
    return [[stage for stage in line["stages"] if stage["phase"] == "boot"] for line in timelines]


def _whole(prologs: list[list[dict[str, Any]]]) -> float:
    """Seconds from the first start to the last end."""
    return float(max(p[-1]["ended"] for p in prologs) - min(p[0]["began"] for p in prologs))


def _of_network(prologs: list[list[dict[str, Any]]]) -> float:
    """Seconds of the slowest stage `network`, and of the barrier from its last begin to its last end."""
    stages = {
        name: [stage for prolog in prologs for stage in prolog if stage["name"] == name]
        for name in ("network", "barrier")
    }
    slowest = max(stage["ended"] - stage["began"] for stage in stages["network"])
    ends = max(stage["ended"] for stage in stages["barrier"])
    return float(slowest + ends - max(stage["began"] for stage in stages["barrier"]))
