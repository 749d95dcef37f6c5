# SPDX-License-Identifier: Apache-2.0
"""What vhpc costs a controller of many nodes: jobs of 1 to 128 nodes, with vhpc and without, in one run.

Starts a light lab of its own (`lab/vlab up --light`) and ends it, or uses the light lab of VLAB_STATE:
128 hosts with slurmd, munged and vhpc's real hooks, and one controller with slurmctld, slurmdbd, vhpcd and
vhpc-hookd. There is no guest. Prolog does all that it does on a site up to the domain: lease, plan, journal,
image, control group, daemons of the shared folders. libvirt's test driver takes the domain, and vhpc's own
agent stands in for the guest on the node itself (bench/vhpcbench/light_libvirt.py). So a job's script goes
through the plugin, vhpc-run, the shim and the agent. Image and kernel are a few bytes, so copying them is
not measured, and neither are QEMU and the boot of a guest.

For 1, 16, 64 and 128 nodes: from sbatch to the first line of the script, alternately without and with
--vhpc-image; then the same for 200 tasks of a job array, of one node each. A job that has started waits
until all have. Slurm's main scheduler lets a job wait for up to two seconds, without vhpc as with it, so what
is compared is the time from the (first) allocation in slurmctld's log to the (last) script's first line.
Of each: requests to slurmctld by sdiag, without those of the benchmark itself; CPU time of slurmctld, vhpcd,
vhpc-hookd with the controller's hooks, munged of the controller, and all processes of all nodes. All nodes
share the CPUs of this machine, and on a site each has its own: what the nodes' processes take here one after
the other, they take there at the same time. docs/scale.md has a model.

Targets: the script of the largest job starts at most 1 s later; requests to slurmctld for a job do not grow
with its nodes; vhpcd takes less than 10 % of slurmctld's CPU time in jobs with vhpc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vhpcbench import counted
from vhpcbench.common import NODE, USER, BenchError, Lab, Report, main
from vhpcbench.lightlab import IMAGE, light_lab
from vhpcbench.targets import at_most, under

SIZES = (1, 16, 64, 128)
LATER = at_most(1, "later start of the largest job", "s")
GROWTH = at_most(2, "more requests for the largest job than for the smallest")
"""So many count as none: other work passes by."""
VHPCD = under(0.1, "CPU time of vhpcd to slurmctld's")
TARGETS = (LATER, GROWTH, VHPCD)
START_S = 600.0
OTHERS = (
    "MESSAGE_NODE_REGISTRATION_STATUS",
    "REQUEST_BUILD_INFO",
    "REQUEST_JOB_INFO",
    "REQUEST_PARTITION_INFO",
    "REQUEST_PING",
    "REQUEST_STATS_INFO",
)
"""Not for a job: sdiag and squeue of this benchmark; nodes that register; once a minute vhpcd's squeue and
sinfo, with `scontrol show config` before and after squeue."""
SLOW = "REQUEST_JOB_NOTIFY"
"""slurmd tells the user of a Prolog that takes longer than MessageTimeout less 2 s. Here all nodes' Prologs
share this machine's CPUs, so that says nothing of a site; it is shown, and not judged."""
PARTS = ("slurmctld", "vhpcd", "hooks", "munged", "nodes")
"""hooks: vhpc-hookd and what slurmctld starts; munged: the controller's; nodes: all processes of all."""
OTHER_USER = "bob"
WAYS = ("without", "with vhpc")
WAIT_ENDED = 'n=1; until jobs=$(squeue -h) && [ -z "$jobs" ]; do n=$((n + 1)); sleep 1; done; echo $n'
# the log has milliseconds, and the time zone of its host
ALLOCATED = r"""
import datetime, re, sys
line = re.compile(r"\[(\S+)\] .*(?:sched: Allocate|_start_job: Started) JobId=%s[_ ]" % sys.argv[1])
for found in map(line.match, open("/var/log/slurm/slurmctld.log", errors="replace")):
    if found:
        print(datetime.datetime.fromisoformat(found[1]).timestamp())
        break
"""
SUBMIT = 'date +%s%N; exec sbatch --parsable "$@"'


@dataclass(frozen=True)
class Usage:
    """CPU seconds by part of the cluster, and requests by type, since the daemons have started."""

    cpu: dict[str, float]
    requests: Counter[str]

    def since(self, before: Usage) -> Usage:
        """What was used and asked between two looks."""
        cpu = {name: seconds - before.cpu[name] for name, seconds in self.cpu.items()}
        asked = Counter({name: n - before.requests[name] for name, n in self.requests.items()})
        return Usage(cpu, +asked)


@dataclass(frozen=True)
class Sample:
    """One job, or all tasks of an array: seconds from sbatch to the start of each, and what was used.

    ``allocated``: seconds from sbatch until Slurm gave the first of them its nodes.
    """

    starts: list[float]
    allocated: float
    to_start: Usage
    whole: Usage


