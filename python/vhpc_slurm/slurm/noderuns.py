# SPDX-License-Identifier: Apache-2.0
"""A command that root runs on many nodes, by an srun with a job of its own for each node.

A job for each node, and not one for all: a busy or broken node delays no other.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from vhpc_slurm.errors import UserError
from vhpc_slurm.model import NODE_NAME
from vhpc_slurm.slurm import hostlist
from vhpc_slurm.slurm.port import SlurmError
from vhpc_slurm.terminal import one_line

SINFO_FORMAT = "%N|%T|%a|%P"
"""Node, its state, state of the partition, partition (``*``: the default one); a line for each partition."""
SINFO_S = 30.0
START_S = 120
"""Seconds for which srun waits for a free CPU on the node."""
SPARE_S = 300
"""Seconds for Prolog and Epilog, and for the start of the command."""
END_S = 10.0
"""How long an srun may take to end its job."""
POLL_S = 0.1
MAX_OUTPUT = 64 << 10
"""Bytes of stdout, and of stderr, that a command may print."""
MAX_COMPLAINT = 500
ERROR = "srun: error: "
BUSY = "Requested nodes are busy"
UNUSABLE = ("down", "drain", "fail", "unknown", "future")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Place:
    """A node as sinfo shows it: its state, such as ``drained*``, and a partition that it is in."""

    node: str
    state: str
    partition: str

    @property
    def is_usable(self) -> bool:
        """Whether jobs can start there."""
        return not self.state.startswith(UNUSABLE)


@dataclass(frozen=True)
class Ended:
    """The end of a command on a node: its stdout, and why it failed, empty if it did not."""

    node: str
    output: bytes
    problem: str = ""


class NodeRuns:
    """Runs a command on nodes as root."""

    def __init__(self, bin_dir: str = "/usr/bin", *, slurm_conf: str = "") -> None:
        """Use the commands in ``bin_dir``; ``slurm_conf`` empty means Slurm's own default."""
        self._bin = Path(bin_dir)
        self._environment = {"LC_ALL": "C", "PATH": PATH}
        if slurm_conf:
            self._environment["SLURM_CONF"] = slurm_conf

    def places(self, nodes: str) -> tuple[Place, ...]:
        """The nodes of a host list such as ``n[1-3],n7``, each once, in this order.

        Raises:
            UserError: it is not a host list, or the cluster has no such node.
            SlurmError: sinfo failed.
        """
        try:
            wanted = tuple(dict.fromkeys(hostlist.expand(nodes)))
        except ValueError as err:
            raise UserError(f"{nodes[:80]!r} is not a list of nodes", str(err), "write: n[1-3],n7") from err
        if wrong := [name for name in wanted if not NODE_NAME.match(name)]:
            raise UserError(f"{wrong[0][:80]!r} is not a valid node name")
        known = self._known()
        if absent := [name for name in wanted if name not in known]:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            raise UserError(
                f"the cluster has no node {', '.join(absent[:3])}{more}",
                "no partition has a node of this name",
                "see: sinfo -N",
            )
        return tuple(known[name] for name in wanted)

    def _known(self) -> dict[str, Place]:
        """All nodes in partitions; the partition is one that is up, the default one if that is."""
        options = ("--all", "--local", "--Node", "--noheader", f"--format={SINFO_FORMAT}")
        try:
            done = subprocess.run(
                [str(self._bin / "sinfo"), *options],
                env=self._environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SINFO_S,
                check=False,
            )
        except subprocess.TimeoutExpired as err:
            raise SlurmError("sinfo failed", f"no answer within {SINFO_S:g} s", "see: scontrol ping") from err
        except OSError as err:
            raise SlurmError("sinfo failed", str(err), "set controller.slurm_bin in vhpc.toml") from err
        if done.returncode:
            why = one_line(done.stderr.decode("utf-8", "replace"))[-300:]
            raise SlurmError("sinfo failed", why or f"exit status {done.returncode}")
        return _parse(done.stdout.decode("utf-8", "replace"))

    def run(
        self,
        places: Sequence[Place],
        command: Sequence[str],
        *,
        parallel: int,
        timeout_s: int,
        memory_mib: int,
    ) -> Generator[Ended, None, None]:
        """Run a command once on each node, and yield each end, as they come.

        All that run are ended if the iterator is closed, or left by an exception.

        Args:
            places: the nodes; jobs must be able to start there.
            command: program and arguments, no shell.
            parallel: on how many nodes it runs at once.
            timeout_s: how long the command may take on a node.
            memory_mib: memory of the command; files that it writes to a tmpfs count.

        Raises:
            SlurmError: there is no srun.
        """
        waiting, running = list(reversed(places)), list[Run]()
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    place = waiting.pop()
                    with interrupt_deferred():
                        running.append(self.start(place, command, timeout_s=timeout_s, memory_mib=memory_mib))
                ended = [run for run in running if run.has_ended()]
                for run in ended:
                    running.remove(run)
                    yield run.result()
                if not ended:
                    time.sleep(POLL_S)
        finally:
            end(running)

    def start(
        self,
        place: Place,
        command: Sequence[str],
        *,
        timeout_s: int,
        memory_mib: int,
        talks: bool = False,
    ) -> Run:
        """Start a command on a node; arguments as ``run``.

        ``talks``: it has a standard input, which ends if this process is killed.
        Call it in ``interrupt_deferred``, and note the result there: Ctrl-C does not reach srun.

        Raises:
            SlurmError: there is no srun.
        """
        options = (
            f"--nodelist={place.node}", f"--partition={place.partition}", "--nodes=1", "--ntasks=1",
            "--cpus-per-task=1", f"--mem={memory_mib}M", f"--time={math.ceil((timeout_s + SPARE_S) / 60)}",
            f"--immediate={START_S}", "--job-name=vhpc-image", "--chdir=/", "--mpi=none",
            f"--input={'all' if talks else 'none'}",
        )  # fmt: skip
        argv = [str(self._bin / "srun"), *options, *command]
        try:
            child = subprocess.Popen(
                argv,
                env=self._environment,
                cwd="/",
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only this program, which then ends the jobs
            )
        except OSError as problem:
            raise SlurmError(f"cannot start {argv[0]}", problem.strerror or str(problem)) from problem
        return Run(place.node, child, time.monotonic() + START_S + timeout_s + SPARE_S)


