# SPDX-License-Identifier: Apache-2.0
"""The hardware lab's machine as tests see it: commands in it, jobs, and what was measured."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pace import limit

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
HWLAB = str(ROOT / "lab/hwlab")
IMAGE = "debian-minimal"
# patterns of command lines
QEMU, PROLOG = "^[^ ]*qemu-system.* guest=vhpc-", "[v]hpc_slurm.hooks.prolog|[v]hpc-node-hook prolog"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# as lab/vlablib/hardware.py places them
GPU, VF, PF = "0000:42:00.0", "0000:41:10.0", "0000:41:00.0"
BRIDGE, OLD_GPU, NEIGHBOUR = "0000:22:00.0", "0000:23:01.0", "0000:23:02.0"

# says what the guest has, then waits to be let go
SCRIPT = """#!/bin/sh
for device in /sys/bus/pci/devices/*; do
    echo "pci $(cat $device/vendor):$(cat $device/device) cell $(cat $device/numa_node)"
done
for cell in /sys/devices/system/node/node[0-9]*; do
    echo "cell ${cell##*node} cpus $(cat $cell/cpulist)"
done
env | grep -E '^(SLURM_JOB_GPUS|VHPC_HOST_SLURM_JOB_GPUS)=' | sed 's/^/env /'
echo up
touch /scratch/job-$SLURM_JOB_ID || exit 1
until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.5; done
echo down
"""


# what the hooks' log says of a guest that ended with an empty console, or whose stock kernel had an exception
SPOILED = (
    r"did not boot on hw: "
    r"(?:it wrote nothing to its console|its console ended with: Kernel panic .*: Fatal exception)"
)
# what the kernel says of a processor that the emulator has given no timer
STALLED = re.compile(r"rcu\w*: .*(?:stall|starved)|blocked for more than|soft lockup")
BOOTS = 3
# seconds between questions to Slurm while a guest boots
ASK_S = 10.0
# exit status of `hwlab exec` when the machine did not answer
NO_ANSWER = 125


class MachineDiedError(Exception):
    """The machine itself has ended or hangs; carries the end of its console.

    A panic in a thread ``CPU n/KVM`` is the emulator's: its SVM is not without faults
    (docs/hardware-lab.md), so such a test is run again.
    """


class GuestDiedError(Exception):
    """A guest has ended before its kernel wrote a line, or by an exception; carries the story.

    The emulator's SVM does this now and then (docs/hardware-lab.md), so such a test is
    run again.  A guest that never boots fails all of these runs.
    """


@dataclass(frozen=True)
class Done:
    """What a command said."""

    code: int
    out: str
    err: str


@dataclass
class Machine:
    """The running machine, and how long what took in it."""

    # of `hwlab up`
    options: tuple[str, ...] = ()
    # how many times longer everything takes in it than in the machine of x86-64
    slowness: int = 1
    stages: list[tuple[str, float]] = field(default_factory=list)

    def limit(self, seconds: float) -> float:
        """A limit in seconds, made for the machine of x86-64 on the reference machine."""
        return limit(seconds * self.slowness)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure something for the table at the end."""
        began = time.monotonic()
        yield
        self.stages.append((name, time.monotonic() - began))

    def run(
        self, *argv: str, user: str = "root", stdin: str = "", check: bool = True, timeout: float = 60
    ) -> Done:
        """Run a command in the machine as a user, in his home; `timeout` is for the reference machine."""
        timeout = self.limit(timeout)
        command = [HWLAB, "exec", "-u", user, "-t", f"{timeout:g}", "--", *argv]
        ended = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout + 60, check=False
        )
        done = Done(ended.returncode, ended.stdout, ended.stderr)
        if done.code == NO_ANSWER:
            raise MachineDiedError(f"{done.err}\n{self.console()}")
        assert not check or done.code == 0, f"{shlex.join(argv)}: {done}"
        return done

    def alive(self) -> bool:
        """Whether its QEMU runs."""
        return subprocess.run([HWLAB, "status"], check=False, timeout=30).returncode == 0

    def boot(self) -> None:
        """Switch it on; again if its kernel stalls before anything of ours has run."""
        for _ in range(BOOTS):
            with self.stage("machine boots, node-setup, slurmd registers"):
                up = subprocess.run([HWLAB, "up", *self.options], check=False, timeout=self.limit(900))
            if up.returncode == 0:
                return
            said = self.console()
            if not STALLED.search(said):
                break
            print(
                "UNSTABLE: the kernel of the emulated machine stalled at its boot:\n",
                said,
                sep="",
                flush=True,
            )
            subprocess.run([HWLAB, "down"], check=True, timeout=60)
        pytest.fail(f"hwlab up failed; the machine's console ends with:\n{said}")

    def revive(self) -> None:
        """Switch it on again where it has died, and where it hangs."""
        try:
            self.run("true")
        except MachineDiedError:
            subprocess.run([HWLAB, "down"], check=True, timeout=60)
            self.boot()

    def console(self) -> str:
        """The end of what the machine wrote to its serial port."""
        ended = subprocess.run([HWLAB, "console"], capture_output=True, check=False, timeout=30)
        return ended.stdout.decode(errors="replace")[-2000:]

    def shell(self, script: str, *, check: bool = True) -> Done:
        """Run a line of shell as root."""
        return self.run("sh", "-c", script, check=check)

    def monitor(self, command: str, **arguments: object) -> None:
        """Give the machine's QEMU a command."""
        subprocess.run([HWLAB, "qmp", command, json.dumps(arguments)], check=True, timeout=60)

    def probe(self, *argv: str) -> Any:
        """The findings of tests/hw/probe.py in the machine."""
        text = (Path(__file__).with_name("probe.py")).read_text(encoding="utf-8")
        return json.loads(self.run("python3", "-", *argv, stdin=text).out)

    def quarantined(self) -> list[str]:
        """Addresses of devices that vhpc calls quarantined."""
        rows = json.loads(self.run("vhpc", "devices", "--json").out)
        return [row["address"] for row in rows if row["state"] == "quarantined"]

    def submit(self, *options: str) -> Job:
        """sbatch SCRIPT as alice, on both CPUs of the machine, in a guest with a GPU and a function."""
        return self.sbatch(SCRIPT, "--gres=gpu:1", "--vhpc-vfs=1", *options)

    def sbatch(self, script: str, *options: str) -> Job:
        """Submit a script as alice, on both CPUs of the machine, in a guest."""
        words = ["-n1", "-c2", "--mem=768", f"--vhpc-image={IMAGE}"]
        done = self.run("sbatch", "--parsable", *words, *options, user="alice", stdin=script)
        return Job(self, int(done.out))

    def node(self) -> tuple[str, str]:
        """(state, reason) of the node in Slurm."""
        out = self.run("sinfo", "-h", "-o", "%T|%E").out.strip()
        state, _, reason = out.partition("|")
        return state, reason

    def until(self, condition: Callable[[], T], what: str, timeout: float = 120) -> T:
        """Wait for a condition to be true; returns what it gave."""
        end = time.monotonic() + self.limit(timeout)
        while not (found := condition()):
            assert time.monotonic() < end, f"waited for {what} in vain\n{self.story()}"
            time.sleep(0.3)
        return found

    def story(self) -> str:
        """The output that a person would look at first."""
        script = (
            "squeue; sinfo -R; tail -n 8 /var/log/vhpc/hooks.log; tail -n 5 /run/vhpc/jobs/*/*/console.log"
        )
        return self.shell(script, check=False).out

    def quiet(self) -> None:
        """Cancel what there is, use the node again, and wait until it is idle."""
        self.run("scancel", "--user=alice")
        self.until(lambda: not self.run("squeue", "-h").out, "an empty queue", 400)
        if self.node()[0] != "idle":
            self.run("scontrol", "update", "NodeName=hw", "State=RESUME", check=False)
        self.until(lambda: self.node()[0] == "idle", "an idle node", 120)


