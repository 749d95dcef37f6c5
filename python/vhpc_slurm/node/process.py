"""Processes that outlive the hook that starts them, and how to end exactly those.

A pid alone is no identity (it is reused), so a process is named by pid and
start time, and signalled through a pidfd.  Because a crash can fall between
the start and the note of the pid, every process carries its generation in its
environment, where a scan of /proc finds it again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vhpc_slurm.errors import NodeError, TeardownError

MARKER = "VHPC_GENERATION"
SETPRIV = "/usr/bin/setpriv"


@dataclass(frozen=True)
class ProcessRef:
    """A process for certain: its pid and its start time in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True)
class Credentials:
    """Whom a process runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def drop_to(who: Credentials) -> list[str]:
    """The argv prefix that leaves a command nothing but ``who``'s own rights.

    setpriv(1) does it between fork and exec, so no Python code runs there; no
    capability, not even one of a setuid file, can come back afterwards.
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
    who: Credentials,
    generation: str,
    log: Path,
    pass_fds: Sequence[int] = (),
    open_files: int | None = None,
) -> ProcessRef:
    """Start a process that lives on when the hook ends.

    It has a session of its own and none of the hook's pipes (slurmd kills the
    process group of a finished script and waits for its stdout to close).

    Args:
        argv: command with an absolute path.
        who: credentials it runs with.
        generation: the marker that a scan finds it by.
        log: file that its stdout and stderr are appended to.
        pass_fds: descriptors that it inherits under their numbers.
        open_files: RLIMIT_NOFILE that it should have, as far as we may give it.

    Raises:
        NodeError: it cannot be started.
    """
    if open_files:
        _raise_open_files(open_files)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        out = os.open(log, flags, 0o600)
        try:
            child = subprocess.Popen(
                [*drop_to(who), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", MARKER: generation},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        finally:
            os.close(out)
    except OSError as err:
        raise NodeError(f"cannot start {argv[0]}", str(err), "is it installed?") from err
    child.returncode = 0  # it is not ours to wait for: keep Popen's destructor from complaining
    started = start_time(child.pid)
    if started is None:
        raise NodeError(f"{argv[0]} ended at once", tail(log))
    return ProcessRef(child.pid, started)


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@contextlib.contextmanager
def watched(refs: Sequence[ProcessRef]) -> Iterator[list[int]]:
    """Pidfds of processes, for somebody who has to know when one ends.

    Raises:
        NodeError: one has ended already.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for ref in refs:
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(ref.pid))
                opened.callback(os.close, fds[-1])
            if not alive(ref):
                raise NodeError(
                    f"process {ref.pid} has ended", "a guest needs it", "see the log of the hooks"
                )
        yield fds


def alive(ref: ProcessRef) -> bool:
    """Whether that very process still runs."""
    return start_time(ref.pid) == ref.started


def killed_by(ref: ProcessRef) -> int:
    """The signal that ended a child of ours; 0 when it lives, has ended by itself, or is no child."""
    try:
        end = os.waitid(os.P_PID, ref.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return end.si_status if end and end.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0


def marked(generation: str | None = None) -> Iterator[tuple[ProcessRef, str]]:
    """Processes that carry a generation's marker (any generation's when None)."""
    prefix = f"{MARKER}=".encode()
    for pid in _pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        for item in environ.split(b"\0"):
            if item.startswith(prefix):
                name = item[len(prefix) :].decode(errors="replace")
                started = start_time(pid)
                if started is not None and pid != os.getpid() and generation in (None, name):
                    yield ProcessRef(pid, started), name


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
    """(pid, (real uid, effective uid)) of every process."""
    for pid in _pids():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        line = next((ln for ln in status.splitlines() if ln.startswith("Uid:")), "")
        if line:
            real, effective = line.split()[1:3]
            yield pid, (int(real), int(effective))


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def end(ref: ProcessRef, *, grace_s: float = 0.0, kill_s: float = 10.0) -> None:
    """End a process and see it gone: SIGTERM first when there is a grace, then SIGKILL.

    Raises:
        TeardownError: it survives SIGKILL for ``kill_s`` seconds.
    """
    try:
        fd = os.pidfd_open(ref.pid)
    except ProcessLookupError:
        return
    try:
        if not alive(ref):
            return
        steps = [(signal.SIGTERM, grace_s)] if grace_s > 0 else []
        for signum, wait_s in [*steps, (signal.SIGKILL, kill_s)]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)
            if select.select([fd], [], [], wait_s)[0]:
                _reap(ref.pid)
                return
    finally:
        os.close(fd)
    raise TeardownError(
        f"process {ref.pid} does not die",
        "it is likely stuck in the kernel",
        "look at its stack, or reboot the node",
    )


def tail(path: Path, limit: int = 400) -> str:
    """The end of a log as one line, for an error message; empty when there is none."""
    try:
        data = path.read_bytes()[-limit:]
    except OSError:
        return ""
    lines = data.decode(errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-3:] if line.strip())


def wait_gone(ref: ProcessRef, timeout_s: float) -> bool:
    """Wait until a process has ended; False when it still runs after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while alive(ref):
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def _raise_open_files(wanted: int) -> None:
    """Raise our own limit, which children inherit; without CAP_SYS_RESOURCE only up to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (wanted, hard):
        with contextlib.suppress(ValueError, PermissionError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, hard)))
            return


def _reap(pid: int) -> None:
    """Collect it when it is our own child; else its parent does."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
