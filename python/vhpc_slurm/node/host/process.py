# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the hook that starts them, and how to end exactly these.

A pid alone does not identify a process (it is reused), so a process is
identified by pid and start time, and signalled through a pidfd.  Because a
crash can happen between the start and the recording of the pid, every process
has its generation in its environment, where a scan of /proc finds it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.node.host import fuse
from vhpc_slurm.record import Record
from vhpc_slurm.terminal import printable

MARKER = "VHPC_GENERATION"
FUSE_S = 1.0
"""So long after SIGKILL a process may wait for a FUSE file system, before that is aborted."""
_DEAD = "ZX"
_POLL_S = 0.02
_SCAN_S = 5.0
_SCAN_MOST_S = 20.0
SETPRIV = "/usr/bin/setpriv"


class ProcessRef(Record, frozen=True):
    """Identity of a process: its pid and its start time in clock ticks since boot."""

    pid: int
    started: int


class Credentials(Record, frozen=True):
    """User and groups of a process."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def drop_to(who: Credentials) -> list[str]:
    """The argv prefix that reduces a command to the rights of ``who``.

    setpriv(1) does it between fork and exec, so no Python code runs there; the
    process can never regain a capability, not even by a setuid file.
    """
    groups = ",".join(str(g) for g in who.groups)
    return [
        SETPRIV,
        f"--reuid={who.uid}",
        f"--regid={who.gid}",
        f"--groups={groups}" if groups else "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--",
    ]


def spawn(
    argv: Sequence[str],
    *,
    generation: str,
    stderr: int,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ProcessRef:
    """Start a process that continues when the hook ends.

    It has its own session and none of the hook's pipes (slurmd kills the
    process group of a finished script and waits for its stdout to close).

    Args:
        argv: command with an absolute path.
        generation: the marker that a scan finds it with.
        stderr: descriptor of its stdout and stderr.
        pass_fds: descriptors that it inherits with their numbers.
        stdin: descriptor of its standard input.
        variables: further variables of its environment.

    Raises:
        NodeError: it cannot be started.
    """
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=stderr,
            stderr=stderr,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", MARKER: generation, **variables},
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as err:
        raise NodeError(f"cannot start {argv[0]}", str(err), "is it installed?") from err
    child.returncode = 0  # not waited for: prevents a warning of Popen's destructor
    # even if it has ended, it has not been reaped: its start time can be read
    return ProcessRef(child.pid, _stat(child.pid)[1])


def run_briefly(
    argv: Sequence[str], data: bytes, timeout_s: float
) -> subprocess.CompletedProcess[bytes] | None:
    """Run a command that may block in a file system; None if it took longer than ``timeout_s``.

    Then it is killed and not waited for: a process that is blocked in the kernel
    does not end before the file system answers.

    Raises:
        OSError: it cannot be started.
    """
    pipe = subprocess.PIPE
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", env=environment)
    try:
        out, err = child.communicate(data, timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return None
    return subprocess.CompletedProcess(argv, child.returncode, out, err)


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it has no living thread.

    The kernel reports the end of a process (pidfd, wait) when all of its threads
    are reaped; a traced thread is reaped when its tracer waits for it, perhaps
    never.  A zombie runs no code, and holds no memory and no descriptor.
    """
    try:
        state, started = _stat(pid)
        if state in _DEAD:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            if all(_stat(pid, f"/task/{task.name}")[0] in _DEAD for task in tasks):
                return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return started