@dataclass
class Run:
    """A running srun.

    Attributes:
        node: its node.
        child: the srun.
        until: when it is ended at the latest, of ``time.monotonic``.
        why: why it was ended; empty if it was not.
        said: its standard output and its standard error so far.
    """

    node: str
    child: subprocess.Popen[bytes]
    until: float
    why: str = field(default="", init=False)
    said: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()), init=False)

    def __post_init__(self) -> None:
        for pipe in (*self._pipes(), *filter(None, [self.child.stdin])):
            os.set_blocking(pipe.fileno(), False)

    def tell(self, line: bytes) -> None:
        """Write a line to its standard input; it is lost if srun has ended, or takes no more."""
        assert self.child.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self.child.stdin.fileno(), line + b"\n")

    def dismiss(self) -> None:
        """End its standard input, so that it ends within the time for an Epilog."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.until = min(self.until, time.monotonic() + SPARE_S)

    @property
    def lines(self) -> list[bytes]:
        """The whole lines of its standard output."""
        return bytes(self.said[0]).split(b"\n")[:-1]

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        return self.child.stdout, self.child.stderr

    def _read(self) -> None:
        """Read what is there, at most one byte more than permitted."""
        for pipe, kept in zip(self._pipes(), self.said, strict=True):
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(pipe.fileno(), MAX_OUTPUT + 1 - len(kept)):
                    kept.extend(chunk)

    def has_ended(self) -> bool:
        """Whether srun has ended; it is ended if its time is over, or if it prints without end."""
        ended = self.child.poll() is not None
        self._read()
        if max(map(len, self.said)) > MAX_OUTPUT:
            self.why = f"it printed more than {MAX_OUTPUT} bytes"
        elif not ended and time.monotonic() > self.until:
            self.why = "no end within the time limit"
        if self.why:
            end([self])
        return ended or bool(self.why)

    def result(self) -> Ended:
        """The output, and why the command failed, once it has ended."""
        for pipe in (*self._pipes(), *filter(None, [self.child.stdin])):
            pipe.close()  # a process that srun has left behind cannot write on
        output, said = bytes(self.said[0]), self.said[1].decode("utf-8", "replace")
        if self.why or not self.child.returncode:
            return Ended(self.node, output, self.why)
        if BUSY in said:
            return Ended(self.node, output, f"no CPU or memory of it was free for a job within {START_S} s")
        return Ended(self.node, output, _complaint(said) or f"exit status {self.child.returncode}")


def _complaint(said: str) -> str:
    """Why an srun failed: the last line of its command or of slurmstepd, else the first error of srun."""
    lines = [one_line(line) for line in said.split("\n") if line.strip()]
    others = [line for line in lines if not line.startswith("srun: ")]
    errors = [line for line in lines if line.startswith(ERROR)] or lines
    return (others[-1] if others else errors[0].removeprefix(ERROR) if errors else "")[:MAX_COMPLAINT]


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: what the block starts is noted then, and can be ended.

    The signal is not blocked, because a child would inherit that.
    """
    if threading.current_thread() is not threading.main_thread():  # signals do not interrupt others
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


def end(runs: Sequence[Run]) -> None:
    """End all at once; an srun ends its job when it is told to, but not while slurmctld is away."""
    for run in runs:
        if run.child.poll() is None:
            run.child.terminate()
    until = time.monotonic() + END_S
    for run in runs:
        try:
            run.child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.child.kill()
            run.child.wait()


def _parse(text: str) -> dict[str, Place]:
    """Parse what sinfo prints in SINFO_FORMAT.

    Raises:
        SlurmError: a line has another form.
    """
    found: dict[str, tuple[tuple[bool, bool], Place]] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 4 or not NODE_NAME.match(words[0]) or not words[3]:
            raise SlurmError("cannot parse Slurm's list of nodes", f"sinfo printed {line[:200]!r}")
        name, state, available, partition = words
        rank = (available == "up", partition.endswith("*"))
        if name not in found or rank > found[name][0]:
            found[name] = (rank, Place(name, state, partition.removesuffix("*")))
    return {name: place for name, (_, place) in found.items()}
