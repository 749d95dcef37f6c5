# SPDX-License-Identifier: Apache-2.0
"""Real jobs of the lab that join and leave a cluster: what bench/cluster-grow --lab measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

from vhpcbench.common import NODE, USER, BenchError, Lab, Report

CLUSTER = "bench-grow"
OPTIONS = ("-n1", "--mem=500", "-o", "/dev/null", "--vhpc-timeout=180")
SCRIPT = "vhpc-members --follow > bench-grow.$SLURM_JOB_ID & : > bench-up.$SLURM_JOB_ID; sleep 3600"
LIMIT_S = 900.0


def measure(report: Report, sizes: Sequence[int], rounds: int, image: str) -> float:
    """Add the figures of clusters of these sizes; the largest median, in seconds."""
    lab = Lab()
    cpus = sum(int(line) for line in lab.run("ctl", "sinfo", "-h", "-N", "-p", "main", "-o", "%c").split())
    options = (*OPTIONS, f"--vhpc-image={image}")
    slowest, members = 0.0, list[int]()
    try:
        for size in sizes:
            if size + 1 > cpus:
                report.notes.append(f"{size} members: not measured, the lab has CPUs for {cpus} jobs")
                continue
            members += [
                _begin(lab, *options, f"--vhpc-cluster={CLUSTER}") for _ in range(size - len(members))
            ]
            _known(lab, members, members)
            found = [_round(lab, members, options) for _ in range(rounds)]
            joins, leaves, waits, ours, theirs = (list(column) for column in zip(*found, strict=True))
            slowest = max(
                slowest,
                report.add(f"{size} members, join", "s", joins).median,
                report.add("    leave, from scancel", "s", leaves).median,
            )
            report.add("    the barrier of the job that joins", "s", waits)
            report.add("    its whole boot", "s", ours)
            report.add("    the boot of a job without a cluster", "s", theirs)
            report.ratios[f"{size} members, boot to one without"] = statistics.median(
                a / b for a, b in zip(ours, theirs, strict=True)
            )
    finally:
        lab.run("ctl", "scancel", f"--user={USER}")
        lab.quiet()
        for kind in ("grow", "up"):
            for path in lab.home("").glob(f"bench-{kind}.*"):
                path.unlink()
    return slowest


def _round(lab: Lab, members: list[int], options: Sequence[str]) -> tuple[float, ...]:
    """Seconds of a join and of a leave; of barrier and boot of the job, and of a boot without a cluster."""
    new = _begin(lab, *options, f"--vhpc-cluster={CLUSTER}")
    known = _known(lab, members, [new])
    stages = _stages(lab, new)
    join = known - stages["setup g0"][1]
    began = time.time()
    lab.run("ctl", "scancel", str(new))
    leave = _known(lab, members, [new], "leave") - began
    alone = _begin(lab, *options, "--vhpc-network=job")
    _until(lab.home(f"bench-up.{alone}").exists, f"job {alone} to run")
    other = _stages(lab, alone)
    lab.run("ctl", "scancel", str(alone))
    _until(lambda: not _left(lab, new, alone), "the ends of two jobs")
    return join, leave, stages["barrier"][1] - stages["barrier"][0], _whole(stages), _whole(other)


def _begin(lab: Lab, *options: str) -> int:
    said = lab.run("login", "sbatch", "--parsable", *options, user=USER, stdin=f"#!/bin/sh\n{SCRIPT}\n")
    return int(said.split()[0])


def _known(lab: Lab, members: list[int], jobs: list[int], event: str = "join") -> float:
    """When the last guest of the members has written of these jobs, by the host's clock."""
    paths = [lab.home(f"bench-grow.{member}") for member in members]

    def all_know() -> bool:
        for path in paths:
            if not path.exists():
                return False
            # a line that is being written has no end yet
            *whole, _ = path.read_text().split("\n")
            rows = map(json.loads, whole)
            if not set(jobs) <= {row["job"] for row in rows if row["event"] == event}:
                return False
        return True

    _until(all_know, f"{len(members)} jobs to know of the {event} of {len(jobs)}")
    return max(path.stat().st_mtime for path in paths)


def _stages(lab: Lab, job: int) -> dict[str, tuple[float, float]]:
    """Begin and end of the stages of the boot of a job with one node."""

    def boot() -> dict[str, tuple[float, float]]:
        (line,) = json.loads(lab.run(NODE, "vhpc", "timeline", str(job), "--json"))["nodes"]
        return {one["name"]: (one["began"], one["ended"]) for one in line["stages"] if one["phase"] == "boot"}

    _until(lambda: "barrier" in boot(), f"the timeline of job {job}")
    return boot()


def _whole(stages: dict[str, tuple[float, float]]) -> float:
    """Seconds from the begin of the first stage to the end of the last one."""
    return max(end for _, end in stages.values()) - min(begin for begin, _ in stages.values())


def _left(lab: Lab, *jobs: int) -> bool:
    queued = lab.run("ctl", "squeue", "-h", "-o", "%A").split()
    return bool(set(map(str, jobs)) & set(queued))


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.1)
