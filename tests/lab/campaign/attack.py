# SPDX-License-Identifier: Apache-2.0
"""Alice attacks vhpcd, the nodes and her own helpers during a campaign; the jobs that are judged are bob's.

She could run her programs on nodes from a task prolog or a job without a
guest.  Each attack lasts some seconds, and between two there is a pause, so
that bob's starts with and without one can be compared.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cluster import IMAGE, NODES, Lab

ATTACKER = "alice"
JOB = "attacker"
"""Name of her jobs; those of the campaign begin with "c"."""
PORT, FLOOD_S, PAUSE_S = "7633", 15, 8.0
HELPERS = "virtiofsd|vhpc-locks|vhpc-confine|vhpc-shim"
SEEN_S = 3.0
"""How late a campaign may see what slurmctld did."""
DELAY_S = 5.0
"""A start that costs so much more than the median one was delayed."""
_FLOOD = Path(__file__).parents[1].joinpath("flood.py").read_text(encoding="utf-8")
_REACH = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    if libc.syscall(*map(ctypes.c_long, numbers)) < 0:
        raise OSError(ctypes.get_errno(), "")
PTRACE_SEIZE, PIDFD_GETFD = 0x4206, 438
mine, tried = os.getuid(), set()
end = time.time() + float(sys.argv[1])
def reach(what, act):
    try:
        act()
    except OSError:
        return
    print("reached", what, flush=True)
while time.time() < end:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name = open(f"/proc/{pid}/comm").read().strip()
            if name not in ("virtiofsd", "vhpc-locks", "vhpc-shim"):
                continue
            if os.stat(f"/proc/{pid}").st_uid not in (0, mine):
                continue
        except OSError:
            continue
        for file in ("mem", "environ", "maps", "root/.", "fd/1", "fd/2"):
            reach(f"{name} {file}", lambda: os.open(f"/proc/{pid}/{file}", os.O_RDONLY))
        try:
            pidfd = os.pidfd_open(int(pid))
        except OSError:
            continue
        for fd in range(12):
            reach(f"{name} descriptor {fd}", lambda: call(PIDFD_GETFD, pidfd, fd, 0))
        reach(f"{name} by ptrace", lambda: call(101, PTRACE_SEIZE, int(pid), 0, 0))
        os.close(pidfd)
        tried.add(pid)
    time.sleep(0.2)
print("tried", len(tried))
"""
_CHANNEL = """
import glob, socket, sys, time
held, end, made = [], time.time() + float(sys.argv[1]), 0
while time.time() < end:
    for path in glob.glob("/run/vhpc/jobs/*/g*/run.sock"):
        for text in (b"", b"\\xff" * 64):
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            try:
                sock.connect(path)
                sock.send(text)
            except OSError:
                pass
            held.append(sock)
            made += 1
    time.sleep(0.005)
    while len(held) > 400:
        held.pop(0).close()
print("tried", made)
"""
_SIGNALS = f"""
end=$(($(date +%s) + $1)); sent=0
while [ $(date +%s) -lt $end ]; do pkill -$2 -u alice -x '{HELPERS}' && sent=$((sent + 1)); sleep 0.1; done
pkill -CONT -u alice -x '{HELPERS}'
echo tried $sent
"""
_GUEST = """#!/bin/sh
mkdir -p ~/attack-$SLURM_JOB_ID && cd ~/attack-$SLURM_JOB_ID || exit
for i in $(seq 3000); do : > f$i; done
find / -xdev >/dev/null 2>&1
head -c 50000000 /dev/zero | tr '\\0' x
cd && rm -rf ~/attack-$SLURM_JOB_ID
sleep 20
"""
# Slurm 26.05 logs only the starts of its main scheduler: others are not counted there.
_STARTS = r"""
import re, sys
began, ended = {}, {}
start = r"(?:sched: Allocate|sched/backfill: _start_job: Started) JobId="
for line in open("/var/log/slurm/slurmctld.log", errors="replace"):
    if found := re.match(r"\[(\S+)\] " + start + r"(\d+)", line):
        began[found[2]] = found[1]
    elif found := re.match(r"\[(\S+)\] prolog_running_decr: Configuration for JobId=(\d+)", line):
        ended[found[2]] = found[1]
for job in began.keys() & ended.keys():
    print(job, began[job], ended[job])
"""


@dataclass
class Attack:
    """One attack: when (monotonic seconds), and what came of it."""

    name: str
    begin: float
    end: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Start:
    """The time of vhpcd in a start of a job of bob (seconds), and whether alice attacked meanwhile."""

    job: int
    cost_s: float
    attacked: bool