@dataclass
class Case:
    """The same jobs without and with vhpc, a sample of each for every round."""

    name: str
    options: tuple[str, ...]
    jobs: int = 1
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def took(self, way: str) -> list[float]:
        """Seconds from the first allocation to the start of the last script, in each round."""
        return [max(one.starts) - one.allocated for one in self.samples[way]]

    def later(self) -> list[float]:
        """By how many seconds the last script starts later with vhpc, in each round."""
        return [ours - plain for plain, ours in zip(*map(self.took, WAYS), strict=True)]

    def added(self) -> dict[str, float]:
        """Requests for a job that only vhpc causes, by type: medians of the rounds."""
        plain, ours = (self.samples[way] for way in WAYS)
        names = {name for one in (*plain, *ours) for name in one.whole.requests} - set(OTHERS)
        found = {
            name: statistics.median(
                (b.whole.requests[name] - a.whole.requests[name]) / self.jobs
                for a, b in zip(plain, ours, strict=True)
            )
            for name in sorted(names)
        }
        return {name: value for name, value in found.items() if value}

    def cpu(self, way: str, part: str, *, to_start: bool = False) -> list[float]:
        """CPU seconds of a part of the cluster, in each round."""
        found = self.samples[way]
        return [(one.to_start if to_start else one.whole).cpu[part] for one in found]


def run() -> int:
    """Entry point."""
    return main("cluster", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=SIZES[-1], help="nodes of the lab (default 128)")
    parser.add_argument("--jobs", type=int, default=200, help="tasks of the job array (default 200)")
    parser.add_argument("--keep", action="store_true", help="leave the lab running, for another run")


def bench(args: argparse.Namespace) -> Report:
    """Run all cases in turns."""
    report = Report("cluster")
    sizes = sorted({size for size in SIZES if size < args.nodes} | {args.nodes})
    tasks = min(args.jobs, args.nodes * (os.cpu_count() or 1))
    cases = [Case(f"{size} nodes", (f"-N{size}", "--ntasks-per-node=1")) for size in sizes]
    cases.append(Case(f"{tasks} jobs", ("-N1", "-n1", f"--array=1-{tasks}"), tasks))
    with light_lab(args.nodes, keep=args.keep) as lab:
        cluster = Cluster(lab)
        for way in WAYS:  # what is read for the first time is not measured
            cluster.measure(cases[-2], way)
        for turn in range(args.rounds):
            for case in cases:
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    case.samples[way].append(cluster.measure(case, way))
        for size in (0, -2):
            report.notes += cluster.prolog(cases[size])
        report.notes += cluster.memory()
    return judged(report, cases)


def judged(report: Report, cases: list[Case]) -> Report:
    """Fill the report and compare it with the targets."""
    for case in cases:
        for way in WAYS:
            report.add(f"{case.name}, {way}", "s", [max(one.starts) for one in case.samples[way]])
            report.add("    from the allocation", "s", case.took(way))
        report.add("    later", "s", case.later())
        if case.jobs > 1:
            for way in WAYS:
                middles = [statistics.median(one.starts) for one in case.samples[way]]
                report.add(f"    half of them, {way}", "s", middles)
        report.notes += [*_cpu_lines(case), *_request_lines(case)]
    first, largest = cases[0], cases[-2]
    ours, theirs = (sum(sum(one.cpu(WAYS[1], part)) for one in cases) for part in ("vhpcd", "slurmctld"))
    report.ratios["CPU, vhpcd to slurmctld"] = ours / theirs
    report.judge(LATER, statistics.median(largest.later()))
    report.judge(GROWTH, _of_vhpc(largest) - _of_vhpc(first))
    report.judge(VHPCD, ours / theirs)
    return report


def _of_vhpc(case: Case) -> float:
    return sum(count for name, count in case.added().items() if name != SLOW)


def _cpu_lines(case: Case) -> Iterator[str]:
    for way in WAYS:
        parts = [
            f"{part} {statistics.median(case.cpu(way, part, to_start=True)):.2f} of "
            f"{statistics.median(case.cpu(way, part)):.2f}"
            for part in PARTS
        ]
        yield f"{case.name}, {way}: CPU s until the start, of all until the end: {', '.join(parts)}"


def _request_lines(case: Case) -> Iterator[str]:
    for way in WAYS:
        asked = Counter[str]()
        for sample in case.samples[way]:
            asked += sample.whole.requests
        jobs = case.jobs * len(case.samples[way])
        found = [f"{name} {count / jobs:.1f}" for name, count in asked.most_common() if name not in OTHERS]
        yield f"{case.name}, {way}: requests to slurmctld for a job: {', '.join(found)}"
    added = ", ".join(f"{name} {count:g}" for name, count in case.added().items())
    yield f"{case.name}: of these only with vhpc: {added or 'none'}"


