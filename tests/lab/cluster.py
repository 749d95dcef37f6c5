# SPDX-License-Identifier: Apache-2.0
"""The lab as tests see it: commands on its hosts, jobs, and an independent count of what is left."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from host_commands import HostCommands
from slurm_says import shown

from pace import PACE, limit

ROOT = Path(__file__).resolve().parents[2]
VLAB = str(ROOT / "lab" / "vlab")
EXEC = (sys.executable, "-S", VLAB, "exec")
"""`vlab exec`, started by this Python and without its site packages: in a third of the time."""
AS_VHPCD = ("setpriv", "--reuid=vhpc", "--regid=vhpc", "--init-groups")
"""On the controller: as the user of vhpcd, who has its database."""
IMAGE = "debian-minimal"
NODES = ("n1", "n2")
# the lab's boot timeout: lab/vlablib/cluster.py
BOOT_S = math.ceil(120 * min(PACE, 10.0))
# Faults of the emulator, as the messages of jobs show them: an emulated CPU has lost a timer interrupt, after
# or before the kernel could write to the console; and an assertion of QEMU 10.0 about its own tables.
EMULATOR_FAULTS = re.compile(
    "RCU grace-period kthread stack dump"
    f"|within {BOOT_S} s on n[0-9]+(?: \\(guest \\S+\\))?: it wrote nothing to its console"
    "|iotlb_to_section: Assertion"
)
PROCESSES = """
for process in /proc/[0-9]*; do
    echo $(cut -d' ' -f1-4 $process/stat) $(cat $process/wchan) $(tr '\\0' ' ' < $process/cmdline)
done 2>&1 | grep -av "^[0-9]* (.*) [A-Z] 2 "  # no threads of the kernel
"""
SLEEP_ON_ALL_CPUS = """
import os, time
for cpu in os.sched_getaffinity(0):
    os.sched_setaffinity(0, {cpu})
    time.sleep(0.1)
