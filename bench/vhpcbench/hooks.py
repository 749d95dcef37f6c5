# SPDX-License-Identifier: Apache-2.0
"""CPU time of vhpc's hooks, on the controller and on a node.

Controller: PrologSlurmctld and EpilogSlurmctld of one job with guests, run by hand for a job that Slurm has,
with all their processes and those of vhpc-hookd, in a control group; the reference is the same hooks in a
Python of their own, as they run without vhpc-hookd. vhpcd, slurmctld and munged are not counted. The
target is 15 ms.

Node: Python's start of Prolog until it asks vhpcd, of Prolog until it has all modules, and of Epilog; the
reference is Python with an empty program. The target is 60 ms until vhpcd is asked. Then the whole Prologs of
jobs of one guest, with the commands that they run: in a Python of their own, and forked from the process that
an Epilog leaves for the next hooks, for which the target is 100 ms.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vhpcbench.common import BenchError, Lab, Report, main
from vhpcbench.targets import at_most, under

CONTROLLER = at_most(15, "both hooks of the controller", "ms")
ASKED = under(60, "Prolog until it asks vhpcd", "ms")
FORKED = at_most(100, "a whole Prolog, forked", "ms")
TARGETS = (CONTROLLER, ASKED, FORKED)
RUNS = 10
NOTES = "/run/vhpc-bench-prolog"
LIBEXEC, PYTHON = "/usr/libexec/vhpc", "/opt/vhpc/bin/python"
DIRECT = f"{PYTHON} -I -m vhpc_slurm.hooks.start vhpc_slurm.hooks.slurmctld"
CASES = {
    "warm prolog": f"{LIBEXEC}/prolog-slurmctld",
    "warm epilog": f"{LIBEXEC}/epilog-slurmctld",
    "cold prolog": f"{DIRECT} prolog",
    "cold epilog": f"{DIRECT} epilog",
    "scontrol": "scontrol -o show job -d $SLURM_JOB_ID; scontrol update jobid=$SLURM_JOB_ID comment=x",
    "python": f"{PYTHON} -I -c pass",
}
# as start.main() does it
START = "import gc; gc.disable(); from vhpc_slurm.hooks import start; start.load('vhpc_slurm.hooks.{}')"
STARTS = {
    "empty": "pass",
    "asked": START.format("prolog"),
    "all": START.format("prolog") + "; start.load_rest('vhpc_slurm.hooks.prolog')",
    "epilog": START.format("epilog"),
}
# $1: a program for Python, $2: how often; prints the CPU milliseconds of each
SPAWN = f"""
import os, sys
for _ in range(int(sys.argv[2])):
    pid = os.posix_spawn({PYTHON!r}, [{PYTHON!r}, "-I", "-c", sys.argv[1]], {{"PATH": "/usr/bin:/bin"}})
    used = os.wait4(pid, 0)[2]
    print(1000 * (used.ru_utime + used.ru_stime))
"""
PRELOADED = "vhpc_slurm.hooks.preloaded"
# in place of Prolog: runs it, and notes its CPU milliseconds with those of its commands
WRAPPER = f"""#!{PYTHON} -I
import os, sys
pid = os.posix_spawn("{LIBEXEC}/prolog.kept", ["prolog"], os.environ)
_, status, used = os.wait4(pid, 0)
with open("{NOTES}-" + os.environ["SLURM_JOB_ID"], "w") as out:
    out.write(str(1000 * (used.ru_utime + used.ru_stime)))
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""


def run() -> int:
    """Entry point."""
    return main("hooks", __doc__ or "", 5, bench)


def bench(args: argparse.Namespace) -> Report:
    """Run rounds of all."""
    lab, report = Lab(), Report("hooks")
    job = lab.hold("-n1")
    found: dict[str, list[float]] = {name: [] for name in (*CASES, *STARTS, "alone", "forked")}
    try:
        with _group(lab.pid("ctl", "vhpc-hookd")) as group:
            for _ in range(args.rounds):
                for name, command in CASES.items():
                    found[name].append(_on_controller(lab, group, job, command, args.image))
                for name, program in STARTS.items():
                    said = lab.run("n1", "/usr/bin/python3", "-c", SPAWN, program, str(RUNS))
                    found[name].append(statistics.median(map(float, said.split())))
    finally:
        lab.cancel(job)
    for _ in range(args.rounds):
        found["alone"].append(_prolog_alone(lab, args.image))
        found["forked"].append(_prolog_forked(lab, args.image))
    return _judged(report, found)