def is_stopped(ref: ProcessRef) -> bool:
    """Whether a signal (or a tracer) has stopped the process."""
    try:
        state, started = _stat(ref.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return started == ref.started and state in "Tt"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal N`` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stat(pid: int, task: str = "") -> tuple[str, int]:
    """(state, start time in clock ticks since boot), from proc(5)'s stat."""
    stat = Path(f"/proc/{pid}{task}/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0].decode("ascii"), int(fields[19])


class EndedError(Exception):
    """A process to watch has ended."""


@contextlib.contextmanager
def watched(refs: Sequence[ProcessRef]) -> Iterator[list[int]]:
    """Pidfds of processes, for a process that must detect the end of one.

    Raises:
        EndedError: a process has ended already.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for ref in refs:
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(ref.pid))
                opened.callback(os.close, fds[-1])
            if not alive(ref):
                raise EndedError(f"process {ref.pid} has ended")
        yield fds


def alive(ref: ProcessRef) -> bool:
    """Whether this process still runs."""
    return start_time(ref.pid) == ref.started


def killed_by(ref: ProcessRef) -> int:
    """The signal that ended a child; 0 if it lives, has ended by itself, or is not a child."""
    how, number = _end_of(ref)
    return number if how in (os.CLD_KILLED, os.CLD_DUMPED) else 0


def exit_status(ref: ProcessRef) -> int | None:
    """The exit status of a child; None if it lives, was ended by a signal, or is not a child."""
    how, number = _end_of(ref)
    return number if how == os.CLD_EXITED else None


def _end_of(ref: ProcessRef) -> tuple[int, int]:
    with contextlib.suppress(ChildProcessError):
        if end := os.waitid(os.P_PID, ref.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return end.si_code, end.si_status
    return 0, 0


def marked(generation: str | None = None) -> Iterator[tuple[ProcessRef, str]]:
    """Processes that carry a generation's marker (any generation's when None).

    Used in addition to control groups, because a process may change its
    environment.  A process may be missed if the one that starts it ends while
    the node's processes are read, so they are read twice.
    """
    found = set()
    for _ in range(2):
        for pid, name in scan(_marker):
            started = start_time(pid)
            if started is not None and generation in (None, name) and (pid, started) not in found:
                found.add((pid, started))
                yield ProcessRef(pid, started), name


def scan(read: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    """The non-empty results of ``read`` for each process on this node; one line each.

    Reading a process's memory or mappings waits for that process, which may
    wait for a file system that never answers.  So a child reads; a child that
    blocks is abandoned, and the process that blocked it is skipped.
    """
    pids = [pid for pid in _pids() if pid != os.getpid()]
    while pids:
        found, looked_at = _scan_in_child(pids, read)
        yield from found
        pids = pids[looked_at + 1 :]


def _scan_in_child(pids: Sequence[int], read: Callable[[int], str]) -> tuple[list[tuple[int, str]], int]:
    """The results, and the number of processes read before the child blocked or was done."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for pid in pids:
                os.write(writer, f"{pid} {read(pid)}\n".encode(errors="replace"))
        os._exit(0)
    os.close(writer)
    raw = b""
    try:
        while _says_more(child, reader):
            more = os.read(reader, 65536)
            if not more:
                break
            raw += more
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lines = [line.split(" ", 1) for line in raw.decode(errors="replace").splitlines()]
    return [(int(pid), said) for pid, said in lines if said], len(lines)


def _says_more(child: int, reader: int) -> bool:
    """Wait for output of a scanning child; False if it is blocked.

    A child that only lacks CPU time, on a busy machine or on one that was suspended, is not blocked.
    """
    until = time.monotonic() + _SCAN_MOST_S
    while not select.select([reader], [], [], _SCAN_S)[0]:
        if _stat(child)[0] != "R" or time.monotonic() > until:
            return False
    return True


def _marker(pid: int) -> str:
    prefix = f"{MARKER}=".encode()
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    found = next((item[len(prefix) :] for item in environ.split(b"\0") if item.startswith(prefix)), b"")
    return printable(found.decode(errors="replace"))[:100]


def of_uid(uid: int) -> Iterator[ProcessRef]:
    """Living processes whose real or effective uid is ``uid``."""
    for pid, owners in _owners():
        started = start_time(pid) if uid in owners else None
        if started is not None:
            yield ProcessRef(pid, started)


def uids_in_use() -> set[int]:
    """Real and effective uids of all processes."""
    return {uid for _, owners in _owners() for uid in owners}


def _owners() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (real uid, effective uid)) of every process; a boot waits for it, and nodes have thousands."""
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:  # noqa: PTH123 - Path takes longer
                status = file.read(4096)
        except OSError:
            continue
        _, found, rest = status.partition(b"\nUid:")
        if found:
            real, effective, _ = rest.split(None, 2)
            yield pid, (int(real), int(effective))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only


def end(ref: ProcessRef, *, grace_s: float = 0.0, kill_s: float = 10.0) -> None:
    """End a process and verify it: SIGTERM first if there is a grace time, then SIGKILL.

    Raises:
        TeardownError: it survives SIGKILL for ``kill_s`` seconds.
    """
    # after a reboot the pid may be that of a thread, for which pidfd_open(2) fails with EINVAL or ENOENT
    if not alive(ref):
        return
    try:
        fd = os.pidfd_open(ref.pid)
    except ProcessLookupError:
        return
    try:
        if not alive(ref):
            return
        steps = [(signal.SIGTERM, grace_s)] if grace_s > 0 else []
        for signum, wait_s in [*steps, (signal.SIGKILL, min(FUSE_S, kill_s)), (signal.SIGKILL, kill_s)]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)
            if select.select([fd], [], [], wait_s)[0] or not alive(ref):
                _reap(ref.pid)
                return
            if signum == signal.SIGKILL:
                fuse.end_waits(ref.pid)
    finally:
        os.close(fd)
    raise TeardownError(
        f"process {ref.pid} does not end",
        "it is probably stuck in the kernel",
        "check its kernel stack, or reboot the node",
    )


def last_lines(data: bytes) -> str:
    """The last three lines of a program's output, as one line for an error message."""
    lines = data.decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-3:] if line.strip())[-400:]


def wait_gone(ref: ProcessRef, timeout_s: float) -> bool:
    """Wait until a process has ended; False if it still runs after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened:
        fds = []
        with contextlib.suppress(OSError):  # it has ended, or its pid is that of a thread now
            fds.append(os.pidfd_open(ref.pid))
            opened.callback(os.close, fds[0])
        while alive(ref):
            if time.monotonic() >= until:
                return False
            # a pidfd may tell of the end before the last thread is reaped, or, with a tracer, long after it
            if select.select(fds, [], [], _POLL_S)[0] and alive(ref):
                time.sleep(_POLL_S)
    return True


def _reap(pid: int) -> None:
    """Reap the process if it is a child; otherwise its parent does."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
