# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: the lab's hosts, command line, results and their output."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vhpcbench.targets import Judged, Target

CHECKOUT = Path(__file__).resolve().parents[2]
VLAB = CHECKOUT / "lab" / "vlab"
USER = "alice"
NODE = "n1"
JOB_TIMEOUT_S = 300


class BenchError(Exception):
    """An error that prevents a benchmark, in one line."""


@dataclass(frozen=True)
class Series:
    """Values of one measurement in one unit, one value per round."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle value."""
        return statistics.median(self.values)

    def line(self) -> str:
        """Median, minimum and maximum."""
        low, high = min(self.values), max(self.values)
        return f"  {self.name:<44}{self.median:10.2f} {self.unit:<5} ({low:.2f} to {high:.2f})"


@dataclass
class Report:
    """Results of a benchmark; ``judged``: those that have a target."""

    bench: str
    series: list[Series] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, name: str, unit: str, values: list[float]) -> Series:
        """Add a series."""
        series = Series(name, unit, tuple(values))
        self.series.append(series)
        return series

    def judge(self, target: Target, value: float) -> None:
        """Compare a result with its target."""
        self.judged.append(Judged(target, value))

    @property
    def met(self) -> bool:
        """Whether there is a result with a target, and all meet theirs."""
        return bool(self.judged) and all(one.met for one in self.judged)

    def show(self, as_json: bool) -> None:
        """Print the report."""
        surroundings = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cpus": os.cpu_count(),
            "load_before": self.load_before,
            "load_after": os.getloadavg()[0],
        }
        if as_json:
            body: dict[str, Any] = {"bench": self.bench, **surroundings}
            body |= {"ratios": self.ratios, "notes": self.notes}
            body["series"] = {
                s.name: {"unit": s.unit, "median": s.median, "values": s.values} for s in self.series
            }
            body["targets"] = [one.document() for one in self.judged]
            print(json.dumps(body | {"met": self.met}, indent=2))
            return
        rounds = len(self.series[0].values) if self.series else 0
        print(
            f"{self.bench}: medians (minimum to maximum) of {rounds} rounds; {surroundings['cpus']} CPUs, "
            f"load {self.load_before:.1f} before and {surroundings['load_after']:.1f} after"
        )
        for series in self.series:
            print(series.line())
        for name, ratio in self.ratios.items():
            print(f"  ratio, {name:<37}{ratio:10.2f}")
        for note in self.notes:
            print(f"  {note}")
        for one in self.judged:
            print(f"  {one.line}")


class Lab:
    """The running lab, accessed from its machine."""

    def __init__(self) -> None:
        done = subprocess.run(
            [VLAB, "status", "--json"], capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode != 0:
            raise BenchError("the lab is not up: run `make lab-up` first, as root")
        self._names = (f"bench-{os.getpid()}-{number}" for number in itertools.count())
        status = json.loads(done.stdout)
        self.paths = {name: Path(path) for name, path in status["paths"].items()}
        self._hosts = status["hosts"]

    def pid(self, host: str, unit: str) -> int:
        """Pid on this machine of a daemon when the benchmark began; BenchError if it did not run."""
        found = self._hosts[host]["units"].get(unit, {}).get("pid")
        if found is None:
            raise BenchError(f"{unit} does not run on {host}")
        return int(found)

    def init(self, host: str) -> int:
        """Pid on this machine of a host's PID 1 when the benchmark began."""
        return int(self._hosts[host]["pid"])

    @property
    def nodes(self) -> list[str]:
        """Names of the compute nodes."""
        return [host for host, what in self._hosts.items() if "slurmd" in what["units"]]

    def run(
        self, host: str, *argv: str, user: str = "root", stdin: str = "", timeout_s: float = JOB_TIMEOUT_S
    ) -> str:
        """Stdout of a command on a host.

        Raises:
            BenchError: the command failed.
        """
        command = [str(VLAB), "exec", "-u", user, host, "--", *argv]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode != 0:
            raise BenchError(
                f"{host}: {' '.join(argv)[:120]}: status {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def home(self, name: str) -> Path:
        """Path on this machine of a file in the user's home."""
        return self.paths["home"] / USER / name

    def submit(self, script: str, *options: str, wait: bool, node: str = NODE) -> int:
        """Submit a script to the node with sbatch; with ``wait``, return when the job has ended.

        Raises:
            BenchError: the job has failed, or has not ended within ``JOB_TIMEOUT_S``; then it is cancelled.
        """
        name = next(self._names)
        argv = ["sbatch", "--parsable", "-J", name, "-w", node, *(["--wait"] if wait else []), *options]
        try:
            out = self.run("login", *argv, user=USER, stdin=f"#!/bin/sh\n{script}\n")
        except subprocess.TimeoutExpired as err:
            # killed while it waited, sbatch has not told the job's number
            with contextlib.suppress(BenchError, subprocess.TimeoutExpired):
                self.run("ctl", "scancel", f"--name={name}", timeout_s=60)
            raise BenchError(
                f"the job {name} had not ended after {JOB_TIMEOUT_S} s; it is cancelled"
            ) from err
        return int(out.split()[0])

    def hold(self, *options: str, node: str = NODE) -> int:
        """Start a job that sleeps; return when it runs."""
        name = "bench-held"
        script = f": > {name}.$SLURM_JOB_ID; sleep 3600"
        job = self.submit(script, "-o", "/dev/null", *options, wait=False, node=node)
        waiting = (
            f"for i in $(seq 600); do [ -e {name}.{job} ] && exec rm {name}.{job}; sleep 0.2; done; exit 1"
        )
        self.run("login", "sh", "-c", waiting, user=USER)
        return job

    def cancel(self, *jobs: int) -> None:
        """End jobs and wait until their nodes are free."""
        self.run("ctl", "scancel", *map(str, jobs))
        self.quiet()

    def quiet(self) -> None:
        """Wait until no job is left, including completing jobs.

        Raises:
            BenchError: there are jobs after some minutes.
        """
        waiting = (
            'for i in $(seq 1000); do [ -n "$(squeue -h)" ] || exit 0; sleep 0.2; done; squeue >&2; exit 1'
        )
        self.run("ctl", "sh", "-c", waiting)

    def timeline(self, job: int) -> list[dict[str, Any]]:
        """Stages of a job's boot on the node."""
        said = json.loads(self.run(NODE, "vhpc", "timeline", str(job), "--json"))
        (line,) = said["nodes"]
        return [stage for stage in line["stages"] if stage["phase"] == "boot"]


def milliseconds(action: Callable[[], object]) -> float:
    """Duration of one call."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


def main(
    name: str,
    doc: str,
    rounds: int,
    bench: Callable[[argparse.Namespace], Report],
    options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """Command line of a benchmark; ``doc`` is its help, and ``options`` adds options of its own."""
    parser = argparse.ArgumentParser(
        f"bench/{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print all values as JSON")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds (default {rounds})")
    parser.add_argument("--image", default="debian-minimal", help="published image (default %(default)s)")
    options(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has changed is put back
    try:
        report = bench(args)
    except (BenchError, subprocess.TimeoutExpired) as err:
        print(f"bench/{name}: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bench/{name}: interrupted", file=sys.stderr)
        return 130
    report.show(args.json)
    return 0
