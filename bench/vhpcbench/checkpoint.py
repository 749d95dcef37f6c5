# SPDX-License-Identifier: Apache-2.0
"""A guest whose program has filled memory is saved, and continued by another job.

In each round a job fills memory with random bytes. It is saved and continues. Then it is saved and ended, and
another job continues it. The references are in the same round: `dd` writes as many bytes with direct I/O into
the same folder, and reads them so. Checkpoints are turned on in the lab for the time of the benchmark.

Targets: the state is written at 0.8 of the speed of dd at least, its size is at most 1.15 of the guest's used
memory, the guest stands still for at most the time of dd and a second, and the next job boots in at most 1.2
times the time in which dd reads it, and 2 s.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vhpcbench import labconfig
from vhpcbench.common import JOB_TIMEOUT_S, NODE, USER, VLAB, BenchError, Lab, Report, main
from vhpcbench.targets import at_least, at_most

MIB = 1 << 20
SPEED = at_least(0.8, "speed to that of dd")
SIZE = at_most(1.15, "size to the used memory")
PAUSE = at_most(1, "pause to the time of dd and a second")
BOOT = at_most(1, "boot to 1.2 times dd and 2 s")
TARGETS = (SPEED, SIZE, PAUSE, BOOT)
FOLDER = "/home/bench-checkpoints"
# Prints the memory that the guest uses, and writes the time every 20 ms.
SCRIPT = """
exec python3 -u -c '
import os, time
filled = os.urandom({mib} << 20)
rows = dict(line.split(":") for line in open("/proc/meminfo"))
print("used", int(rows["MemTotal"].split()[0]) - int(rows["MemFree"].split()[0]))
out = open(os.path.expanduser("~/{name}"), "w")
while True:
    out.write(f"{{time.time()}}\\n")
    out.flush()
    time.sleep(0.02)
'
"""


@dataclass
class Rounds:
    """Results of the rounds: each list has one value per round."""

    write: list[float] = field(default_factory=list)
    dd_write: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    dd_read: list[float] = field(default_factory=list)


def run() -> int:
    """Entry point."""
    return main("checkpoint", __doc__ or "", 3, bench, _options)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fill", type=int, default=400, metavar="MIB", help="memory to fill (default 400)")


def bench(args: argparse.Namespace) -> Report:
    """Save and continue a job in each round."""
    lab, report, found = Lab(), Report("checkpoint"), Rounds()
    with _checkpoints(lab):
        for number in range(args.rounds):
            _round(lab, args, f"bench-checkpoint-{number}", found)
    ours = report.add("written by a checkpoint", "MiB/s", found.write)
    theirs = report.add("written by dd, direct I/O", "MiB/s", found.dd_write)
    pause = report.add("the guest stands still", "s", found.pause)
    size = report.add("size of the checkpoint", "MiB", found.size)
    used = report.add("used memory of the guest", "MiB", found.used)
    resume = report.add("boot of the job that continues it", "s", found.resume)
    read = report.add("read by dd, direct I/O", "s", found.dd_read)
    speed, part = ours.median / theirs.median, size.median / used.median
    longest, boot = size.median / theirs.median + 1, 1.2 * read.median + 2
    report.ratios = {
        "speed of writing to dd": speed,
        "size to used memory": part,
        "pause to dd and a second": pause.median / longest,
        "boot to 1.2 times dd and 2 s": resume.median / boot,
    }
    for target, ratio in zip(TARGETS, report.ratios.values(), strict=True):
        report.judge(target, ratio)
    return report


@contextmanager
def _checkpoints(lab: Lab) -> Iterator[None]:
    """The lab has a folder for checkpoints."""
    hosts = ("ctl", "login", *lab.nodes)
    append = f'printf "\\n[checkpoint]\\nfolder = \\"{FOLDER}\\"\\n" >> "$0"'
    lab.run(NODE, "install", "-d", "-m", "0700", FOLDER)
    with ExitStack() as undo:
        undo.callback(lab.run, NODE, "rm", "-rf", FOLDER)
        undo.callback(_restart_vhpcd)
        undo.enter_context(labconfig.changed(lab, hosts, "sh", "-c", append))
        _restart_vhpcd()
        yield


def _restart_vhpcd() -> None:
    for act in ("stop", "start"):
        subprocess.run([VLAB, "service", "ctl", act, "vhpcd"], check=True, capture_output=True, timeout=150)


def _round(lab: Lab, args: argparse.Namespace, name: str, found: Rounds) -> None:
    options = ("-n1", f"--mem={2 * args.fill + 300}", "-o", f"{name}.out")
    script = SCRIPT.format(mib=args.fill, name=name)
    jobs = [lab.submit(script, *options, f"--vhpc-image={args.image}", wait=False)]
    times, output = lab.home(name), lab.home(f"{name}.out")
    try:
        _grows(times, f"job {jobs[0]} did not fill its memory")
        used_kib = int(re.findall(r"^used (\d+)$", output.read_text(), re.M)[0])
        made = json.loads(lab.run("login", "vhpc", "checkpoint", str(jobs[0]), "--json", user=USER))
        _grows(times, f"job {jobs[0]} did not continue")
        state, copy, size = f"{FOLDER}/{made['serial']}/0.state", f"{FOLDER}/copy", made["bytes"] / MIB
        found.used.append(used_kib / 1024)
        found.size.append(size)
        found.pause.append(made["seconds"])
        found.write.append(size / made["seconds"])
        found.dd_write.append(size / _seconds(lab, f"dd if={state} of={copy} bs=4M oflag=direct conv=fsync"))
        lab.run("login", "vhpc", "checkpoint", str(jobs[0]), "--stop", "--name", name, user=USER)
        lab.quiet()
        jobs.append(lab.submit("true", *options, f"--vhpc-resume={name}", wait=False))
        _grows(times, f"job {jobs[1]} did not continue job {jobs[0]}")
        stages = lab.timeline(jobs[1])
        found.resume.append(stages[-1]["ended"] - stages[0]["began"])
        found.dd_read.append(_seconds(lab, f"dd if={copy} of=/dev/null bs=4M iflag=direct"))
    finally:
        lab.cancel(*jobs)
        lab.run("login", "rm", "-f", name, f"{name}.out", user=USER)


def _grows(file: Path, otherwise: str) -> None:
    """Wait until a file is longer than now.

    Raises:
        BenchError: it is not after some minutes.
    """
    before = file.stat().st_size if file.exists() else 0
    until = time.monotonic() + JOB_TIMEOUT_S
    while not file.exists() or file.stat().st_size <= before:
        if time.monotonic() > until:
            raise BenchError(otherwise)
        time.sleep(0.05)


def _seconds(lab: Lab, command: str) -> float:
    """Duration of a command on the node, by its own clock; a warm cache of what it reads counts."""
    script = (
        f"a=$EPOCHREALTIME; {command} 2>/dev/null || exit; b=$EPOCHREALTIME; echo $((${{b/./}} - ${{a/./}}))"
    )
    return int(lab.run(NODE, "bash", "-c", script)) / 1e6