@dataclass
class Attacks:
    """All that was done to the cluster."""

    done: list[Attack] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    """Places that she reached and must not reach."""
    starts: list[Start] = field(default_factory=list)

    @property
    def delayed(self) -> list[Start]:
        """Starts that were delayed by more than a few seconds."""
        if not self.starts:
            return []
        usual = statistics.median(start.cost_s for start in self.starts)
        return [start for start in self.starts if start.cost_s > usual + DELAY_S]


class Attacker:
    """Attacks that are drawn from a seed, one after the other."""

    def __init__(self, lab: Lab, seed: int, say: Callable[[str], None]) -> None:
        self.lab = lab
        self.attacks = Attacks()
        self._dice = random.Random(seed)
        self._say = say
        self._over = threading.Event()

    def stop(self) -> None:
        """Have ``run`` return soon."""
        self._over.set()

    def run(self) -> None:
        """Attack until ``stop``; nothing of it is left afterwards."""
        kinds = (
            *((self._flood, kind) for kind in ("payload", "silent", "storm", "stranger")),
            *((self._on_nodes, kind) for kind in ("reach", "channel", "KILL", "STOP")),
        )
        while not self._over.is_set():
            deck = list(kinds)
            self._dice.shuffle(deck)
            for attack, kind in deck:
                if self._over.wait(PAUSE_S):
                    break
                one = Attack(kind, time.monotonic())
                self.attacks.done.append(one)
                try:
                    one.note = attack(kind)
                except AssertionError as err:  # a fault took the host away meanwhile
                    one.note = f"not carried out: {str(err)[:200]}"
                # the queue is not what she attacks
                self.lab.run("login", "scancel", "--name", JOB, user=ATTACKER, check=False)
                one.end = time.monotonic()
                self._say(f"ATTACK {kind}: {one.note}")
        self.lab.run("ctl", "scancel", "--user", ATTACKER, "--name", JOB)

    def _flood(self, kind: str) -> str:
        """vhpcd, from the login host and from a job on a node."""
        words = (kind, "ctl", PORT, str(FLOOD_S))
        node = self._dice.choice(NODES)
        script = f"#!/bin/sh\nexec python3 - {' '.join(words)} <<'EOF'\n{_FLOOD}\nEOF\n"
        self._submit(script, "-n1", "--mem=100", f"--nodelist={node}", "--time=1")
        return self.lab.run("login", "python3", "-c", _FLOOD, *words, user=ATTACKER).out.strip()

    def _on_nodes(self, kind: str) -> str:
        """Her own helpers on both nodes, while a guest of hers comes up and works there."""
        script = _SIGNALS if kind in ("KILL", "STOP") else {"reach": _REACH, "channel": _CHANNEL}[kind]
        shell = ("sh", "-c", script, "sh") if script is _SIGNALS else ("python3", "-c", script)
        more = (kind,) if script is _SIGNALS else ()
        self._submit(_GUEST, "-n1", f"--vhpc-image={IMAGE}", "--time=2")

        def attack(node: str) -> list[str]:
            return self.lab.run(node, *shell, str(FLOOD_S), *more, user=ATTACKER).out.splitlines()

        with ThreadPoolExecutor() as pool:
            said = [line for lines in pool.map(attack, NODES) for line in lines]
        self.attacks.breaches += [line for line in said if not line.startswith("tried")]
        return ", ".join(said)

    def _submit(self, script: str, *options: str) -> None:
        """sbatch; one that a fault at slurmctld refuses is not missed."""
        words = ("sbatch", f"--job-name={JOB}", "--output=/dev/null", *options)
        self.lab.run("login", *words, user=ATTACKER, stdin=script, check=False)


def starts(lab: Lab, attacks: Sequence[Attack], jobs: Mapping[int, float]) -> list[Start]:
    """Time of vhpcd in the starts of jobs: slurmctld's wait for its Prolog, and the longest wait of a node.

    Args:
        lab: the cluster.
        attacks: what was done meanwhile.
        jobs: when each was seen to have left the queue (monotonic seconds), by its id.
    """
    found = []
    for line in lab.run("ctl", "python3", "-", stdin=_STARTS).out.splitlines():
        word, began, ended = line.split()
        job = int(word)
        if job not in jobs:
            continue
        told = lab.run("ctl", "vhpc", "timeline", word, "--json", check=False)
        if told.code:
            continue  # its nodes have not told
        waits = [
            stage["took_s"]
            for node in json.loads(told.out)["nodes"]
            for stage in node["stages"]
            if stage["name"] == "lease"
        ]
        took = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
        attacked = any(one.begin - SEEN_S < jobs[job] < one.end + SEEN_S for one in attacks)
        found.append(Start(job, took + max(waits, default=0.0), attacked))
    return found
