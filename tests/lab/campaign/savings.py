# SPDX-License-Identifier: Apache-2.0
"""A campaign of checkpoints: users save their jobs in all ways while parts of them and daemons are killed."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import ENDED, IMAGE, Job, Lab
from injection import ours, start_soon

from campaign.background import Background
from campaign.lives import KINDS, Kind, Return, last_turns, lines, script, wrong

FIND = Path(__file__).with_name("find.py").read_text(encoding="utf-8")
OPTIONS = ("--mem=600", "--open-mode=append", "--vhpc-checkpoint=limit", "--time=300", "--requeue")
WAYS = {"in place": 5, "requeue": 3, "stop": 1}
"""How often users save in each way."""
ROLES = ("qemu", "keeper", "virtiofsd", "shim", "run", "locks", "prolog", "epilog")
DAEMONS = ("vhpcd", "libvirtd", "slurmctld", "client")
FAILURES = 3
"""So many failed runs, and the user removes the checkpoint: a step in it may have lost a task."""
TOUCH_S = 60.0
"""So long after a kill, what fails may be its consequence."""
NOT_NOW = re.compile(r"not booted yet|is being saved|has ended|is not running|is ending")
"""Why a checkpoint is refused without any fault: the job was about to start or to end."""
LATE = re.compile(r"does not run in guests|the command srun starts")
FORGETS_S = 300.0
"""So long a killed slurmctld may take a job that it has requeued for running, and steps may wait for it."""


@dataclass(frozen=True)
class Kill:
    """A fault: a process of a job was killed, or a daemon that all jobs need (job 0)."""

    what: str
    at: float
    host: str
    job: int

    def touches(self, ids: list[int], since: float, until: float) -> bool:
        """Whether it can explain what happened to a job in a time."""
        return since - TOUCH_S < self.at < until and (not self.job or self.job in ids)


@dataclass
class Record:
    """Events of a campaign."""

    valid: int = 0
    refused: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


class Life:
    """A job, saved again and again, until it has completed."""

    def __init__(self, lab: Lab, number: int, kind: Kind, shared: Shared) -> None:
        self.lab, self.number, self.kind, self._shared = lab, number, kind, shared
        self.turns = shared.plan.turns
        self._dice = random.Random(f"{shared.plan.seed}.{number}")
        self._returns: list[Return] = []
        self._doubts: list[tuple[str, float, float]] = []
        self._kept: list[tuple[str, dict[int, int]]] = []
        """Names of valid checkpoints, and the last turn of each task that they hold at least."""
        self._known_kills = 0
        self._begin = 0
        """Where the output begins of the runs since the last fault."""
        self._failures = 0
        self._restarts = 0
        self._since = time.monotonic()
        self.jobs = [shared.submit(script(kind, self.turns), *kind.options, *OPTIONS)]

    @property
    def ids(self) -> list[int]:
        """Its jobs in Slurm."""
        return [job.id for job in self.jobs]

    def text(self) -> str:
        """The output of all its jobs so far."""
        read = [self.lab.run("login", "cat", f"/home/alice/slurm-{n}.out", check=False).out for n in self.ids]
        return "".join(read)

    def live(self) -> None:
        """Save it until its program has done all its turns; then judge the output."""
        while self._goes_on():
            time.sleep(self._dice.uniform(0.5, 4.0))
        self._see_kills()
        text, kills = self.text(), self._shared.record.kills
        for clause, since, until in self._doubts:
            if not any(kill.touches(self.ids, since, until) for kill in kills):
                self._find(clause)
        for clause in wrong(text, self.kind.ranks, self.turns, self._returns):
            self._find(clause)
        for rank in self.kind.ranks:
            log = self.lab.read("alice", f"{self.ids[0]}.{rank}.log").splitlines()
            if log != lines(rank, self.turns):
                self._find(f"the file of task {rank} in the home folder has other turns")

    def _doubt(self, clause: str, since: float) -> None:
        """Something that a fault since then must explain; faults are recorded a moment after they happen."""
        self._doubts.append((clause, since, time.monotonic()))

    def _find(self, clause: str) -> None:
        self._shared.record.found.append(f"job {self.ids} ({self.number}): {clause}")
        self._shared.background.log(f"FOUND {self._shared.record.found[-1]}")

    def _see_kills(self) -> None:
        kills = self._shared.record.kills[:]
        if any(kill.what == "slurmctld" for kill in kills[self._known_kills :]):
            self._returns.append(Return(None, self._held))
        self._known_kills = len(kills)

    def _goes_on(self) -> bool:
        self._see_kills()
        job = self.jobs[-1]
        show = job.show()
        state, restarts = show["JobState"], int(show["Restarts"])
        if state == "COMPLETED":
            return False
        if state in ENDED:
            self._again(state, show)
        elif state == "PENDING":
            if restarts != self._restarts:
                self._unsaved()
            if "held" in show["Reason"]:  # as Slurm does after a Prolog has failed
                self.lab.run("ctl", "scontrol", "release", str(job.id), check=False)
            start_soon(self.lab, job.id)
        elif state == "RUNNING" and self._shared.wanted() and self._counts():
            self._save(job)
        return True

    def _counts(self) -> bool:
        """Whether each task has taken a turn since the run before."""
        return all(self._last[rank] > turn for rank, turn in self._held.items())

    @property
    def _last(self) -> dict[int, int]:
        """The last turn of each task since the last fault."""
        return last_turns(self.text()[self._begin :], self.kind.ranks)

    @property
    def _held(self) -> dict[int, int]:
        return self._kept[-1][1] if self._kept else dict.fromkeys(self.kind.ranks, 0)

    def _unsaved(self) -> None:
        """A fault has ended a run, which was not saved, and Slurm starts another one."""
        self._restarts = int(self.jobs[-1].show()["Restarts"])
        text = self.text()
        self._returns.append(Return(last_turns(text, self.kind.ranks), self._held))
        self._begin = len(text)
        self._doubt(f"a run has ended without a fault: {self.jobs[-1].told()}", self._since)
        self._since = time.monotonic()

    def _again(self, state: str, show: dict[str, str]) -> None:
        """The job has ended and its program has not: its user has it start again, as he would."""
        text = self.text()
        if self.lab.run("ctl", "scontrol", "requeue", str(self.ids[-1]), check=False).code != 0:
            return  # slurmctld is away
        said = ours(text)
        self._shared.background.log(f"job {self.ids[-1]} {state}: {said[-1:]} {show['Reason']}")
        self._failures += 1
        if self._failures % FAILURES == 0 and self._kept and self._kept[-1][0].startswith(f"{self.ids[-1]}."):
            name, _ = self._kept.pop()
            self.lab.run("login", "vhpc", "checkpoint", "rm", name, user="alice")
            self._shared.background.log(f"job {self.ids[-1]}: removes checkpoint {name}")
        self._unsaved()
        self._restarts = int(show["Restarts"]) + 1

    def _save(self, job: Job) -> None:
        way = self._dice.choices(list(WAYS), list(WAYS.values()))[0]
        name = f"c{self.number}.{len(self.jobs)}.{self._dice.randrange(10**6)}"
        words = {"in place": (), "requeue": ("--requeue",), "stop": ("--stop", "--name", name)}[way]
        floor, begin = self._last, time.monotonic()
        self._shared.begun.set()
        command = ("vhpc", "checkpoint", str(job.id), *words, "--json")
        done = self.lab.run("login", *command, user="alice", check=False, timeout=400)
        took = time.monotonic() - begin
        line = (done.err.splitlines() or [""])[-1]
        self._shared.background.log(f"job {job.id} {way}: {done.code} in {took:.1f} s; {line}")
        if done.code != 0:
            self._refused(begin, line)
            return
        self._shared.record.valid += 1
        self._kept.append((json.loads(done.out)["name"], floor))
        self._failures = 0
        if way == "stop":
            job.leave_queue()
            self._resume(name)
        elif way == "requeue":
            self._restarts += 1

    def _refused(self, begin: float, line: str) -> None:
        self._shared.record.refused.append(line)
        if not NOT_NOW.search(line):
            since = begin - FORGETS_S if LATE.search(line) else begin
            self._doubt(f"a checkpoint has failed without a fault: {line}", since)

    def _resume(self, name: str) -> None:
        """Continue the stopped job as another one."""
        options = (*self.kind.options, *OPTIONS, f"--vhpc-resume={name}")
        self.jobs.append(self._shared.submit("echo never", *options, image=None))
        self._restarts, self._since = 0, time.monotonic()


@dataclass(frozen=True)
class Plan:
    """So many jobs at a time, each of so many turns, until there were so many valid checkpoints and kills."""

    seed: int
    turns: int
    checkpoints: int
    kills: int
    jobs: int = 2


class Shared:
    """State that the jobs and the faults of a campaign share."""

    def __init__(self, lab: Lab, plan: Plan, background: Background) -> None:
        self.plan, self.background = plan, background
        self._lab, self._lock = lab, threading.Lock()
        self.record = Record()
        self.begun = threading.Event()
        """A user has asked for a checkpoint."""

    def submit(self, script: str, *options: str, image: str | None = IMAGE) -> Job:
        """Submit a job; one at a time, so that the lab sees ids grow."""
        with self._lock:
            return self._lab.submit(script, *options, image=image)

    def is_ahead(self) -> bool:
        """Whether there were more kills than belong to the checkpoints so far."""
        plan, record = self.plan, self.record
        return len(record.kills) * plan.checkpoints > (record.valid + 10) * plan.kills

    def wanted(self) -> bool:
        """Whether the campaign wants more checkpoints."""
        return self.record.valid < self.plan.checkpoints or len(self.record.kills) < self.plan.kills


class Killer:
    """Kills parts of jobs and daemons, mostly while a checkpoint is made or a job is started again."""

    def __init__(self, lab: Lab, shared: Shared) -> None:
        self.lab, self._shared = lab, shared
        self._dice = random.Random(f"{shared.plan.seed}.kills")

    def run(self) -> None:
        """Kill until there were enough checkpoints and kills."""
        deck: list[str] = []
        stop = self._shared.background.stop
        while self._shared.wanted() and not stop.is_set():
            if self._shared.is_ahead():
                stop.wait(1)
                continue
            deck = deck or self._dice.sample(ROLES + DAEMONS, len(ROLES + DAEMONS))
            self._shared.begun.clear()
            self._shared.begun.wait(60)
            time.sleep(self._dice.uniform(0.0, 3.0))
            what = deck.pop()
            if what in DAEMONS:
                self._daemon(what)
            else:
                self._process(what)
            stop.wait(self._dice.uniform(0.0, 8.0))

    def _note(self, kill: Kill) -> None:
        self._shared.record.kills.append(kill)
        self._shared.background.log(f"KILL {kill.what} on {kill.host}, job {kill.job}")

    def _process(self, role: str) -> None:
        for node in self._dice.sample(self.lab.nodes, len(self.lab.nodes)):
            words, at = (role, "KILL", f"{self._dice.random():.3f}", "0", "15"), time.monotonic()
            done = self.lab.run(node, "python3", "-", *words, stdin=FIND)
            if found := json.loads(done.out):
                self._note(Kill(role, at, node, found["job"]))
                return

    def _daemon(self, what: str) -> None:
        at = time.monotonic()
        if what == "client":
            line = r"[v]hpc checkpoint [0-9]+"
            if self.lab.run("login", "pkill", "-KILL", "-u", "alice", "-f", line, check=False).code == 0:
                self._note(Kill(what, at, "login", 0))
            return
        host = self._dice.choice(self.lab.nodes) if what == "libvirtd" else "ctl"
        self._note(Kill(what, at, host, 0))
        self.lab.service(host, "kill", what)
        time.sleep(self._dice.uniform(0.0, 4.0))
        self.lab.service(host, "start", what)


# Reasons of nodes after kills of these parts, without any checkpoint too.
DRAINS = {"prolog": "Prolog error", "epilog": "Epilog error", "libvirtd": r"vhpc: cannot \w+ .*libvirt"}


class Operator:
    """Puts nodes back to work that were drained for a fault of their own; no other may be drained."""

    def __init__(self, lab: Lab, shared: Shared) -> None:
        self.lab, self._shared = lab, shared

    def run(self) -> None:
        """Look until the campaign is over."""
        record, background = self._shared.record, self._shared.background
        while not background.stop.wait(2.0):
            for node in self.lab.nodes:
                state, reason = self.lab.node_state(node)
                if "DRAIN" not in state:
                    continue
                known = {DRAINS.get(kill.what) for kill in record.kills if kill.host == node}
                if not any(pattern and re.search(pattern, reason) for pattern in known):
                    record.found.append(f"{node} is {state}: {reason}")
                background.log(f"DRAINED {node}: {reason}")
                self.lab.resume(node, check=False)


def carry_out(lab: Lab, plan: Plan, say: Callable[[str], None] = print) -> Record:
    """Run a campaign until all of its jobs have ended."""
    background = Background(say, threading.Event())
    shared = Shared(lab, plan, background)
    deck = [kind for kind in KINDS.values() for _ in range(plan.jobs)]
    random.Random(plan.seed).shuffle(deck)
    helpers = [background.thread(part(lab, shared).run) for part in (Killer, Operator)]

    def user(number: int) -> None:
        while shared.wanted() and not background.failures:
            Life(lab, number, deck[number % len(deck)], shared).live()
            number += plan.jobs

    users = [background.thread(user, number) for number in range(plan.jobs)]
    for thread in users:
        thread.join()
    background.stop.set()
    for thread in helpers:
        thread.join(60)
    shared.record.found += background.failures
    return shared.record