def _judged(report: Report, found: dict[str, list[float]]) -> Report:
    warm, cold = (
        [a + b for a, b in zip(found[f"{how} prolog"], found[f"{how} epilog"], strict=True)]
        for how in ("warm", "cold")
    )
    hooks = report.add("controller: both hooks of a job", "ms", warm)
    alone = report.add("controller: without vhpc-hookd", "ms", cold)
    report.add("controller: Slurm's two commands in them", "ms", found["scontrol"])
    empty = report.add("node: Python with an empty program", "ms", found["empty"])
    asked = report.add("node: Prolog until it asks vhpcd", "ms", found["asked"])
    whole = report.add("node: Prolog until it has all modules", "ms", found["all"])
    epilog = report.add("node: Epilog until it has all modules", "ms", found["epilog"])
    started = report.add("node: a whole Prolog, with its commands", "ms", found["alone"])
    forked = report.add("node: the same, forked", "ms", found["forked"])
    report.ratios["controller, without vhpc-hookd to with"] = alone.median / hooks.median
    report.ratios["controller, hooks to an empty Python"] = hooks.median / statistics.median(found["python"])
    compared = {"asks": asked, "all modules": whole, "Epilog": epilog, "whole": started, "forked": forked}
    for name, series in compared.items():
        report.ratios[f"node, {name} to an empty Python"] = series.median / empty.median
    report.judge(CONTROLLER, hooks.median)
    report.judge(ASKED, asked.median)
    report.judge(FORKED, forked.median)
    return report


@contextmanager
def _group(daemon: int) -> Iterator[Path]:
    """A control group for CPU time with a daemon and its children in it."""
    top = Path("/sys/fs/cgroup/cpuacct")
    if not top.is_dir():
        top = Path("/sys/fs/cgroup")
    group = top / f"vhpc-bench-{os.getpid()}"
    before = Path(f"/proc/{daemon}/cgroup").read_text().splitlines()
    (own,) = [line.split(":")[2] for line in before if line.split(":")[1] in ("cpuacct", "")][:1]
    try:
        group.mkdir()
        for pid in (daemon, *_children(daemon)):
            (group / "cgroup.procs").write_text(str(pid))
    except OSError as err:
        raise BenchError(f"no control group can be made below {top}: {err}") from err
    try:
        yield group
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (top / own.lstrip("/") / "cgroup.procs").write_text(member)
        group.rmdir()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _used_ms(group: Path) -> float:
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e6
    return int((group / "cpu.stat").read_text().split()[1]) / 1e3


def _on_controller(lab: Lab, group: Path, job: int, command: str, image: str) -> float:
    """CPU milliseconds of a command of SlurmUser, the mean of several runs."""
    names = ("--mount", "--uts", "--ipc", "--net", "--pid")
    enter = ["nsenter", f"--target={lab.pid('ctl', 'vhpc-hookd')}", *names, "--"]
    slurm = ["setpriv", "--reuid=slurm", "--regid=slurm", "--init-groups", "--"]
    variables = {"SPANK_VHPC_IMAGE": image, "SLURM_JOB_ID": str(job), "SLURM_JOB_RESTART_COUNT": "0"}
    script = f"i=0; while [ $i -lt {RUNS} ]; do i=$((i + 1)); {command}; done"

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    before = _used_ms(group)
    done = subprocess.run(
        [*enter, *slurm, "sh", "-ec", script],
        env={"PATH": "/usr/bin:/bin"} | variables,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=join,
    )
    if done.returncode:
        raise BenchError(f"{command}: status {done.returncode}: {done.stderr[-300:]}")
    time.sleep(0.1)  # the last child of vhpc-hookd ends after it has answered
    return (_used_ms(group) - before) / RUNS


def _prolog_alone(lab: Lab, image: str) -> float:
    """CPU milliseconds of a Prolog for which no process waits."""
    lab.quiet()
    if waiting := _preloaded(lab):
        os.kill(waiting, signal.SIGTERM)
    with _measured_prologs(lab):
        booted = lab.submit("true", "-n1", "-o", "/dev/null", f"--vhpc-image={image}", wait=True)
        lab.quiet()
    return float(lab.run("n1", "cat", f"{NOTES}-{booted}"))


def _prolog_forked(lab: Lab, image: str) -> float:
    """The same of one that an earlier Epilog's process forks, without its client's, about a millisecond."""
    wait = "i=0; until [ -S /run/vhpc/hooks/socket ]; do [ $((i += 1)) -lt 300 ]; sleep 0.1; done"
    lab.run("n1", "sh", "-ec", wait)
    waiting = _preloaded(lab)
    if waiting is None:
        raise BenchError(f"{PRELOADED} does not run on n1")
    with _group(waiting) as group:
        before = _used_ms(group)
        job = lab.hold("-n1", f"--vhpc-image={image}")
        used = _used_ms(group) - before
        lab.cancel(job)
    return used


def _preloaded(lab: Lab) -> int | None:
    """Pid on this machine of the process of n1 that waits for hooks."""
    node = Path(f"/proc/{lab.init('n1')}/ns/pid").readlink()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if PRELOADED.encode() in arguments and (entry / "ns/pid").readlink() == node:
                return int(entry.name)
    return None


@contextmanager
def _measured_prologs(lab: Lab) -> Iterator[None]:
    """Prologs of n1 note their CPU time."""
    hook = f"{LIBEXEC}/prolog"
    lab.run("n1", "mv", hook, f"{hook}.kept")
    try:
        lab.run("n1", "sh", "-c", 'cat >"$1" && chmod 755 "$1"', "sh", hook, stdin=WRAPPER)
        yield
    finally:
        lab.run("n1", "mv", f"{hook}.kept", hook)