class Cluster:
    """The light lab, and what its parts have used."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._turns = 0
        self._pids = {name: lab.pid("ctl", name) for name in ("slurmctld", "vhpcd", "munged", "vhpc-hookd")}
        self._nodes = [lab.init(node) for node in lab.nodes]
        self._last: dict[str, int] = {}
        """By case its last job with vhpc."""

    def measure(self, case: Case, way: str) -> Sample:
        """Submit, wait until all scripts have started, let them end, wait until the nodes are free."""
        self._turns += 1
        image = [f"--vhpc-image={IMAGE}"] if way == WAYS[1] else []
        with self._folder() as (folder, inside):
            script = f"#!/bin/sh\n: > {inside}/started.$SLURM_JOB_ID\nread -r _ < {inside}/end\nexit 0\n"
            before = self._look()
            options = (*case.options, *image, "-o", "/dev/null")
            said = self.lab.run("login", "sh", "-c", SUBMIT, "sh", *options, user=USER, stdin=script)
            submitted, job = said.split()[:2]
            starts = self._started(folder, case.jobs)
            begun = self._look()
            # for reading, too: it neither waits for scripts nor are their lines lost
            with (folder / "end").open("r+b", buffering=0) as end:
                end.write(b"\n" * case.jobs)
                polled = self.lab.run("login", "sh", "-c", WAIT_ENDED, user=OTHER_USER, timeout_s=START_S)
            after = self._look()
        if image:
            self._last[case.name] = int(job)
        after.requests["REQUEST_JOB_INFO"] -= int(polled)
        since = [moment - int(submitted) / 1e9 for moment in starts]
        allocated = self._allocated(int(job)) - int(submitted) / 1e9
        sample = Sample(since, allocated, begun.since(before), after.since(before))
        said = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sample.to_start.cpu.items())
        line = (
            f"bench/cluster: {case.name}, {way}: after {max(since):.2f} s, "
            f"of these {allocated:.2f} until the allocation; CPU s until then: {said}"
        )
        print(line, file=sys.stderr, flush=True)  # all of it takes minutes
        return sample

    @contextmanager
    def _folder(self) -> Iterator[tuple[Path, str]]:
        """A folder in the user's home, on this machine and for scripts; its pipe `end` lets scripts end."""
        name = f"bench-cluster-{os.getpid()}-{self._turns}"
        made = f"mkdir {name} && mkfifo {name}/end"
        self.lab.run("login", "sh", "-c", made, user=USER)
        try:
            yield self.lab.home(name), f"/home/{USER}/{name}"
        finally:
            self.lab.run("login", "rm", "-r", name, user=USER)

    def _started(self, folder: Path, jobs: int) -> list[float]:
        """When the scripts have started, in seconds since the epoch."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            files = list(folder.glob("started.*"))
            if len(files) == jobs:
                return [file.stat().st_mtime for file in files]
            time.sleep(0.05)
        states = self.lab.run("ctl", "squeue", "-o", "%i %T %r")
        self.lab.run("ctl", "scancel", f"--user={USER}")
        raise BenchError(f"{len(files)} of {jobs} scripts have started after {START_S:g} s: {states[:500]}")

    def _allocated(self, job: int) -> float:
        """When Slurm gave a job, or the first task of an array, its nodes, in seconds since the epoch."""
        said = self.lab.run("ctl", "python3", "-c", ALLOCATED, str(job))
        if not said:
            raise BenchError(f"slurmctld.log does not say when job {job} got its nodes")
        return float(said)

    def _look(self) -> Usage:
        found = counted.all_processes()
        try:
            own = {name: found[pid] for name, pid in self._pids.items()}
        except KeyError as err:
            raise BenchError("a daemon of the controller has ended during the benchmark") from err
        # its scripts run under a child of its own, slurmscriptd
        scripts = [one for one in found.values() if one.parent == self._pids["slurmctld"]]
        cpu = {
            "slurmctld": own["slurmctld"].own_s + sum(one.own_s for one in scripts),
            "vhpcd": own["vhpcd"].own_s + own["vhpcd"].children_s,
            "munged": own["munged"].own_s,
            "hooks": counted.tree_s(found, [self._pids["vhpc-hookd"]])
            + sum(one.children_s for one in scripts),
            "nodes": counted.tree_s(found, self._nodes),
        }
        return Usage(cpu, counted.requests(self.lab.run("ctl", "sdiag")))

    def memory(self) -> list[str]:
        """Lines about memory."""
        found = {name: counted.memory_mib(self._pids[name]) for name in ("slurmctld", "vhpcd", "vhpc-hookd")}
        return [f"memory of {name}: {now:.0f} MiB, peak {peak:.0f}" for name, (now, peak) in found.items()]

    def prolog(self, case: Case) -> list[str]:
        """Stages of the Prologs of the last job of a case, medians of its nodes in milliseconds."""
        job = self._last[case.name]
        nodes = json.loads(self.lab.run(NODE, "vhpc", "timeline", str(job), "--json"))["nodes"]
        took: dict[str, list[float]] = {}
        for node in nodes:
            for stage in (one for one in node["stages"] if one["phase"] == "boot"):
                took.setdefault(stage["name"], []).append(1e3 * (stage["ended"] - stage["began"]))
            boot = [one for one in node["stages"] if one["phase"] == "boot"]
            took.setdefault("all", []).append(1e3 * (boot[-1]["ended"] - boot[0]["began"]))
        stages = ", ".join(f"{name} {statistics.median(values):.0f}" for name, values in took.items())
        return [f"{case.name}: a Prolog's stages, median of {len(nodes)} nodes, in ms: {stages}"]


if __name__ == "__main__":
    raise SystemExit(run())
