# SPDX-License-Identifier: Apache-2.0
"""Helper processes: they run on the node with a user's rights, protected from that user.

The job's user may run programs on the host (a task prolog, a job without
guests) with the same ids as the helper daemons.  vhpc-confine prevents access
by these programs: see confine/.  Only signals remain possible; so the user is
responsible for a helper that a signal has ended or stopped, and this module
distinguishes that from a fault of the node.
"""
# Decision: Helpers run in a user namespace owned by root

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec import Struct

from vhpc_slurm.cpulist import format_cpu_list
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.node.host import fuse, process
from vhpc_slurm.node.host.cgroup import CgroupEntry
from vhpc_slurm.record import Record

REFUSED = ("/proc", "/sys", "/dev", "/run")
"""Never shared with a guest: processes, the kernel, devices, sockets, and the run folders of jobs."""


class SharedDirectory(Record, frozen=True):
    """A directory that becomes ``/share``, the only host directory that the helper sees."""

    path: str
    read_only: bool


class Confinement(Record, frozen=True):
    """Settings of a helper.

    Attributes:
        program: path of vhpc-confine.
        who: its rights.
        entry: how it enters its generation's control group; None for none.
        cpus: OS CPU numbers that it may use; empty for all.
        limits: resource limits by name: ``nofile``, ``fsize`` (bytes), ``core``, ``nproc``.
        share: None: it keeps the host's root directory.
        refuse: directories that may not be shared, in addition to ``REFUSED``.
    """

    program: str
    who: process.Credentials
    entry: CgroupEntry | None = None
    cpus: tuple[int, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    share: SharedDirectory | None = None
    refuse: tuple[str, ...] = ()

    def options(self, report_fd: int, procs: Sequence[int]) -> list[str]:
        """Options of vhpc-confine."""
        words = [f"--uid={self.who.uid}", f"--gid={self.who.gid}", f"--report-fd={report_fd}"]
        if self.who.groups:
            words.append(f"--groups={','.join(map(str, self.who.groups))}")
        if self.cpus:
            words.append(f"--cpus={format_cpu_list(self.cpus)}")
        words += [f"--cgroup-fd={fd}" for fd in procs]
        words += [f"--limit={name}={value}" for name, value in (("core", 0), *self.limits)]
        if self.share is not None:
            words.append(f"--share={self.share.path}")
            words += ["--read-only"] if self.share.read_only else []
            words += [f"--refuse={path}" for path in (*REFUSED, *self.refuse)]
        return words


class ShareAbsentError(Exception):
    """The user cannot enter the directory to share; the text has the reason."""


class ShareRefusedError(UserError):
    """The directory to share leads to a place that no guest may see."""


class Started(Struct):
    """A started helper; ``finish`` waits until it runs its program."""

    ref: process.ProcessRef
    name: str
    confinement: Confinement
    _report: int
    _said: bytes = b""

    @property
    def real_path(self) -> str:
        """The real path of the shared directory; empty if it could not be opened, or before ``finish``."""
        lines = self._said.decode(errors="replace").splitlines()
        return next((line[7:] for line in lines if line.startswith("opened ")), "")

    def finish(self, timeout_s: float) -> process.ProcessRef:
        """Wait until the program is executed.

        Raises:
            ShareAbsentError: the user cannot enter the shared directory.
            ShareRefusedError: it may not be shared.
            UserError: the user has ended or stopped the helper, or serves a file system that hangs.
            NodeError: any other failure.
        """
        until = time.monotonic() + timeout_s
        try:
            while select.select([self._report], [], [], max(0.0, until - time.monotonic()))[0]:
                more = os.read(self._report, 4096)
                if not more:
                    return self._outcome()
                self._said += more
                if len(self._said) > 1 << 16:
                    raise NodeError(f"cannot start {self.name}", "vhpc-confine wrote more than expected")
        finally:
            os.close(self._report)
        raise self._stuck(timeout_s)

    def _outcome(self) -> process.ProcessRef:
        said = [line.partition(" ") for line in self._said.decode(errors="replace").splitlines()]
        word, _, text = said[-1] if said else ("", "", "")
        if word == "ready":
            return self.ref
        process.wait_gone(self.ref, 1.0)
        if word == "absent":
            raise ShareAbsentError(text)
        if word == "refused":
            assert self.confinement.share is not None
            raise ShareRefusedError(
                f"{self.confinement.share.path} cannot be shared with the guest",
                f"it leads to {text} of the node",
                "submit the job from another directory",
            )
        if word == "failed":
            raise NodeError(f"cannot start {self.name}", text, "see: vhpc doctor")
        raise disturbed(self.name, [self.ref]) or NodeError(
            f"cannot start {self.name}", "vhpc-confine ended without a message", "is it installed?"
        )

    def _stuck(self, timeout_s: float) -> UserError | NodeError:
        """Why the helper did not answer: the user has stopped it, or a file system does not answer."""
        waited = f"waited {timeout_s:.0f} s"
        if error := disturbed(self.name, [self.ref]):
            return error
        share = self.confinement.share
        mounts = [] if share is None else fuse.mounts(self.confinement.who.uid)
        if share is not None and mounts and fuse.waits(self.ref.pid):
            return UserError(
                f"{share.path} does not answer",
                f"{waited}; it is on a FUSE file system of yours ({mounts[0].place})",
                "end the process that serves it, or submit the job from another directory",
            )
        if share is None or b"opened" in self._said:
            return NodeError(f"cannot start {self.name}", waited, "check the node's load and logs")
        return NodeError(f"{share.path} does not answer", waited, "check the file system")


def start(
    argv: Sequence[str],
    confinement: Confinement,
    *,
    generation: str,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> Started:
    """Start a helper that continues when the hook ends.

    Args:
        argv: its command, with an absolute path (in its own root directory).
        confinement: its settings.
        generation: marker that a scan finds it with.
        stderr: descriptor of its stdout and stderr.
        pass_fds: descriptors that it inherits with their numbers.

    Raises:
        NodeError: it cannot be started.
    """
    entry = confinement.entry or CgroupEntry()
    report, said = os.pipe2(os.O_CLOEXEC)
    try:
        with _opened(entry.procs) as procs:
            command = [*entry.prefix, confinement.program, *confinement.options(said, procs), "--", *argv]
            ref = process.spawn(
                command, generation=generation, stderr=stderr, pass_fds=(*pass_fds, *procs, said)
            )
    except (NodeError, OSError) as err:
        os.close(report)
        if isinstance(err, NodeError):
            raise
        raise NodeError(f"cannot start {argv[0]}", str(err)) from err
    finally:
        os.close(said)
    return Started(ref, argv[0], confinement, report)


class DisturbedError(UserError):
    """The job's user has disturbed a helper of a guest: by a signal, or at a limit of own processes."""


def disturbed(name: str, refs: Sequence[process.ProcessRef]) -> DisturbedError | None:
    """The error if a signal has ended or stopped one of a job's helpers, otherwise None.

    Only root and the job's user can send a signal.
    """
    for ref in refs:
        number, stopped = process.killed_by(ref), process.is_stopped(ref)
        if number or stopped:
            return DisturbedError(
                f"{name}, which the guest needs, was {'stopped' if stopped else 'ended'} by a signal",
                "" if stopped else process.signal_name(number),
                "one of your processes has sent it, or the node's memory ran out; submit the job again",
            )
    return None


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        fds = []
        for path in paths:
            fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        yield fds
