# SPDX-License-Identifier: Apache-2.0
"""A job with two guests on one machine, whose steps have a task in each of them."""

from __future__ import annotations

import errno
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from guest_processes import WAIT_S
from guest_rig import Saved

from pace import until
from vhpc_slurm.node.guest import hold as holding
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.guest.hold import release

# An srun with a task in each guest, whose output goes to stdout and to stderr. As with Slurm's, its status is
# the highest of its tasks, and they get its variables; after a checkpoint the guests have other sockets.
SRUN = """#!/bin/sh
cd {folder}
echo "$*" >> sruns
while [ "${{1#-}}" != "$1" ]; do shift; done
[ ! -e waits ] || until [ -e "$(cat waits)" ]; do sleep 0.05; done
rank=0 pids=
for socket in $(cat sockets); do
    export SLURM_STEP_ID=$(wc -l < sruns) SLURM_PROCID=$rank VHPC_RUN_SOCKET=$socket
    if [ $rank = 0 ]; then exec 3>&1; else exec 3>&2; fi
    {bin}/vhpc-run -- "$@" </dev/null >&3 3>&- &
    pids="$pids $!"; rank=$((rank + 1))
done
trap 'kill -TERM $pids' TERM
status=0
for pid in $pids; do
    wait $pid; code=$?
    if kill -0 $pid 2>/dev/null; then wait $pid; code=$?; fi # the trap has ended the first wait
    [ $code -le $status ] || status=$code
done
exit $status
"""


class Job:
    """Its batch script runs in the first guest.

    Args:
        programs: the folder of the guest's programs.
        folder: of the job.
        srun: text of the host's srun, with the names of both folders in braces.
    """

    def __init__(self, programs: Path, folder: Path, srun: str = SRUN) -> None:
        self.folder = folder
        self.guests = []
        for name in ("g0", "g1"):
            (folder / name).mkdir()
            self.guests.append(Saved(programs, folder / name))
        self.first = self.guests[0]
        commands = folder / "commands"
        commands.mkdir()
        (commands / "srun").write_text(srun.format(folder=folder, bin=programs))
        (commands / "srun").chmod(0o755)
        self.env = {"VHPC_RUN_COMMANDS": "srun", "VHPC_RUN_COMMAND_PATH": str(commands)}
        self.env |= {
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NPROCS": "2",
        }
        self.serial = 0
        self.told()

    def wait_for(self, name: str) -> None:
        """The host's srun waits for a file before it starts its tasks."""
        (self.folder / "waits").write_text(name)

    def sruns(self) -> list[str]:
        """The sruns of the host, with their arguments."""
        return self.out("sruns").splitlines()

    def told(self) -> None:
        (self.folder / "sockets").write_text("\n".join(str(guest.socket) for guest in self.guests))

    def srun(self, program: str, *options: str) -> str:
        """The words of the batch script that call srun in the guest."""
        words = [str(self.first.bin / "vhpc-agent"), "--call", "srun", *options, "sh", "-c", program]
        return shlex.join(words)

    def start(self, script: str, **more: str) -> subprocess.Popen[bytes]:
        self.first.script(f"cd {self.folder}\n{script}")
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return self.first.run(out, err, **self.env, **more)

    def attach(self, **more: str) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            return self.first.run(out, err, **self.env, **more, VHPC_RUN_ATTACH="batch")

    def prepare(self) -> None:
        self.serial += 1
        for guest in self.guests:
            with guest.control() as channel:
                holding.prepare(channel, self.serial, WAIT_S)

    def hold(self) -> None:
        """As the keepers of two nodes do: all are prepared before one is held, and they are held at once."""
        self.prepare()
        self.hold_prepared()

    def hold_prepared(self) -> None:
        def hold(guest: Saved) -> None:
            with guest.control() as channel:
                holding.hold(channel, WAIT_S)

        with ThreadPoolExecutor(len(self.guests)) as pool:
            list(pool.map(hold, self.guests))

    def delay(self) -> str:
        """Ask for a hold of the first guest, which is refused; returns the reason."""
        with self.first.control() as channel, pytest.raises(ChannelRefusedError) as caught:
            holding.prepare(channel, 1, 0.2)
        assert caught.value.errno == errno.EBUSY
        return caught.value.why

    def release(self) -> None:
        for guest in self.guests:
            with guest.control() as channel:
                release(channel)

    def restore(self) -> None:
        """The guests continue in another job, with other shims."""
        for guest in self.guests:
            guest.restore()
        self.told()

    def next_run(self, run: subprocess.Popen[bytes], **more: str) -> subprocess.Popen[bytes]:
        """Hold the guests, and continue the script in another job; returns its process on the host."""
        self.hold()
        self.restore()
        run.wait(WAIT_S)
        return self.attach(**more)

    def out(self, name: str = "out") -> str:
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""

    def both(self) -> list[str]:
        """Lines of both tasks and of the script."""
        return sorted((self.out() + self.out("err")).splitlines())

    def tasks_said(self, word: str) -> None:
        until(lambda: self.both().count(word) == 2, f"{word} of both tasks")

    def grown(self) -> None:
        """Wait for more output of each task."""
        sizes = {name: len(self.out(name)) for name in ("out", "err")}
        until(lambda: all(len(self.out(name)) > sizes[name] for name in sizes), "more output of both tasks")

    def close(self) -> None:
        for guest in self.guests:
            guest.close()


class ServedJob(Job):
    """A job whose srun has a server of the MPI programs, which writes its errors to a file.

    Args:
        srun: the program that is its srun.
        errors: name of the file.
        task: program of a task, in Python.
    """

    def __init__(self, programs: Path, folder: Path, srun: Path, errors: str, task: str) -> None:
        super().__init__(
            programs, folder, f'#!/bin/sh\nexec {sys.executable} {srun} {{folder}} {{bin}} "$@"\n'
        )
        self._errors, self._task = errors, task

    def mpi(self, *arguments: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a script with a step of the task's program; ``more`` are variables of the job."""
        words = [str(self.first.bin / "vhpc-agent"), "--call", "srun", sys.executable, "-c", self._task]
        return self.start(f"{shlex.join([*words, *arguments])}; echo status $?", **more)

    def errors(self) -> str:
        """Errors of servers and relays."""
        lines = [line for line in self.both() if not line.startswith(("0 ", "1 ", "status "))]
        return "\n".join([self.out(self._errors), *lines]).strip()

    def both(self) -> list[str]:
        """Without what the script's relay says of its guest, which it loses when the job has been saved."""
        return [line for line in super().both() if not line.startswith("vhpc: the guest of job (none) on ")]

    def both_say(self, *words: str) -> None:
        """Wait until both tasks have said this; ``{other}`` is the other task's number."""
        lines = [f"{rank} {' '.join(words)}".replace("{other}", str(1 - rank)) for rank in (0, 1)]
        until(
            lambda: all(line in self.both() for line in lines), f"{lines} in {self.both()}, {self.out('err')}"
        )


@pytest.fixture
def job(programs: Path, tmp_path: Path) -> Iterator[Job]:
    made = Job(programs, tmp_path)
    yield made
    made.close()