@dataclass(frozen=True)
class Job:
    """A job of alice."""

    machine: Machine
    id: int

    def show(self) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        out = self.machine.run("scontrol", "-o", "show", "job", str(self.id)).out
        return dict(word.split("=", 1) for word in out.split() if "=" in word)

    def wait(self, *states: str, timeout: float = 400) -> str:
        """Wait for one of the states (default: ended)."""
        wanted = states or ENDED

        def reached() -> str:
            state = self.show()["JobState"]
            return state if state in wanted else ""

        return self.machine.until(reached, f"job {self.id} to be {' or '.join(wanted)}", timeout)

    def output(self) -> str:
        """The output so far."""
        return self.machine.run("cat", f"slurm-{self.id}.out", user="alice", check=False).out

    def runs(self, timeout: float = 480) -> None:
        """Wait until its script says that it runs in the guest; fails as soon as the job has ended."""
        asked = time.monotonic()

        def runs_or_ended() -> bool:
            nonlocal asked
            if "up\n" in self.output():
                return True
            # a question to Slurm takes a CPU that the guest needs
            if time.monotonic() - asked < ASK_S:
                return False
            asked = time.monotonic()
            return self.show()["JobState"] in ENDED

        self.machine.until(runs_or_ended, f"job {self.id} to run", timeout)
        if "up\n" not in self.output():
            story = self.machine.story()
            if re.search(rf" job {self.id}: .*{SPOILED}", story, re.M):
                raise GuestDiedError(story)
            raise AssertionError(f"job {self.id} ended before its script ran\n{story}")

    def let_go(self) -> None:
        """Let the script end."""
        self.machine.run("touch", f"go-{self.id}", user="alice")

    def domain(self) -> str:
        """Name of its guest's domain."""
        names = self.machine.run("virsh", "-q", "list", "--name").out.split()
        (found,) = (name for name in names if name.startswith(f"vhpc-{self.id}-"))
        return found


def kill_when(machine: Machine, job: Job, condition: str, victim: str) -> None:
    """As soon as a shell's condition holds, kill what a pattern names by SIGKILL."""
    wait = f"for i in $(seq 900); do if {condition}; then break; fi; sleep 0.1; done"
    pids = f"$(pgrep -f '{victim}' | grep -v -w $$)"
    done = machine.run("sh", "-c", f"{wait}; kill -KILL {pids}", timeout=120, check=False)
    assert done.code == 0, f"{victim} was not there to be killed: {done}\n{machine.story()}"