"""
USAGE = re.compile(r"(?:; |(?<=^vhpc:) )usage (?:[a-z_]+=[0-9./]+ ?)+$")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


class EmulatorError(Exception):
    """A guest failed because it is emulated; scripts/lab-tests tries such a test again."""


class SlurmRaceError(Exception):
    """A race of Slurm (docs/install.md, "drained again and again") drained a node; tried again likewise."""


@dataclass(frozen=True)
class Done:
    """The output of a command on a host."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Job:
    """A job of the lab, by its id and the user's home."""

    lab: Lab
    id: int
    user: str

    def show(self) -> dict[str, str]:
        """Fields of ``scontrol -o show job``; user text with spaces is cut, which no test looks at."""
        said = shown(self.lab.run, "job", "-d", str(self.id))
        words = (word for word in said.split() if not word.startswith("-"))  # options of SubmitLine
        return dict(word.split("=", 1) for word in words if "=" in word)

    def told(self) -> str:
        """A failed test's text about a job: its state, the end of its output, the reason, and its times."""
        show = self.show()
        fields = ("Reason", "Restarts", "NodeList", "SubmitTime", "StartTime", "EndTime")
        said = self.lab.run("login", "tail", "-n1", show.get("StdOut", "/dev/null"), check=False).out
        return f"job {self.id} is {show['JobState']}, said {said[:60]!r}: " + " ".join(
            f"{name}={show.get(name)}" for name in fields
        )

    def wait(self, *states: str, timeout: float = 180) -> str:
        """Wait for one of the states (default: ended); returns it."""
        until = time.monotonic() + limit(timeout)
        while True:
            show = self.show()
            state = show["JobState"]
            if state in (states or ENDED):
                if state in ENDED:  # run() finds a fault of the emulator there
                    errors = show.get("StdErr", "/dev/null")
                    self.lab.run("login", "tail", "-c", "20000", errors, check=False)
                return state
            assert time.monotonic() < until, f"{self.told()}, waited for {states or 'its end'}"
            time.sleep(0.3)

    def sleeps(self) -> None:
        """See whether time passes on all CPUs of a running job's guests.

        Raises:
            EmulatorError: programs run, but a sleep does not end: a CPU has lost a timer interrupt.
        """
        step = ("timeout", "60", "srun", f"--jobid={self.id}", "--overlap", "--ntasks-per-node=1")

        def status(code: str) -> int:
            return self.lab.run("login", *step, "python3", "-c", code, user=self.user, check=False).code

        if status("") == 0 and status(SLEEP_ON_ALL_CPUS) == 124:
            self.lab.run("ctl", "scancel", str(self.id))
            raise EmulatorError(f"a sleep does not end in a guest of job {self.id}")

    def processes(self) -> str:
        """Processes of the job's guests and of its nodes, with their states, for a test that has failed."""
        guests = ("timeout", "60", "srun", f"--jobid={self.id}", "--overlap", "-l", "sh", "-c", PROCESSES)
        done = self.lab.run("login", *guests, user=self.user, check=False)
        found = [f"processes of job {self.id} on its nodes and in its guests"]
        for node in self.lab.nodes:
            lines = self.lab.run(node, "ps", "-eo", "pid,ppid,stat,wchan:20,args").out.splitlines()
            found += [f"{node}: {line}" for line in lines if re.search("slurmstepd|vhpc-|qemu|srun", line)]
        return "\n".join([*found, done.out, done.err])

    def queued(self) -> bool:
        """Whether the job, a component or an element of its array is in the queue; a failed squeue fails."""
        ids = self.lab.run("ctl", "squeue", "-h", "-o", "%i").out.splitlines()
        return any(re.match(rf"{self.id}(?!\d)", line) for line in ids)

    def leave_queue(self, timeout: float = 300) -> None:
        """Wait until all of it has ended, and the Epilogs of its nodes too."""
        until = time.monotonic() + limit(timeout)
        while self.queued():
            assert time.monotonic() < until, f"job {self.id} has not left the queue after {timeout:.0f} s"
            time.sleep(0.3)

    def accounted(self, fields: str = "State,ExitCode", step: str = "") -> list[str]:
        """A row of sacct for the job or one of its steps (``.batch``, ``.0``), when the row has its end.

        AdminComment is without the figures of what the job has used, which come a moment later.
        """
        want = f"{self.id}{step}"
        until = time.monotonic() + limit(60)
        while True:
            out = self.lab.run("ctl", "sacct", "-nP", "-j", str(self.id), "-o", f"JobID,State,{fields}").out
            rows = {row.split("|")[0]: row.split("|")[1:] for row in out.splitlines()}
            state, *row = rows.get(want, ["PENDING"])
            if not state.startswith(("RUNNING", "PENDING", "COMPLETING")):
                return [USAGE.sub("", cell) for cell in row]
            assert time.monotonic() < until, f"no ended row {want} in {rows}"
            time.sleep(0.3)

    def output(self, name: str = "slurm-{id}.out") -> str:
        """A file of the user's home, as text, without what srun prints on a busy machine."""
        return without_retries(self.lab.read(self.user, name.format(id=self.id)))


def vlab_status() -> dict[str, Any]:
    """The output of `vlab status --json`: paths of the lab, its hosts with their pids, addresses and units.

    Without a lab there are no hosts.
    """
    done = subprocess.run([VLAB, "status", "--json"], capture_output=True, check=False, timeout=60)
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def publish(image: str) -> None:
    """Build an image that the lab does not always have, and publish it."""
    subprocess.run([ROOT / "scripts/publish-image", image], check=True, timeout=3600)


def without_retries(text: str) -> str:
    """Output of srun without what it prints on a busy machine, and of MPI where guests are emulated."""
    return re.sub(
        r"^(?:srun: (?:Job (?:\d+ )?step creation temporarily disabled|Step created for )"
        r"|(?:\d+: )?vhpc: the guests are emulated, ).*\n",
        "",
        text,
        flags=re.M,
    )


class Lab:
    """Hosts of the lab."""

    _newest = 0

    @cached_property
    def _commands(self) -> HostCommands:
        return HostCommands()

    @cached_property
    def slurm_conf(self) -> str:
        """Path of slurm.conf, the same on all hosts: sysconfdir of the Slurm that the lab has."""
        said = self.run("ctl", "scontrol", "show", "config").out
        named = re.search(r"^SLURM_CONF\s*= (/\S+)$", said, re.M)
        assert named is not None, said
        return named[1]

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the compute nodes: two, unless the lab was started with more."""
        names = self.run("ctl", "sinfo", "-N", "-h", "-o", "%N").out.split()
        return tuple(sorted(set(names), key=lambda name: int(name[1:])))

    def run(
        self,
        host: str,
        *argv: str,
        user: str = "root",
        stdin: str = "",
        check: bool = True,
        timeout: float = 120,
    ) -> Done:
        """Run a command on a host as a user, in his home.

        Raises:
            EmulatorError: the output on the login host shows a fault of the emulator.
        """
        done = self._commands.run(["-u", user, host, "--", *argv], stdin.encode(), limit(timeout))
        result = Done(done.code, done.out.decode(errors="replace"), done.err.decode(errors="replace"))
        if host == "login" and (fault := self._emulator_fault(result.out + result.err)):
            raise EmulatorError(fault)
        assert not check or result.code == 0, f"{host}: {shlex.join(argv)}: {result}"
        return result

    def _emulator_fault(self, said: str) -> str:
        """The sign of a fault of the emulator in what a job's user reads, or in a console that it names."""
        consoles = [
            self._commands.run(["-u", "root", "login", "--", "cat", path], b"", limit(60)).out.decode(
                errors="replace"
            )
            for path in re.findall(r"its console: (/\S+\.console)", said)
        ]
        found = EMULATOR_FAULTS.search("\n".join([said, *consoles]))
        return found[0] if found else ""

    def time_passes(self) -> None:
        """See whether time passes in the guests of all running jobs; prints their processes if it does.

        Raises:
            EmulatorError: not in one of them.
        """
        rows = self.run("ctl", "squeue", "-h", "-t", "R", "-o", "%A %u").out.splitlines()
        for number, user in map(str.split, rows):
            job = Job(self, int(number), user)
            job.sleeps()
            print(job.processes())

    def cancel_all(self) -> None:
        """End all jobs."""
        jobs = self.run("ctl", "squeue", "-h", "-o", "%A").out.split()
        if jobs:
            self.run("ctl", "scancel", *jobs)
        self.quiet()

    def service(self, host: str, act: str, unit: str) -> None:
        """Start, stop or kill a daemon of a host."""
        subprocess.run(
            [VLAB, "service", host, act, unit], check=True, capture_output=True, timeout=limit(150)
        )

    def submit(self, script: str, *options: str, user: str = "alice", image: str | None = IMAGE) -> Job:
        """sbatch a script; ``image`` None means a job without a guest."""
        vhpc = [f"--vhpc-image={image}"] if image is not None else []
        done = self.run(
            "login", "sbatch", "--parsable", *vhpc, *options, user=user, stdin=f"#!/bin/sh\n{script}\n"
        )
        job = Job(self, int(done.out.strip()), user)
        self._is_new(job)
        return job

    def _is_new(self, job: Job) -> None:
        """Fail if slurmctld begins again with job ids: outputs of older jobs would be taken for new ones."""
        newest, self._newest = self._newest, max(self._newest, job.id)
        if job.id > newest:
            return
        log = self.run("ctl", "tail", "-n", "40", "/var/log/slurm/slurmctld.log", check=False).out
        raise AssertionError(
            f"job {job.id} came after job {newest}: slurmctld has lost its state;"
            f" hosts: {vlab_status()['hosts']}\n{log}"
        )

    def finish(self, script: str, *options: str, user: str = "alice", image: str | None = IMAGE) -> Job:
        """Submit and wait for the end."""
        job = self.submit(script, *options, user=user, image=image)
        job.wait()
        return job

    def read(self, user: str, name: str) -> str:
        """A file of a user's home."""
        return self.run("login", "cat", f"/home/{user}/{name}").out

    def vhpc(self, host: str, *argv: str, check: bool = True) -> Any:
        """A vhpc command's JSON."""
        done = self.run(host, "vhpc", *argv, "--json", check=check)
        return json.loads(done.out)

    def has_nat(self) -> bool:
        """Whether the nodes have a passt that can serve guests (2024_11_27 or newer)."""
        done = self.run("n1", "passt", "--help", check=False)
        return "--vhost-user" in done.out + done.err

    def has_pmix(self) -> bool:
        """Whether this Slurm has --mpi=pmix; without libpmix it has not (Debian 12)."""
        return self.run("login", "srun", "--mpi=pmix", "true", user="alice", check=False).code == 0

    def node_state(self, node: str) -> tuple[str, str]:
        """(state, reason) of a node."""
        out = shown(self.run, "node", node)
        state = re.search(r" State=(\S+)", out)
        reason = re.search(r" Reason=(.*?)(?: \[|$)", out)
        assert state is not None
        return state[1], reason[1] if reason else ""

    def resume(self, node: str, check: bool = True) -> None:
        """Put a drained node back to work; Slurm refuses it for one that is not drained."""
        self.run("ctl", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=check)

    def quiet(self, timeout: float = 180) -> None:
        """Wait until no job is left in the queue, completing ones included."""
        until = time.monotonic() + limit(timeout)
        while self.run("ctl", "squeue", "-h", "-o", "%i %T").out.strip():
            assert time.monotonic() < until, self.run("ctl", "squeue").out
            time.sleep(0.3)

    def all_idle(self, timeout: float = 60) -> None:
        """Wait until all nodes have registered and respond; then each is idle: not drained, not down.

        A node that is drained or down is resumed, so that it fails this test and no other.
        """
        until = time.monotonic() + limit(timeout)
        while True:
            states = self.run("ctl", "scontrol", "-o", "show", "node", ",".join(self.nodes)).out
            if not re.search("NOT_RESPONDING|State=UNKNOWN", states) or time.monotonic() > until:
                break
            time.sleep(1)  # a node that was just resumed is asked for an answer first
        idle = re.findall(r" State=(\S+)", states.replace("+PLANNED", ""))
        if idle != ["IDLE"] * len(self.nodes):
            logs = [self.run(node, "tail", "-n60", "/var/log/slurm/slurmd.log").out for node in self.nodes]
            for node in self.nodes:
                self.resume(node, check=False)
            raise AssertionError("\n".join(["nodes are not idle:", states, *logs]))

    def leaks(self) -> list[str]:
        """Leftovers on the nodes, found without code of vhpc."""
        found = []
        for node in self.nodes:
            script = (
                "virsh -q list --all --name | grep -v '^$' | sed 's/^/domain /';"
                # not what has ended and waits for the host's PID 1
                "ps -eo stat,pid,uid,args | grep -E 'qemu-system|virtiofsd|passt|vhpc-(shim|run|agent)' |"
                " grep -v -E 'grep|^Z' | sed 's/^/process /';"
                "grep -E 'vhpc|virtiofs' /proc/mounts | grep -v -E '/shared|/opt/vhpc|libexec|lowerdir' |"
                " sed 's/^/mount /';"
                "find /run/vhpc/jobs /run/vhpc/uids /run/vhpc/warming /var/lib/vhpc/journal"
                " /var/lib/vhpc/outbox /var/lib/vhpc/disks /var/lib/vhpc/images/pins"
                " -mindepth 1 2>/dev/null | sed 's/^/file /';"
                "find /sys/fs/cgroup/*/vhpc.partition -mindepth 1 -maxdepth 1 -type d 2>/dev/null |"
                " sed 's/^/cgroup /';"
                "ip -o link | grep -E 'tap|vnet|macvtap|vhpc' | sed 's/^/link /';"
                "nft list tables | grep vhpc | grep -v 'inet vhpc-port$' | sed 's/^/nftables /'"
            )
            out = self.run(node, "sh", "-c", script, check=False).out
            found += [f"{node}: {line}" for line in out.splitlines() if line.strip()]
        return found

    def leases(self) -> list[str]:
        """Leases that are not released, read from vhpcd's database and not asked of vhpcd."""
        script = (
            "import sqlite3\n"
            "db = sqlite3.connect('file:/var/lib/vhpc/vhpcd/leases.sqlite?mode=ro', uri=True)\n"
            "query = \"SELECT generation, state FROM lease WHERE state <> 'released'\"\n"
            "for row in db.execute(query): print(*row)\n"
        )
        return self.run("ctl", "python3", "-", stdin=script).out.splitlines()

    def assert_nothing_left(self) -> None:
        """End what runs; then the queue is empty, nodes are idle, and an independent count finds nothing."""
        if self.run("ctl", "squeue", "-h").out:
            self.run("ctl", "sh", "-c", "scancel --user=alice; scancel --user=bob", check=False)
            self.quiet()
        self.all_idle()
        assert self.leaks() == []

    def assert_clean(self) -> None:
        """The same, and vhpc reports the same for each node."""
        self.assert_nothing_left()
        for node in self.nodes:
            assert self.vhpc(node, "reconcile", "--check") == []
